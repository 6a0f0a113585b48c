"""Engines of one model side by side: what they are, how large, how fast, and how far apart their logits are.

All engines run the same steps in lockstep, with the tokens that the first one chose, so that a changed token does not
make the steps after it incomparable; their logits are judged by the noise floor of the stored program. Times are taken
afterwards, in rounds that alternate between the engines: what slows the machine down for a while slows all of them.

Shape legend: B batch, S tokens of the prompt.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from glassengine import environment
from glassengine.diagnose.engines.logits import judge_logits, measure_floors, token_differences, worst
from glassengine.diagnose.engines.manifests import options_that_differ, require_one_model, sizes
from glassengine.engine.prompts.files import as_rows, read_input_ids
from glassengine.engine.prompts.prompts import pad_left
from glassengine.engine.prompts.tokenizing import encode
from glassengine.engine.run.engine import Engine
from glassengine.engine.run.load import load
from glassengine.errors import GlassError, UsageError
from glassengine.results.engines import EngineColumn, SideBySide, StepDifference, TokenDifference

PROMPT_TOKENS = 16
"""Length of the prompt that is made up where none is given."""


def side_by_side(
    engines: Sequence[str | Path],
    *,
    prompts: Sequence[str] | None = None,
    input_ids: str | Path | torch.Tensor | Sequence[Sequence[int]] | None = None,
    max_new_tokens: int = 16,
    rounds: int = 5,
    trust_engine: bool = False,
) -> SideBySide:
    """Run engines of one model on the same tokens and compare sizes, times and logits with those of the first.

    Args:
        engines: Two or more directories.
        prompts: Texts, one batch, for the tokenizer of the first engine that has one.
        input_ids: Token ids instead, as in `Engine.generate`; with neither, a fixed made-up prompt.
        max_new_tokens: Steps: the prefill and one decode step fewer than this.
        rounds: Timed rounds.
        trust_engine: Load native code of engines that were built elsewhere, as for `load`.

    Raises:
        UsageError: Fewer than two engines, or the prompt does not fit.
        IncomparableError: The engines are not of one model.
        CorruptError: An engine is damaged.
        BackendError: An engine cannot run here.
    """
    if len(engines) < 2:
        raise UsageError("too few engines to compare", got=f"{len(engines)}")
    if max_new_tokens < 1 or rounds < 1:
        raise UsageError("nothing would be run", got=f"{max_new_tokens} tokens, {rounds} rounds", expected="at least 1")
    if prompts and input_ids is not None:
        raise UsageError("text and token ids were both given", hint="give one of them")
    loaded = [load(path, trust=trust_engine) for path in engines]
    notes = require_one_model(loaded)
    rows = _rows(loaded, prompts, input_ids, max_new_tokens)
    ids, mask = pad_left(rows, 0)
    tokens = _choose(loaded[0], ids, mask, max_new_tokens)
    floors, more = _floors(loaded, ids, mask, tokens)
    found = _lockstep(loaded, ids, mask, tokens, floors)
    times = _time(loaded, ids, mask, tokens, rounds)
    options = options_that_differ(loaded)
    columns = tuple(
        _column(engine, options[index], times[index], found[index - 1] if index else {})
        for index, engine in enumerate(loaded)
    )
    agreement = worst([column.agreement for column in columns if column.agreement is not None])
    return SideBySide(
        columns=columns,
        ok=agreement != "beyond",
        agreement=agreement,
        prompt_token_ids=tuple(tuple(row) for row in rows),
        token_ids=tuple(tuple(row) for row in torch.stack(tokens, 1).tolist()),
        rounds=rounds,
        num_threads=torch.get_num_threads(),
        cpu=environment.cpu_name(),
        notes=(*notes, *more),
    )


def _rows(
    engines: Sequence[Engine], prompts: Sequence[str] | None, input_ids: Any, max_new_tokens: int
) -> list[list[int]]:
    if prompts:
        with_tokenizer = next((engine for engine in engines if engine.manifest.tokenizer), engines[0])
        return encode(with_tokenizer.tokenizer, list(prompts))
    if input_ids is not None:
        is_file = isinstance(input_ids, (str, Path))
        return read_input_ids(Path(input_ids)) if is_file else as_rows(input_ids, "input_ids")
    shortest = min(engine.manifest.max_seq_len or 0 for engine in engines)
    size = max(min(PROMPT_TOKENS, shortest - max_new_tokens), 1)
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(engines[0].manifest.vocab_size or 2, (size,), generator=generator).tolist()]


def _choose(engine: Engine, ids: torch.Tensor, mask: torch.Tensor, num_steps: int) -> list[torch.Tensor]:
    """Return the likeliest tokens [B] of each step."""
    session = engine.session(ids.shape[0], ids.shape[1] + num_steps)
    tokens = [session.prefill(ids, mask)[:, -1].argmax(-1)]
    while len(tokens) < num_steps:
        tokens.append(session.decode(tokens[-1])[:, -1].argmax(-1))
    return tokens


def _floors(
    engines: Sequence[Engine], ids: torch.Tensor, mask: torch.Tensor, tokens: Sequence[torch.Tensor]
) -> tuple[list[list[float] | None], list[str]]:
    """Return the noise floor of each step for each engine but the first, and why there is none."""
    known: dict[tuple[str, torch.dtype], list[float]] = {}
    floors: list[list[float] | None] = []
    notes = []
    for engine in engines[1:]:
        # The noise of the coarser dtype, on the weights of the finer one: those of the other may have been rounded.
        finer, coarser = sorted((engines[0], engine), key=lambda e: torch.finfo(_dtype(e)).eps)
        key = finer.manifest.dtype, _dtype(coarser)
        try:
            if key not in known:
                known[key] = measure_floors(finer.program, ids, mask, tokens, _dtype(coarser))
            floors.append(known[key])
        except GlassError as error:
            floors.append(None)
            notes.append(f"{engine.directory}: the noise floor was not measured: {error.what}")
    return floors, notes


def _dtype(engine: Engine) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, engine.manifest.dtype)
    return dtype


def _lockstep(
    engines: Sequence[Engine],
    ids: torch.Tensor,
    mask: torch.Tensor,
    tokens: Sequence[torch.Tensor],
    floors: Sequence[Sequence[float] | None],
) -> list[dict[str, Any]]:
    """Run all engines with the same tokens; return what was found for each but the first."""
    sessions = [engine.session(ids.shape[0], ids.shape[1] + len(tokens)) for engine in engines]
    steps: list[list[StepDifference]] = [[] for _ in floors]
    changed: list[list[TokenDifference]] = [[] for _ in floors]
    valid = mask.bool()
    for step in range(len(tokens)):
        first, *others = [s.decode(tokens[step - 1]) if step else s.prefill(ids, mask) for s in sessions]
        for index, (candidate, floor) in enumerate(zip(others, floors, strict=True)):
            steps[index].append(judge_logits(step, first[valid], candidate[valid], floor[step] if floor else None))
            changed[index] += token_differences(step, first[:, -1], candidate[:, -1])
        valid = torch.ones((len(ids), 1), dtype=torch.bool)
    return [
        {
            "steps": tuple(differences),
            "num_different_tokens": len(others),
            "first_different_token": others[0] if others else None,
            "agreement": worst([difference.agreement for difference in differences]),
        }
        for differences, others in zip(steps, changed, strict=True)
    ]


def _time(
    engines: Sequence[Engine], ids: torch.Tensor, mask: torch.Tensor, tokens: Sequence[torch.Tensor], rounds: int
) -> list[dict[str, Any]]:
    prefills: list[list[float]] = [[] for _ in engines]
    decodes: list[list[float]] = [[] for _ in engines]
    for turn in range(rounds):
        for place in range(len(engines)):
            # Another engine is the first in each round: the first one finds the caches of the processor as they were.
            index = (place + turn) % len(engines)
            session = engines[index].session(ids.shape[0], ids.shape[1] + len(tokens))
            start = time.perf_counter()
            session.prefill(ids, mask)
            prefills[index].append(time.perf_counter() - start)
            for chosen in tokens[:-1]:
                start = time.perf_counter()
                session.decode(chosen)
                decodes[index].append(time.perf_counter() - start)
    return [
        {"prefill_ms": median(first) * 1e3, "decode_ms": median(others) * 1e3 if others else None}
        for first, others in zip(prefills, decodes, strict=True)
    ]


def _column(
    engine: Engine, options: Mapping[str, str], times: Mapping[str, Any], found: Mapping[str, Any]
) -> EngineColumn:
    return EngineColumn(
        engine=str(engine.directory),
        model=str(engine.manifest.model.get("spec")),
        backend=engine.manifest.backend,
        dtype=engine.manifest.dtype,
        added_outputs=tuple(engine.added_outputs),
        options=options,
        **{**sizes(engine), **times, **found},
    )
