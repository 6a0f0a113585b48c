"""Engines of one model side by side: what they are, how large, how fast, and how far apart their logits are.

All engines run the same steps in lockstep, with the tokens that the first one chose, so that a changed token does not
make the steps after it incomparable; their logits are judged by the noise floor of the stored program. Times are taken
afterwards, in rounds that alternate between the engines: what slows the machine down for a while slows all of them.

Shape legend: B batch, S tokens of the prompt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from glassengine import environment
from glassengine.engine.files import MAIN, WEIGHTS
from glassengine.engine.manifest import FILE
from glassengine.engine.prompts import as_rows, pad_left, read_input_ids
from glassengine.engine.run.engine import Engine
from glassengine.engine.run.load import load
from glassengine.engine.tokenizing import encode
from glassengine.errors import GlassError, IncomparableError, UsageError
from glassengine.judge.cases import Case, StepInputs, empty_caches
from glassengine.judge.exclusions.masked import valid_mask
from glassengine.judge.replay.reference import ReferenceRun
from glassengine.numerics.distances import measure
from glassengine.numerics.judgement import WRONG
from glassengine.numerics.tolerance import tolerance
from glassengine.program.representation.program import Program
from glassengine.results.engines import AGREEMENTS, Agreement, EngineColumn, SideBySide, StepDifference, TokenDifference

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
        EngineColumn(
            engine=str(engine.directory),
            model=str(engine.manifest.model.get("spec")),
            backend=engine.manifest.backend,
            dtype=engine.manifest.dtype,
            added_outputs=tuple(engine.added_outputs),
            options=options[index],
            **{**sizes(engine), **times[index], **(found[index - 1] if index else {})},
        )
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
            session.prefill(ids, mask, keep=False)
            prefills[index].append(time.perf_counter() - start)
            for chosen in tokens[:-1]:
                start = time.perf_counter()
                session.decode(chosen)
                decodes[index].append(time.perf_counter() - start)
    return [
        {"prefill_ms": median(first) * 1e3, "decode_ms": median(others) * 1e3 if others else None}
        for first, others in zip(prefills, decodes, strict=True)
    ]


BY_FLOOR = "noise floor"
BY_TOLERANCE = "tolerance (uncalibrated)"

FLOOR_STEPS = 4
"""Steps in which the noise floor is measured: each costs several forward passes, some of them in float64."""


def measure_floors(
    program: Program, ids: torch.Tensor, mask: torch.Tensor, tokens: Sequence[torch.Tensor], coarsest: torch.dtype
) -> list[float]:
    """Return the noise floor r of the logits of each step, relative to their root mean square.

    Only the first `FLOOR_STEPS` are measured; the others are given the largest of those. Steps differ: where attention
    may be a near tie: one has ten times the noise of the next.

    Args:
        program: With weights.
        ids: Prompts [B, S], left-padded.
        mask: [B, S], 1 for tokens.
        tokens: Tokens [B] to go on with.
        coarsest: The coarser dtype of the two engines that will be judged.
    """
    steps = min(len(tokens), FLOOR_STEPS)
    inputs = StepInputs.first(Case("side by side", steps, input_ids=ids, attention_mask=mask))
    node = program.output_nodes["logits"]
    floors: list[float] = []
    reference = ReferenceRun(program, coarsest=coarsest)

    def valid(of: torch.fx.Node, value: torch.Tensor) -> torch.Tensor | None:
        return valid_mask(program.sites.by_node[of.name][0], value, inputs)

    with torch.no_grad():
        for step in range(steps):
            if step:
                inputs = inputs.following(tokens[step - 1])
            named = inputs.named()
            reference.step(named if step else named | empty_caches(program, named), lambda *_: None, valid)
            floors.append(reference.relative_floors.pop(node))
    return floors + [max(floors)] * (len(tokens) - steps)


def judge_logits(step: int, baseline: torch.Tensor, candidate: torch.Tensor, floor: float | None) -> StepDifference:
    """Judge the candidate's logits [P, V] of one step; `floor` is what `measure_floors` found, if anything."""
    limit = tolerance(*(str(side.dtype).removeprefix("torch.") for side in (baseline, candidate)))
    figures = measure(baseline, candidate, rtol=limit.rtol, atol=limit.atol)
    same_bits = baseline.dtype == candidate.dtype and torch.equal(
        baseline.contiguous().view(torch.uint8), candidate.contiguous().view(torch.uint8)
    )
    epsilon = max(torch.finfo(side.dtype).eps for side in (baseline, candidate))
    units, noise_ratio, excess = 0.0, 0.0, 0.0
    for expected, actual in zip(baseline, candidate, strict=True):
        # Position by position, so that float64 copies stay small; elements that are not finite are counted in figures.
        expected, actual = expected.double(), actual.double()
        finite = expected.isfinite() & actual.isfinite()
        expected, error = expected[finite], (actual - expected)[finite].abs()
        if error.numel() == 0 or float(error.max()) == 0:
            continue
        scale, largest = float(expected.abs().max()), float(error.max())
        units = max(units, _ratio(largest, epsilon * scale))
        excess = max(excess, _ratio(largest, limit.atol + limit.rtol * scale))
        if floor is not None:
            typical = max(_rms(error), largest / math.sqrt(2 * math.log(2 * error.numel())))
            noise_ratio = max(noise_ratio, _ratio(typical, math.sqrt(2) * floor * _rms(expected)))
    if figures.num_nonfinite_mismatch:
        units = noise_ratio = excess = math.inf
    is_beyond = excess > 1 if floor is None else noise_ratio > WRONG
    return StepDifference(
        step=step,
        agreement="bitwise" if same_bits else "beyond" if is_beyond else "within rounding",
        judged_by=BY_TOLERANCE if floor is None else BY_FLOOR,
        noise_ratio=None if floor is None else noise_ratio,
        rounding_units=units,
        figures=figures,
    )


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def _ratio(value: float, unit: float) -> float:
    return value / unit if unit else math.inf


