"""Prompts: texts, files, chats or token ids of several lengths -> one left-padded batch; and tokenizers that fit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from glassengine.engine.prompts.files import (
    Chat,
    Message,
    as_rows,
    read_chat,
    read_input_ids,
    read_prompt_file,
)
from glassengine.engine.prompts.templates import bounded
from glassengine.engine.prompts.tokenizing import encode, require_bounded_decoder
from glassengine.engine.store.manifest import Manifest
from glassengine.errors import CorruptError, UsageError
from glassengine.reading.documents import parsed

TokenIds = str | Path | torch.Tensor | Sequence[int] | Sequence[Sequence[int]]
Images = str | Path | Any | Sequence[str | Path | Any]
"""Files of images, or images of Pillow."""


MAX_SEQUENCES = 1 << 20
"""Of one batch; the settings that come with an engine may ask for any number."""


class Reader(Protocol):
    """Who prompts are read for: an engine."""

    manifest: Manifest

    @property
    def tokenizer(self) -> Any:
        """That of the engine."""


@dataclass(frozen=True)
class Prompts:
    """What a request came to, one entry per sequence.

    Attributes:
        texts: Prompts as text; empty where token ids were given.
        rows: Token ids without padding.
        tokenizer: Of the model; None where there is none and none is needed.
        pixel_values: Of all images in the order of their tokens, [N, C, H, W]; None without images.
    """

    texts: tuple[str, ...]
    rows: list[list[int]]
    tokenizer: Any
    pixel_values: torch.Tensor | None = None

    def repeated(self, count: int) -> Prompts:
        """Return each prompt `count` times in a row, as transformers does for `num_return_sequences`.

        Raises:
            UsageError: There would be more than any engine takes.
        """
        if len(self.rows) * count > MAX_SEQUENCES:
            got = f"{len(self.rows)} prompts, num_return_sequences={count}"
            raise UsageError("too many sequences", got=got, expected=f"at most {MAX_SEQUENCES:,}")
        texts = tuple(text for text in self.texts for _ in range(count))
        return dataclasses.replace(self, texts=texts, rows=[row for row in self.rows for _ in range(count)])


@dataclass(frozen=True)
class Request:
    """What to generate from: exactly one of the first four or `inputs`; `Engine.generate` describes them."""

    prompts: str | Sequence[str] | None = None
    input_ids: TokenIds | None = None
    prompt_file: str | Path | None = None
    chat: Chat | None = None
    images: Images | None = None
    inputs: str | Mapping[str, Any] | None = None
    tokenizer: str | Path | None = None

    def read(self, engine: Reader) -> Prompts:
        """Return the prompts as token ids.

        Raises:
            UsageError: None was given, or several; a file cannot be read; or the tokenizer does not fit.
        """
        sources = {
            "text": self.prompts, "token ids": self.input_ids, "a prompt file": self.prompt_file, "a chat": self.chat,
            "tensors": self.inputs,
        }  # fmt: skip
        given = [name for name, source in sources.items() if source is not None]
        if len(given) != 1:
            raise UsageError(
                f"{' and '.join(given)} were both given" if given else "nothing to generate from",
                hint="--input-text TEXT, or --input-ids FILE, or --input-file FILE, or --chat FILE",
            )
        tokenizer = None
        if self.inputs is not None and not engine.manifest.has_encoder:
            raise UsageError("an engine that generates takes prompts", got="--inputs", hint="--input-text TEXT")
        if (self.input_ids is None and self.inputs is None) or self.tokenizer is not None or engine.manifest.tokenizer:
            tokenizer = choose_tokenizer(engine, self.tokenizer)
        if self.inputs is not None:
            return Prompts((), [], tokenizer)
        if self.input_ids is not None:
            is_file = isinstance(self.input_ids, (str, Path))
            rows = read_input_ids(Path(self.input_ids)) if is_file else as_rows(self.input_ids, "input_ids")  # type: ignore[arg-type]
            return Prompts((), rows, tokenizer)
        if self.chat is not None:
            texts = apply_chat_template(tokenizer, read_chat(self.chat))
            return Prompts(texts, encode(tokenizer, texts, add_special_tokens=False), tokenizer)
        if self.prompt_file is not None:
            texts = read_prompt_file(Path(self.prompt_file))
        else:
            assert self.prompts is not None
            texts = (self.prompts,) if isinstance(self.prompts, str) else tuple(self.prompts)
        if not texts:
            raise UsageError("nothing to generate from", hint="--input-text TEXT")
        return Prompts(texts, encode(tokenizer, texts), tokenizer)


def load_tokenizer(directory: str | Path) -> Any:
    """Load a tokenizer of transformers; code that comes with it is never run.

    Raises:
        UsageError: There is none, or it cannot be read.
        CorruptError: It makes long texts of a few tokens.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        require_bounded_decoder(tokenizer, str(directory))
    except CorruptError:
        raise
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            "the tokenizer cannot be loaded", got=f"{directory}: {first}", hint="--tokenizer DIRECTORY"
        ) from error
    return tokenizer


def choose_tokenizer(engine: Reader, directory: str | Path | None) -> Any:
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


def apply_chat_template(tokenizer: Any, conversations: Sequence[Sequence[Message]]) -> tuple[str, ...]:
    """Return the text of each conversation as the model expects it, up to where the answer begins.

    Raises:
        UsageError: The tokenizer has no chat template, or the template refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            "the tokenizer has no chat template",
            expected="a model that was trained on chats",
            hint="write the prompt as text: --input-text TEXT; or give another --tokenizer DIRECTORY",
        )

    def render() -> str:
        made = [
            tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
            for messages in conversations
        ]
        return json.dumps(made)

    try:
        return tuple(parsed(bounded(render), list[str], "what the chat template made"))
    except CorruptError as error:
        what = "the chat template refuses the messages"
        raise UsageError(what, got=error.got if "failed" in error.what else f"{error.what}: {error.got}") from error


def pad_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (token ids, attention mask), both int64 [B, S] of the longest row."""
    length = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (length - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    return ids, mask
