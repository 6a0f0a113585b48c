"""Prompts: text or token ids of several lengths -> one left-padded batch; and tokenizers that fit the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from glassengine.errors import UsageError
from glassengine.program import load_inputs

if TYPE_CHECKING:
    from glassengine.engine.engine import Engine


def load_tokenizer(directory: str | Path) -> Any:
    """Load a tokenizer of transformers; code that comes with it is never run.

    Raises:
        UsageError: There is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            "the tokenizer cannot be loaded", got=f"{directory}: {first}", hint="--tokenizer DIRECTORY"
        ) from error


def choose_tokenizer(engine: Engine, directory: str | Path | None) -> Any:
    """Return the tokenizer to use: that of `directory`, or the engine's own.

    Raises:
        UsageError: It has other tokens than the engine's own, or more than the model.
    """
    if directory is None:
        tokenizer = engine.tokenizer
    else:
        if not Path(directory).is_dir():
            raise UsageError("unknown tokenizer directory", got=str(directory), hint="--tokenizer DIRECTORY")
        tokenizer = load_tokenizer(directory)
        if engine.manifest.tokenizer and tokenizer.get_vocab() != engine.tokenizer.get_vocab():
            raise UsageError(
                "the tokenizer does not belong to the model",
                got=f"{len(tokenizer)} tokens in {directory}",
                expected=f"the {len(engine.tokenizer)} tokens of the engine's own",
                hint="leave out --tokenizer to use it",
            )
    size = engine.manifest.vocab_size
    if size is not None and len(tokenizer) > size:
        raise UsageError(
            "the tokenizer does not belong to the model",
            got=f"{len(tokenizer)} tokens",
            expected=f"at most {size}, the model's vocabulary",
            hint="--tokenizer DIRECTORY of the model that was built",
        )
    return tokenizer


def read_input_ids(path: Path) -> list[list[int]]:
    """Read token ids: .json (a list, a list of lists, or {"input_ids": ...}), .npz, .pt or .safetensors.

    Raises:
        UsageError: It cannot be read, or holds something else.
    """
    if path.suffix == ".json" and path.is_file():
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read", got=f"{type(error).__name__}: {error}") from error
        data = data.get("input_ids") if isinstance(data, dict) else data
    else:
        step = load_inputs(str(path))[0]
        tensor = step.get("input_ids")
        data = tensor.tolist() if isinstance(tensor, torch.Tensor) else tensor
    return as_rows(data, str(path))


def as_rows(data: Any, origin: str) -> list[list[int]]:
    """Return token ids as one list per sequence.

    Raises:
        UsageError: They are something else than whole numbers, one row or several.
    """
    if isinstance(data, torch.Tensor):
        data = data.tolist()
    rows = [data] if isinstance(data, (list, tuple)) and data and isinstance(data[0], int) else data
    if (
        not isinstance(rows, (list, tuple))
        or not rows
        or not all(isinstance(row, (list, tuple)) and row for row in rows)
        or not all(isinstance(token, int) and not isinstance(token, bool) for row in rows for token in row)
    ):
        raise UsageError(
            "these are no token ids",
            got=f"{type(data).__name__} in {origin}",
            expected="input_ids: a list of whole numbers, or one list per sequence",
        )
    return [list(row) for row in rows]


def encode(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Tokenize as transformers does by default, special tokens included.

    Raises:
        UsageError: A prompt has no tokens at all.
    """
    rows = [list(tokenizer(text)["input_ids"]) for text in prompts]
    for text, row in zip(prompts, rows, strict=True):
        if not row:
            raise UsageError("the prompt has no tokens", got=repr(text), hint="--input-text TEXT")
    return rows


def pad_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (token ids, attention mask), both int64 [B, S] of the longest row."""
    length = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (length - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    return ids, mask
