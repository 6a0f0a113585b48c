"""Compares two records of tensors without their models: pairs them, judges by the baseline's noise floor or tolerances.

Pipeline: open both sides, refuse what cannot be compared, pair by map, name and alias within a step and rank, judge
one pair of blocks at a time, rank. What is not judged is listed with its reason. A baseline that was recorded with its
noise floor says what rounding alone explains; dtype-aware tolerances know nothing about the computation, so a verdict
based on them is reported as uncalibrated. Neither distinguishes an introduced error from an inherited one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from glassengine.compare.bench import Bench, usable_floor
from glassengine.compare.conclude import (
    calibration,
    environment_of,
    first_divergence,
    same_weights,
    standing,
    summarize_worst,
    why_not_ok,
)
from glassengine.compare.distribute import Distribution, Elsewhere, Here, Judges, Verdicts
from glassengine.compare.jobs import Planned
from glassengine.compare.judge_chunk import answers_of, judge_chunk
from glassengine.compare.matching.maps import TensorMap
from glassengine.compare.matching.matching import Match
from glassengine.compare.plan import Plan
from glassengine.compare.precision import Precision, over_budget, two_precisions
from glassengine.compare.prepared import prepared, sendable
from glassengine.compare.rounded_updates import NOT_JUDGED, not_judged
from glassengine.compare.roundings import ROUNDED
from glassengine.compare.small import COARSE, IF_COARSE, TOO_SMALL, beside_larger
from glassengine.compare.together import judged_together
from glassengine.compare.units import Request
from glassengine.errors import UsageError
from glassengine.numerics.exemptions import Ledger
from glassengine.progress import Progress, Work, silent
from glassengine.recording.formats.debugger_file import PrintedStatistics
from glassengine.recording.read.source import TensorSource
from glassengine.results import VERDICTS, Comparison, Skipped, counts_of, worst
from glassengine.sites import patterns_of
from glassengine.workers import Workers
from glassengine.workers.cluster import RayTasks
from glassengine.workers.processes import Processes

_PRINTED = "uncalibrated: only printed mean, deviation, minimum and maximum are known"


def compare(
    baseline: str | Path | TensorSource,
    candidate: str | Path | TensorSource,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    map: str | Path | Mapping[str, Any] | TensorMap | None = None,
    show_only: Sequence[str] = (),
    floating_point_only: bool = False,
    transpose: Sequence[str] = (),
    device: str = "cpu",
    fail_on: Literal["rounding", "suspicious", "wrong"] | None = None,
    min_coverage: float = 0.9,
    min_snr: float | None = None,
    jobs: int = 1,
    cluster: str | None = None,
    first: bool = False,
    answers: str | Path | None = None,
    progress: Progress = silent,
) -> Comparison:
    """Judge every tensor of `candidate` against the tensor of the same step and rank in `baseline` that it belongs to.

    Tensors belong together by `map`, by name, or by an alias that a recording knows. Where one side was run by several
    ranks and the other by one, the parts of the ranks are put together (`compare.ranks.ranks`). Memory: one pair of
    blocks in float64, for tensors of any size; a layout operation that cannot be a view copies its tensor. The work is
    planned from the indices and judged in chunks (`compare.plan`); by whom makes no difference to the result.

    Args:
        baseline: Recording directory, `.pt`, `.pth`, `.safetensors`, `.npz`, `.npy`, a directory of `step{i}.pt` or of
            `<name>-step<i>.npy`, or an open source.
        candidate: The same.
        rtol: Relative tolerance instead of the dtype's own; integers and bools stay exact.
        atol: Absolute tolerance instead of the dtype's own; integers and bools stay exact.
        map: Which names belong together and in which layout: a JSON file or what it holds (`compare.matching.maps`).
        show_only: Site patterns (glob or `re:`): only these tensors are judged and shown, each with its statistics.
        floating_point_only: Skip integers and bools.
        transpose: Site patterns whose baseline tensor is transposed (its last two dimensions) first; of what a pattern
            names, vectors stay as they are.
        device: Where the arithmetic runs, e.g. "cuda"; it must know float64.
        fail_on: The mildest verdict that makes the result not ok; None is "wrong". Two recordings of two precisions
            are judged by what is left of the signal (`compare.precision`), unless it or a tolerance is given.
        min_coverage: The result is not ok when a smaller share of the baseline's float-valued tensors was judged.
        min_snr: Of two precisions: least signal-to-noise ratio of each result, in dB.
        jobs: Processes of this machine that judge; 1 is this one. The sides are paths then, and so is `map`, or a dict.
        cluster: Ray tasks judge: `ray://HOST:PORT`, or "auto". As for `jobs`; `jobs` bounds how many at a time.
        first: Stop after the first chunk that has a tensor wrong.
        answers: A plan of this comparison (`compare.jobs`) whose chunks other jobs have judged.
        progress: Called with an event for each chunk that is over.

    Raises:
        BackendError: The cluster cannot be used.
        IncomparableError: The sides hold different token ids, or nothing can be compared.
        UnknownNameError: A pattern names nothing.
        UsageError: A side does not exist, or an argument or the map is invalid.
        CorruptError: A side is damaged.
    """
    if jobs < 1:
        raise UsageError("invalid --jobs", got=str(jobs), expected="a number from 1 on")
    plan, request = prepared(
        baseline,
        candidate,
        rtol=rtol,
        atol=atol,
        map=map,
        show_only=show_only,
        floating_point_only=floating_point_only,
        transpose=transpose,
        device=device,
        fail_on=fail_on,
        min_coverage=min_coverage,
    )
    if jobs > 1 or cluster is not None or answers is not None:
        request = sendable(request, baseline, candidate, map)
    with _judges(plan.bench, request, jobs, cluster, answers) as judges:
        return _compared(
            plan,
            judges,
            fail_on=fail_on,
            min_coverage=min_coverage,
            min_snr=min_snr,
            show_only=patterns_of(show_only, "show_only"),
            first=first,
            progress=progress,
        )


@contextlib.contextmanager
def _judges(
    bench: Bench, request: Request, jobs: int, cluster: str | None, answers: str | Path | None
) -> Iterator[Judges]:
    """Yield who judges, and let them go."""
    here = Here(answers_of(bench))
    if answers is not None:
        yield Planned(Path(answers), request, here)
        return
    if cluster is None and jobs == 1:
        yield here
        return
    workers: Workers
    if cluster is not None:
        workers = RayTasks(judge_chunk, cluster, jobs if jobs > 1 else None)
    else:
        workers = Processes(judge_chunk, jobs)
    try:
        yield Elsewhere(workers, request)
    finally:
        workers.close()


def _compared(
    plan: Plan,
    judges: Judges,
    *,
    fail_on: Literal["rounding", "suspicious", "wrong"] | None,
    min_coverage: float,
    min_snr: float | None,
    show_only: Sequence[str],
    first: bool,
    progress: Progress,
) -> Comparison:
    left, right = plan.bench.judge.left, plan.bench.judge.right
    floor, why_not = usable_floor(left, right)
    dtypes = two_precisions(left, right)
    precision = None if dtypes is None else Precision(dtypes)
    is_drift = plan.bench.judge.is_drift
    fail_on = fail_on or "wrong"
    ledger = Ledger()
    distribution = Distribution(plan, judges, ledger, precision)
    total = len(plan.spans)
    progress(Work.JUDGING.says(f"judging {len(plan.pairs)} tensors in {total} chunks", 0, total))
    verdicts = distribution.verdicts(
        first=first, on_chunk=lambda done: progress(Work.JUDGING.says(f"chunk {done} of {total}", done, total))
    )
    chosen = verdicts.judged
    pairs = verdicts.pairs
    judged_together(pairs, chosen, left, right, distribution)
    summarize_worst(pairs, distribution, all_of_them=bool(show_only))
    lost = [_lost(plan.pairs[number], why) for number, why in sorted(verdicts.lost.items())]
    for i in not_judged(pairs, chosen, left, right):
        pairs[i] = dataclasses.replace(pairs[i], verdict="suspicious", reason=NOT_JUDGED)
    for i, other in beside_larger(pairs, chosen, left).items():
        pairs[i] = dataclasses.replace(pairs[i], reason=f"it is as small as the rounding of {other}")
    if any(pairs[i].reason == COARSE for i in pairs.flagged()):
        for i in [i for i in pairs.flagged() if pairs[i].reason == IF_COARSE]:
            pairs[i] = dataclasses.replace(pairs[i], verdict="suspicious", reason=f"{COARSE}, in other tensors")
    unsure = [i for i in pairs.flagged() if pairs[i].reason in (NOT_JUDGED, ROUNDED, TOO_SMALL)]
    lost += [Skipped(pairs[i].site, "both", str(pairs[i].reason), step=pairs[i].step) for i in unsure]
    is_whole = verdicts.stopped_at is None
    verdict = worst(own for (own, _, _), count in pairs.tally.items() if count)
    coverage = plan.coverage(
        [*(plan.pairs[i].baseline for i in _missing(plan, verdicts)), *(chosen[i].baseline for i in unsure)]
    )
    is_bad = VERDICTS.index(verdict) >= VERDICTS.index(fail_on)
    drift = () if precision is None else precision.table()
    over = over_budget(drift, min_snr)
    reason = why_not_ok(pairs, lost, fail_on, coverage, min_coverage, show_only if is_whole else (), over)
    # Of two precisions every tensor is another, so that only what is wrong is worth a name.
    divergence = None if is_drift and not is_bad else first_divergence(pairs, chosen, left, right, distribution)
    not_recorded = [
        dataclasses.replace(item, side=name)
        for name, side in (("baseline", left), ("candidate", right))
        for item in side.skipped
    ]
    steps = [{entry.step for entry in side.entries} for side in (left, right)]
    return Comparison(
        baseline=str(left.path),
        candidate=str(right.path),
        ok=reason is None,
        verdict=verdict,
        first_divergence=divergence,
        origins=() if divergence is None else (divergence,),
        counts=counts_of(
            pairs,
            unmatched_baseline=plan.unmatched["baseline"],
            unmatched_candidate=plan.unmatched["candidate"],
            not_recorded=len(not_recorded),
            missing_steps=len(steps[0] ^ steps[1]),
        ),
        pairs=pairs,
        skipped=(*not_recorded, *plan.skipped, *lost, *_not_asked(plan, verdicts)),
        environment={"baseline": environment_of(left), "candidate": environment_of(right)},
        coverage=coverage,
        calibration=f"another precision: drift, {' against '.join(dtypes)}"
        if is_drift and dtypes is not None
        else _PRINTED
        if isinstance(left, PrintedStatistics)
        else calibration(pairs, floor, left, why_not),
        standing=standing(reason, over, is_bad=is_bad),
        drift=drift,
        exemptions=ledger.exemptions(),
        num_elements=ledger.num_elements,
        same_weights=same_weights(left, right),
        not_ok_because=reason,
        too_little=reason is not None and not is_bad and over is None,
    )


def _missing(plan: Plan, verdicts: Verdicts) -> list[int]:
    """Return the numbers of the pairs that have no verdict."""
    if len(verdicts.pairs) == len(plan.pairs):
        return []
    known = set(verdicts.numbers)
    return [number for number in range(len(plan.pairs)) if number not in known]


def _lost(match: Match, why: str) -> Skipped:
    entry = match.baseline
    rank = f" (rank {entry.rank})" if entry.rank else ""
    return Skipped(entry.site, "both", f"each worker that judged it was {why}{rank}", step=entry.step)


def _not_asked(plan: Plan, verdicts: Verdicts) -> list[Skipped]:
    if verdicts.stopped_at is None:
        return []
    entry = plan.pairs[verdicts.stopped_at].baseline
    count = len(plan.pairs) - verdicts.stopped_at
    return [Skipped("*", "both", f"--first: {count} tensors from {entry.site!r} on", step=entry.step)]
