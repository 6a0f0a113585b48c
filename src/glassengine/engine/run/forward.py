"""One forward of an engine that does not generate: texts or tensors in, every result by name out.

Shape legend: B texts, S tokens of the longest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from glassengine.engine.prompts.prompts import Request
from glassengine.engine.session.checks import require_module
from glassengine.engine.session.debug_buffers import select_names
from glassengine.engine.session.loaded import LoadedEngine
from glassengine.engine.session.record import EngineRecorder
from glassengine.engine.store.manifest import Manifest
from glassengine.errors import UsageError
from glassengine.program import load_inputs
from glassengine.program.kinds.example_inputs import TEXT_INPUTS
from glassengine.program.representation.signature import named_inputs
from glassengine.results.engines import Forward


def forward(
    engine: LoadedEngine,
    request: Request | None,
    inputs: str | Mapping[str, Any] | None,
    *,
    debug: Sequence[str],
    record: str | Path | None,
    overwrite: bool,
) -> Forward:
    """Run once; `Engine.forward` describes the arguments.

    Raises:
        UsageError: Texts or tensors do not fit the engine, or the recording cannot be written.
        UnknownNameError: A pattern of `debug` names nothing.
    """
    require_module(engine.manifest)
    selected = select_names(engine, debug) if debug else None
    texts: tuple[str, ...] = ()
    rows: list[list[int]] = []
    if request is not None:
        read = request.read(engine)
        texts, rows = read.texts, read.rows
        given: Mapping[str, Any] = text_inputs(engine.manifest, rows, read.tokenizer)
    else:
        given = one_step(inputs)
    start = time.perf_counter()
    outputs = engine(**given)
    seconds = time.perf_counter() - start
    if record is not None:
        names = [entry.name for entry in engine.manifest.outputs]
        with EngineRecorder(record, engine, names, rows, padding="right", overwrite=overwrite) as recorder:
            recorder.write_step(0, outputs, token_ids=rows)
    if selected is not None:
        known = {**named_inputs(given), **outputs}
        outputs = {name: known[name] for name in selected}
    return Forward(texts, tuple(tuple(row) for row in rows), outputs, seconds, None if record is None else str(record))


def text_inputs(manifest: Manifest, rows: Sequence[Sequence[int]], tokenizer: Any) -> dict[str, torch.Tensor]:
    """Return token ids, mask and types [B, S] for those of them that the engine takes, padded on the right.

    Raises:
        UsageError: The engine takes no text, or more than text.
    """
    names = [entry.name for entry in manifest.inputs]
    others = [name for name in names if name not in TEXT_INPUTS]
    if "input_ids" not in names or others:
        raise UsageError(
            f"the engine {manifest.name!r} does not run from text alone",
            got=f"inputs {', '.join(names)}",
            hint="give the tensors: --inputs FILE, or --inputs file.py:factory",
        )
    vocabulary, highest = manifest.model.get("vocab_size"), max(max(row) for row in rows)
    if vocabulary is not None and highest >= vocabulary:
        raise UsageError(
            "a token id is outside the model's vocabulary",
            got=str(highest),
            expected=f"below {vocabulary}",
            hint="use the tokenizer that belongs to the model: --tokenizer DIRECTORY",
        )
    length = max(len(row) for row in rows)
    pad = getattr(tokenizer, "pad_token_id", None) or 0
    padded = {
        "input_ids": [[*row, *[pad] * (length - len(row))] for row in rows],
        "attention_mask": [[1] * len(row) + [0] * (length - len(row)) for row in rows],
        "token_type_ids": [[0] * length for _ in rows],
    }
    if "attention_mask" not in names and len({len(row) for row in rows}) > 1:
        raise UsageError(
            "texts of several lengths need a mask, which this engine does not take",
            got=f"{min(map(len, rows))} to {length} tokens",
            hint="run them one by one",
        )
    return {name: torch.tensor(padded[name]) for name in names}


def one_step(inputs: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the keyword arguments of one forward, of a dict or of what `--inputs` takes.

    Raises:
        UsageError: There are none, or those of several steps.
    """
    if inputs is None:
        raise UsageError("nothing to run on", hint="--input-text TEXT, --input-ids FILE or --inputs FILE")
    if isinstance(inputs, Mapping):
        return inputs
    steps = load_inputs(inputs)
    if len(steps) != 1:
        raise UsageError(f"{inputs} holds {len(steps)} steps", expected="the inputs of one forward")
    return steps[0]
