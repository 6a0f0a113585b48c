"""`glass check CHECKPOINT --candidate gguf:FILE`: the levels of a serving engine.

    weights       every tensor that it loads against the checkpoint's, without running anything
    ops           its own tensors by the program's names, run as exactly as it can: judged op by op
    as deployed   the same on the same tokens, as it runs by default: what it does otherwise is named as a choice

Weights that are the checkpoint's but for their quantization are taken over: what they cost is in the first level, and
ops are judged on the weights that the engine has. A weight that is a mistake is not: its op is wrong, too. Products
that round their activations are judged on the rounded ones (`numerics.activations`).
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from glassengine import environment
from glassengine.backends.registry import get_backend
from glassengine.diagnose.ladder.climb import Climb
from glassengine.diagnose.ladder.judging import OnStep, judge, kept, severity_counter
from glassengine.diagnose.ladder.levels import start
from glassengine.diagnose.ladder.request import CheckRequest
from glassengine.diagnose.reproduction.reproduce import with_reproduction
from glassengine.engine.build.requests import check_dtype
from glassengine.engine.build.requests import check_written as check_arguments
from glassengine.errors import UsageError
from glassengine.judge.cases import Case
from glassengine.judge.replay.reference import PLAIN, CoarseArithmetic
from glassengine.judge.replay.replay import Cut, Replay
from glassengine.judge.sides.module import threads_for
from glassengine.judge.sides.protocol import Place
from glassengine.judge.sides.recorded import PARTIAL, RecordedOps, dtype_of
from glassengine.judge.verdict.conclude import findings_of
from glassengine.judge.verdict.evidence import EvidenceBox
from glassengine.judge.verdict.score import Score
from glassengine.numerics.activations import ROUNDOFF
from glassengine.numerics.float64 import ACCUMULATIONS, Accumulation
from glassengine.plugins.serving.alignment import numbers_of
from glassengine.plugins.serving.check.as_stored import AsStored
from glassengine.plugins.serving.check.literals import not_reached, with_settings
from glassengine.plugins.serving.check.runs import (
    DEPLOYED,
    Alignment,
    Runs,
    arithmetic_of,
    hidden_kinds,
    operands_of,
    run_of_encoder,
    runs_of,
)
from glassengine.plugins.serving.check.weights import WeightsFound, judge_weights
from glassengine.plugins.serving.onnx.decoder import OWN_LOOP
from glassengine.program import load_model
from glassengine.progress import Progress, Work
from glassengine.results import Comparison, Divergence, Findings, ResultComparison, Skipped
from glassengine.serving.protocol import Served, ServedInDtype, ServedWeight, open_served
from glassengine.writing import remove_tree


def check_written(request: CheckRequest, _: Any) -> Comparison:
    """Judge what a back-end writes from the baseline."""
    return check_served(request, _write(request))


def _write(request: CheckRequest) -> Served:
    """Return what a back-end writes from the baseline, as a serving engine; its files live as long as it.

    Raises:
        UsageError: It cannot be written.
    """
    backend: Any = get_backend(str(request.backend))
    request.progress(Work.LOADING.says("loading the model"))
    model = load_model(request.baseline, dtype=request.dtype, adapter=request.adapter, **request.loading)
    check_dtype(backend, model.dtype)
    check_arguments(backend, model, request.quantize, None, {})
    request.progress(Work.COMPILING.says(f"writing {model.spec} with {backend.name}"))
    folder = Path(tempfile.mkdtemp(prefix="glassengine-"))
    try:
        backend.build_model(model.module, folder, request.quantize, None)
        served = open_served(backend.served(folder), request.serving)
        assert served is not None
    except BaseException:
        remove_tree(folder)
        raise
    weakref.finalize(served, remove_tree, folder)
    return served


def check_served(request: CheckRequest, served: Served) -> Comparison:
    """Judge a serving engine against the checkpoint that it should serve.

    The dtype is that of the baseline, or of the engine where it takes one; "auto" is float32, in which such engines
    compute. `min_snr` and `drift` are for the file beside the checkpoint, where its weights are rounded.

    Raises:
        UsageError: The baseline is no language model that generates, or the engine cannot run.
    """
    progress = request.progress
    progress(Work.LOADING.says("loading the baseline"))
    is_float32 = request.dtype == "auto" or isinstance(served, ServedInDtype)
    dtype = "float32" if is_float32 else request.dtype
    model = load_model(request.baseline, dtype=dtype, adapter=request.adapter, **request.loading)
    model = model.judged_as(model.generation.alone)
    config = getattr(model.module, "config", None)
    encodes = not model.generation.decodes_tokens
    if config is None or (encodes and not getattr(served, "encodes", False)):
        raise UsageError(
            f"candidates of the kind {served.kind!r} are judged with a language model of transformers",
            got=model.spec,
            expected="a Hugging Face directory or id",
        )
    with threads_for(model.module), ExitStack() as stack:
        progress(Work.DEQUANTIZING.says("comparing the weights"))
        parameters = dict(model.module.named_parameters(remove_duplicate=False))
        held = served.weights(model.module, config)
        weights = judge_weights(parameters, held, served.extra_weights(), numbers_of(config)) if held else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="glassengine-served-")))
        progress(Work.RUNNING.says("running the candidate"))
        if encodes:
            runs = run_of_encoder(served, model, request.inputs, folder)
        else:
            runs = runs_of(served, model, request.inputs, request.steps, folder)
        stored = None
        if weights is not None:
            if weights.are_rounded:
                progress(Work.RUNNING.says("running the baseline"))
                stored = AsStored(model.module, runs.cases, weights, held, drift=request.drift, progress=progress)
            take_over(model.module, held, weights)
        climb = start(model, list(runs.cases[0].steps or ()) or None, request.steps, stack, progress, runs.cases[0])
        climb.cases = runs.cases
        climb.skipped += [*(weights.skipped if weights is not None else ()), *runs.skipped]
        has_weights = weights is not None and bool(weights.judged)
        alignments, coarse = _add(climb, runs, config, request.layout, with_weights=has_weights)
        if request.reproduction is not None:
            for score in climb.scores:
                score.evidence = EvidenceBox(climb.program)
        policy = request.policy if stored is None else dataclasses.replace(request.policy, min_snr=None)
        collected = functools.partial(
            findings_of,
            climb.program,
            climb.scores,
            climb.skipped,
            climb.severity,
            baseline=model.spec,
            candidate=served.spec,
            min_coverage=policy.min_coverage,
            environment=environment.describe(),
            cases=climb.cases,
        )
        stack.enter_context(kept(collected, policy))
        progress(Work.JUDGING.says("judging the ops"))
        _judge(climb, coarse, stored, progress)
        for alignment in alignments:
            partial = sorted({name for tensors in alignment.by_case.values() for name in tensors.partial})
            climb.skipped += [Skipped(name, "candidate", PARTIAL, level=Place.RECORD) for name in partial]
        found = collected()
        graph = alignments[0].source.metadata.get("graph") or {}
        _replace_origins(found, with_settings(found.origins, graph, config, served.settings(config)))
        words = {score.side.level: one.words for score, one in zip(climb.scores[1:], coarse, strict=True)}
        found.results = [_within(one, words.get(one.level, ())) for one in found.results]
        if weights is not None and has_weights:
            add_weights(found, weights)
        longest = max((case.cache_length for case in climb.cases if case.input_ids is not None), default=0)
        unreached = not_reached(config, longest) if longest else ()
        found.notes = [*found.notes, *_notes(served, config, alignments), *unreached]
        if stored is not None:
            stored.add_costs(found, model.module, served.kind, request.policy.min_snr)
        first = found.first_divergence
        if request.reproduction is not None and first is not None and first.node is not None:
            progress(Work.WRITING.says("writing a reproduction"))
            found = with_reproduction(found, request.reproduction, climb.scores, climb.program, served.kind)
        return found.conclude(policy)


def take_over(module: nn.Module, held: Mapping[str, ServedWeight], weights: WeightsFound) -> None:
    """Give a module the values that the engine computes with, where they are its own but for their rounding."""
    known = dict(module.named_parameters())
    tied = [name for name in weights.right if name not in known]
    for name, verdict in weights.right.items():
        value = held[name].value if name in known and verdict == "rounding" else None
        if value is not None:
            known[name].data = value.to(known[name].dtype)
    for name in tied:
        owner, _, own = name.rpartition(".")
        holder, value = module.get_submodule(owner), held[name].value
        now = getattr(holder, own)
        if value is not None and not torch.equal(now.detach(), value.to(now.dtype)):
            # Tied in the checkpoint, and two tensors in the engine: a head is rounded, and the embedding is not.
            setattr(holder, own, nn.Parameter(value.to(now.dtype), requires_grad=False))


def _add(
    climb: Climb, runs: Runs, config: Any, layout: str | None, *, with_weights: bool
) -> tuple[list[Alignment], list[CoarseArithmetic]]:
    """Add a side for the records of each level; return how each was aligned, and what it computes more coarsely."""
    alignments = []
    coarse: list[CoarseArithmetic] = []
    for level, sources in runs.records.items():
        alignment = Alignment(sources, climb.program, config, layout)
        operands, kinds = operands_of(alignment, climb.program)
        if kinds and not with_weights:
            raise UsageError(
                "the recording is of rounded weights, which are not in it",
                got=f"{alignment.source.path}: products that read {', '.join(sorted(kinds))}",
                expected="the file that it was made with",
                hint="--candidate gguf:FILE",
            )
        hidden = max((ROUNDOFF[kind] for kind in hidden_kinds(alignment)), default=0.0)
        is_deployed = level == DEPLOYED
        dtype = dtype_of(alignment.source) or torch.float32
        accumulation = ACCUMULATIONS[alignment.table.deployed or "float32"] if is_deployed else Accumulation()
        replay = Replay(
            climb.program,
            cut=Cut.REGION,
            compiled=True,
            dtype=dtype,
            accumulation=dataclasses.replace(accumulation, kernels=climb.of_runtime(alignment.kernels).kernels),
            operands=operands,
            derive_views=True,
            rounded=alignment.rounded,
            of_regions=dataclasses.replace(accumulation, u_operands=hidden) if hidden else None,
        )
        detail = DEPLOYED if is_deployed else ""
        climb.coarsest = max((climb.coarsest or torch.float32, dtype), key=lambda one: torch.finfo(one).eps)
        tensors = alignment.by_case
        first = next(iter(tensors.values()))
        climb.add(RecordedOps(first, climb.program, replay=replay, place=Place.RECORD, detail=detail, by_case=tensors))
        alignments.append(alignment)
        coarse.append(arithmetic_of(alignment, climb.program, operands, as_deployed=is_deployed))
    return alignments, coarse


def _judge(climb: Climb, coarse: Sequence[CoarseArithmetic], stored: AsStored | None, progress: Progress) -> None:
    """Judge each side by the noise of its own arithmetic: what is float32 throughout, apart from what is coarser.

    Args:
        climb: With the sides.
        coarse: What each of them computes more coarsely.
        stored: Is given the results of the last one, which is what users run.
        progress: Called with an event when a stage begins.
    """
    model, *sides = climb.scores
    plain = [score for score, how in zip(sides, coarse, strict=True) if how == PLAIN]
    others = [score for score in sides if score not in plain]
    chooser = None
    for scores in filter(None, (plain, others)):
        climb.arithmetic = functools.reduce(CoarseArithmetic.joined, coarse) if scores is others else PLAIN
        beside = model if chooser is None else Score(chooser, climb.program)
        count = severity_counter(climb, progress, scores, chooser)
        last = scores[-1].side if stored is not None and scores[-1] is sides[-1] else None

        def on_step(
            case: Case, step: int, floors: Mapping[str, float], count: OnStep = count, last: Any = last
        ) -> None:
            count(case, step, floors)
            if last is not None and stored is not None:
                stored.add(climb.program, last.results(), case, step)

        judge(climb, [beside, *scores], model=chooser, on_step=on_step)
        chooser = climb.chooser()


def _within(one: ResultComparison, words: Sequence[str]) -> ResultComparison:
    return dataclasses.replace(one, within=f"the engine's {' and '.join(words)}") if words else one


def _replace_origins(found: Findings, origins: Sequence[Divergence]) -> None:
    first = found.first_divergence
    if first is not None:
        first = next(
            (one for one in origins if (one.level, one.step, one.site) == (first.level, first.step, first.site)), first
        )
    found.origins, found.first_divergence = list(origins), first


def add_weights(found: Findings, weights: WeightsFound) -> None:
    """Add the level of the weights before all others."""
    divergences, judged = weights.divergences(), weights.judged
    assert found.counts is not None
    counts: Any = dict(found.counts)
    counts["compared"] += len(judged)
    for one in judged:
        counts[one.verdict] += 1
    found.counts = counts
    found.weights = weights.comparison()
    found.levels = [weights.level(found.baseline, found.candidate), *found.levels]
    found.pairs = [*weights.pairs(), *found.pairs]
    found.origins = [*divergences, *found.origins]
    if weights.wrong:
        found.first_divergence = divergences[0]
        found.wrong_weights = f"{len(weights.wrong)} weights are not the checkpoint's: {found.weights.how[0]}"


def _notes(served: Served, config: Any, alignments: Sequence[Alignment]) -> list[str]:
    notes = [f"as deployed: {choice}" for choice in alignments[0].table.choices]
    notes += getattr(served, "notes", ())
    loops = dict.fromkeys(alignment.source.metadata.get("generator") for alignment in alignments)
    notes += [f"as deployed: {one}" for one in loops if one and one != OWN_LOOP]
    notes += [
        f"{one.name} is {one.found:.6g}, in the checkpoint {one.expected:.6g}"
        for one in served.settings(config)
        if one.differs
    ]
    return notes