def token_differences(step: int, baseline: torch.Tensor, candidate: torch.Tensor) -> list[TokenDifference]:
    """Return the rows of logits [B, V] whose likeliest token differs."""
    found = []
    for row, (ours, theirs) in enumerate(zip(baseline.double(), candidate.double(), strict=True)):
        token, other = int(ours.argmax()), int(theirs.argmax())
        if token != other:
            margins = float(ours[token] - ours[other]), float(theirs[other] - theirs[token])
            found.append(TokenDifference(step, row, token, other, *margins))
    return found


def worst(found: Sequence[Agreement]) -> Agreement:
    """Return the worst of `found`, which is not empty."""
    return max(found, key=AGREEMENTS.index)


def require_one_model(engines: Sequence[Engine]) -> tuple[str, ...]:
    """Refuse engines whose logits cannot be compared; return what could not be verified.

    Raises:
        IncomparableError: They differ in class, vocabulary, cache or (in one dtype) weights, or do not generate.
    """
    notes: list[str] = []
    first = engines[0]
    for engine in engines:
        if not engine.manifest.generates:
            raise IncomparableError(
                f"the engine {str(engine.directory)!r} does not generate",
                got=f"kind {engine.manifest.kind}",
                hint="record what it returns and compare the recordings",
            )
    for engine in engines[1:]:
        same_weights = _fingerprint(engine) == _fingerprint(first)
        if _structure(engine) != _structure(first) or (
            engine.manifest.dtype == first.manifest.dtype and not same_weights
        ):
            raise IncomparableError(
                "the engines are not of one model",
                got=_identity(engine),
                expected=_identity(first),
                hint="to judge one model by another: glass check BASELINE --candidate TARGET",
            )
        if not same_weights:
            # A fingerprint is of the values in their own dtype.
            notes.append(
                f"not verified: that the weights of {engine.directory} ({engine.manifest.dtype}) and of "
                f"{first.directory} ({first.manifest.dtype}) are the same but for rounding"
            )
    return tuple(notes)


def _structure(engine: Engine) -> tuple[Any, ...]:
    return engine.manifest.model.get("class"), engine.manifest.vocab_size, engine.manifest.kv_layout


def _fingerprint(engine: Engine) -> Any:
    return engine.manifest.model.get("fingerprint")


def _identity(engine: Engine) -> str:
    manifest = engine.manifest
    return (
        f"{engine.directory}: {manifest.model.get('class')} of {manifest.model.get('spec')}, {manifest.dtype}, "
        f"vocabulary {manifest.vocab_size}, {len(manifest.kv_layout)} layers, weights {_fingerprint(engine)}"
    )


def sizes(engine: Engine) -> dict[str, int]:
    """Return the sizes of an engine on disk in bytes, by the names of `EngineColumn`."""
    files = {entry.path: entry.size for entry in engine.manifest.files}
    return {
        "total_bytes": sum(files.values()) + (engine.directory / FILE).stat().st_size,
        "executable_bytes": sum(size for path, size in files.items() if path.startswith(f"{MAIN}/")),
        "weights_bytes": files.get(WEIGHTS, 0),
    }


def options_that_differ(engines: Sequence[Engine]) -> list[dict[str, str]]:
    """Return for each engine what it was built with, where that is not the same for all."""
    options = [_options(engine) for engine in engines]
    names = list(dict.fromkeys(name for side in options for name in side))
    kept = [name for name in names if len({side.get(name) for side in options}) > 1]
    return [{name: side.get(name, "-") for name in kept} for side in options]


def _options(engine: Engine) -> dict[str, str]:
    manifest = engine.manifest
    return {
        "model": str(manifest.model.get("spec")),
        "max_batch_size": str(manifest.max_batch_size),
        "max_seq_len": str(manifest.max_seq_len),
        "attn_implementation": str(manifest.model.get("attn_implementation")),
        "passes": ", ".join(manifest.passes) or "none",
        "left_out": ", ".join(manifest.left_out) or "none",
        "weights": "beside the executable" if manifest.shares_weights else "within the executable",
        "kv": manifest.kv,
        "graph_level": manifest.graph_level,
        "glassengine": manifest.glassengine,
        **{f"requires {name}": version for name, version in manifest.requires.items()},
        "built on": manifest.cpu,
    }
