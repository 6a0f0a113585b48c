"""`glass record gguf:FILE`: a serving engine as what is recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from glassengine.capture.target import KnownTokens
from glassengine.errors import UsageError
from glassengine.program import load_inputs
from glassengine.recording.reader import Recording
from glassengine.results import RecordedTarget
from glassengine.serving.protocol import (
    ServedInDtype,
    ServingOptions,
    ServingRun,
    open_served,
)
from glassengine.writing import remove_tree


def record_served(
    target: str,
    path: str | Path,
    *,
    inputs: str | None = None,
    max_new_tokens: int | None = None,
    tokens_of: str | None = None,
    library: str | None = None,
    python: str | None = None,
    dtype: str = "auto",
    as_deployed: bool = False,
    overwrite: bool = False,
) -> RecordedTarget:
    """Run a serving engine on one prompt and record every tensor that it shows.

    Args:
        target: `gguf:FILE`, `genai:FOLDER`, `vllm:FOLDER`, or another kind.
        path: Directory of the recording.
        inputs: Names token ids, as for `record_target`.
        max_new_tokens: Tokens to generate; one by default, which is the prefill alone.
        tokens_of: A recording whose prompt and tokens are forced on the engine.
        library: Of the engine.
        python: Interpreter that the engine is installed for.
        dtype: In which it computes, for engines that take one; "auto" for the finest.
        as_deployed: As it runs by default, rather than as exactly as it can.
        overwrite: Replace an existing recording.

    Raises:
        UsageError: No token ids of one row are given, or the engine cannot be opened.
        BackendError: The engine fails.
    """
    served = open_served(target, ServingOptions(library=library, python=python, dtype=dtype))
    assert served is not None
    if dtype != "auto" and not isinstance(served, ServedInDtype):
        raise UsageError("the engine computes in the dtypes of its file", got=f"--dtype {dtype}", hint="leave it out")
    known = KnownTokens(tokens_of) if tokens_of is not None else None
    given: Sequence[Mapping[str, Any]]
    if inputs is not None:
        given = load_inputs(inputs)
    elif known is not None:
        given = [known.prompts()]
    else:
        raise UsageError(
            "the engine needs token ids", hint="--inputs ids.json with input_ids, or --tokens-of RECORDING"
        )
    prompt = _row(given)
    forced = known.following(given)[0][0].tolist() if known is not None else None
    steps = len(forced) if forced is not None else max(0, (max_new_tokens or 1) - 1)
    target_path = Path(path)
    if overwrite and target_path.is_dir():
        Recording.open(target_path)  # nothing but a recording is replaced
        remove_tree(target_path)
    served.record(ServingRun(prompt, steps, forced, as_deployed), target_path)
    opened = Recording.open(target_path)
    total = sum(entry.nbytes for entry in opened.entries)
    return RecordedTarget(str(path), len(opened.steps), len(opened.entries), len(opened.left_out), total)


def _row(given: Sequence[Mapping[str, Any]]) -> list[int]:
    if len(given) != 1 or "input_ids" not in given[0]:
        got = f"{len(given)} inputs" if len(given) != 1 else ", ".join(given[0])
        raise UsageError("a serving engine is given one prompt", got=got, expected="input_ids [1, tokens]")
    ids = torch.as_tensor(given[0]["input_ids"]).long()
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.shape[0] != 1 or not ids.shape[1]:
        raise UsageError(
            "a serving engine is given one prompt", got=f"input_ids {list(ids.shape)}", expected="[1, tokens]"
        )
    mask = torch.as_tensor(given[0].get("attention_mask", torch.ones_like(ids))).reshape(ids.shape).bool()
    return [int(token) for token in ids[mask]]
