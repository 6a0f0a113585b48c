"""Compares two records of tensors without their models: pairs them, judges by the baseline's noise floor or tolerances.

Pipeline: open both sides, refuse what cannot be compared, pair by map, name and alias within a step and rank, judge
one pair of blocks at a time, rank. What is not judged is listed with its reason. A baseline that was recorded with its
noise floor says what rounding alone explains; dtype-aware tolerances know nothing about the computation, so a verdict
based on them is reported as uncalibrated. Neither distinguishes an introduced error from an inherited one.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from glassengine.compare.first import Order
from glassengine.compare.judging import BY_FLOOR, BY_GIVEN_TOLERANCE, BY_TOLERANCE, Judge
from glassengine.compare.matching.maps import TensorMap, load_map
from glassengine.compare.matching.matching import Match, Matching, match
from glassengine.compare.matching.phases import phase_of
from glassengine.compare.precision import Precision, over_budget, two_precisions
from glassengine.compare.ranks.rank_and_hints import rank_and_hints
from glassengine.compare.ranks.ranks import PutTogether
from glassengine.compare.ranks.sides import expect_counterparts, sides_of_one_rank
from glassengine.compare.requirements import (
    check_arguments,
    nothing_to_compare,
    printed_statistics,
    require_names,
    require_same_tokens,
)
from glassengine.compare.together import judge_all
from glassengine.numerics.exemptions import Ledger
from glassengine.numerics.metrics.tolerance import is_inexact, tolerance
from glassengine.recording.layout.layout import Entry
from glassengine.recording.layout.noise_floor import NoiseFloor, read_noise_floor
from glassengine.recording.read.reader import Recording
from glassengine.recording.read.source import TensorSource, open_source
from glassengine.results import (
    VERDICTS,
    Comparison,
    Divergence,
    Pair,
    Skipped,
    Standing,
    Verdict,
    counts_of,
    worst,
)
from glassengine.sites import matches, patterns_of

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
) -> Comparison:
    """Judge every tensor of `candidate` against the tensor of the same step and rank in `baseline` that it belongs to.

    Tensors belong together by `map`, by name, or by an alias that a recording knows. Where one side was run by several
    ranks and the other by one, the parts of the ranks are put together (`compare.ranks.ranks`). Memory: one pair of
    blocks in float64, for tensors of any size; a layout operation that cannot be a view copies its tensor.

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

    Raises:
        IncomparableError: The sides hold different token ids, or nothing can be compared.
        UnknownNameError: A pattern names nothing.
        UsageError: A side does not exist, or an argument or the map is invalid.
        CorruptError: A side is damaged.
    """
    check_arguments(rtol, atol, fail_on or "wrong", min_coverage, device)
    show_only, transpose = patterns_of(show_only, "show_only"), patterns_of(transpose, "transpose")
    rules = None if map is None else load_map(map)
    left, right = (side if not isinstance(side, str | Path) else open_source(side) for side in (baseline, candidate))
    printed = printed_statistics(left, right)
    left, right = printed or (left, right)
    require_same_tokens(left, right)
    left, right = sides_of_one_rank(left, right)
    require_names(show_only, left, right)
    require_names(transpose, left)
    not_tensors = [
        dataclasses.replace(item, side=name)
        for name, side in (("baseline", left), ("candidate", right))
        for item in side.skipped
    ]
    matching = expect_counterparts(left, right, match(left, right, rules))
    chosen = [one for one in matching.matches if _deselected(one, show_only, floating_point_only) is None]
    if not chosen:
        raise nothing_to_compare(left, right)
    floor, why_not = _floor(left, right)
    dtypes = two_precisions(left, right)
    precision = None if dtypes is None else Precision(dtypes)
    is_drift = precision is not None and fail_on is None and rtol is None and atol is None
    fail_on = fail_on or "wrong"
    ledger = Ledger()
    judge = Judge(left, right, rtol, atol, transpose, device, floor, precision, is_drift, ledger)
    pairs = judge.with_statistics(judge_all(judge, chosen, left, right), chosen, all_of_them=bool(show_only))
    skipped, unmatched = _skipped(matching, show_only, floating_point_only)
    verdict = worst(pair.verdict for pair in pairs)
    coverage = _coverage(matching, chosen, show_only, floating_point_only)
    is_bad = VERDICTS.index(verdict) >= VERDICTS.index(fail_on)
    drift = () if precision is None else precision.table()
    over = over_budget(drift, min_snr)
    reason = _not_ok_because(pairs, fail_on, coverage, min_coverage, show_only, over)
    # Of two precisions every tensor is another, so that only what is wrong is worth a name.
    divergence = None if is_drift and not is_bad else _first_divergence(pairs, chosen, left, right)
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
            unmatched_baseline=unmatched["baseline"],
            unmatched_candidate=unmatched["candidate"],
            not_recorded=len(not_tensors),
            missing_steps=len(steps[0] ^ steps[1]),
        ),
        pairs=tuple(pairs),
        skipped=(*not_tensors, *skipped),
        environment={"baseline": _environment(left), "candidate": _environment(right)},
        coverage=coverage,
        calibration=f"another precision: drift, {' against '.join(dtypes)}"
        if is_drift and dtypes is not None
        else _PRINTED
        if printed is not None
        else _calibration(pairs, floor, left, why_not),
        standing=_standing(reason, over, is_bad=is_bad),
        drift=drift,
        exemptions=ledger.exemptions(),
        num_elements=ledger.num_elements,
        same_weights=_same_weights(left, right),
        not_ok_because=reason,
        too_little=reason is not None and not is_bad and over is None,
    )


def _standing(reason: str | None, over: str | None, *, is_bad: bool) -> Standing:
    if reason is None:
        return "ok"
    return "differs inside" if is_bad else "over budget" if over is not None else "too little judged"


def _floor(left: TensorSource, right: TensorSource) -> tuple[NoiseFloor | None, str | None]:
    """Return the noise floor of the baseline, or why it cannot be used."""
    floor = read_noise_floor(left.path) if isinstance(left, Recording) else None
    if floor is None:
        return None, None
    ours, theirs = (str(side.metadata.get("dtype")) for side in (left, right))
    # A coarser model's tensors may have been recorded in a finer dtype: its float32 islands, logits that were cast.
    if (
        all(is_inexact(dtype) for dtype in (ours, theirs))
        and tolerance(theirs, theirs).rtol > tolerance(ours, ours).rtol
    ):
        return None, f"the floor of {left.path} is that of {ours}, too fine for {theirs}"
    return floor, None


def _same_weights(left: TensorSource, right: TensorSource) -> bool | None:
    sides = [tuple(side.metadata.get(key) for key in ("class", "dtype", "model_fingerprint")) for side in (left, right)]
    # A fingerprint covers names and values in their own dtype: it does not apply to another class or dtype.
    if None in sides[0] or None in sides[1] or sides[0][:2] != sides[1][:2]:
        return None
    return sides[0][2] == sides[1][2]


def _calibration(pairs: Sequence[Pair], floor: NoiseFloor | None, left: TensorSource, why_not: str | None) -> str:
    """Return in words what the verdicts rest on."""
    by = Counter(pair.judged_by for pair in pairs if pair.verdict != "identical")
    if by[BY_GIVEN_TOLERANCE]:
        return "by the given tolerances"
    if floor is None or (by[BY_TOLERANCE] and not by[BY_FLOOR]):
        return "uncalibrated" + (f": {why_not}" if why_not else "")
    return f"calibrated by the floor of {left.path}" + (
        f"; {by[BY_TOLERANCE]} uncalibrated" if by[BY_TOLERANCE] else ""
    )


def _skipped(
    matching: Matching, show_only: Sequence[str], floating_point_only: bool
) -> tuple[list[Skipped], dict[str, int]]:
    """Return what was not judged, and how many tensors of each side have no counterpart."""
    skipped = []
    unmatched = {"baseline": 0, "candidate": 0}
    for one in matching.matches:
        reason = _deselected(one, show_only, floating_point_only)
        if reason is not None:
            skipped.append(_skip(one.baseline, "baseline", reason))
    for side, entries in (("baseline", matching.baseline_only), ("candidate", matching.candidate_only)):
        for entry, why in entries:
            reason = _deselected(Match(entry, (), "name"), show_only, floating_point_only)
            unmatched[side] += reason is None
            skipped.append(_skip(entry, side, reason or why))
    return skipped, unmatched


def _coverage(
    matching: Matching, judged: Sequence[Match], show_only: Sequence[str], floating_point_only: bool
) -> float:
    """Return the judged share of the wanted float-valued baseline tensors, or of all where none is float-valued."""
    alone = [Match(entry, (), "name") for entry, _ in matching.baseline_only]
    missed = [one.baseline for one in alone if _deselected(one, show_only, floating_point_only) is None]
    wanted = [*(one.baseline for one in judged), *missed]
    counted = {_key(entry) for entry in wanted if is_inexact(entry.dtype)} or {_key(entry) for entry in wanted}
    return len(counted & {_key(one.baseline) for one in judged}) / len(counted)


def _first_divergence(
    pairs: Sequence[Pair], judged: Sequence[Match], left: TensorSource, right: TensorSource
) -> Divergence | None:
    order = Order(left)
    worst_first = {"wrong": 0, "suspicious": 1}
    flagged = [i for i, pair in enumerate(pairs) if pair.verdict in worst_first]
    if not flagged:
        return None
    found = min(flagged, key=lambda i: (worst_first[pairs[i].verdict], order.key(judged[i].baseline)))
    pair, entry = pairs[found], judged[found].baseline
    rank, hints = rank_and_hints(found, pairs, judged, left, right)
    sources, candidate_sources = (side.metadata.get("sources") for side in (left, right))
    source = sources.get(entry.site) if isinstance(sources, dict) else None
    there = candidate_sources.get(pair.candidate_site) if isinstance(candidate_sources, dict) else None
    return Divergence(
        rung=phase_of(entry.site) if left.metadata.get("gradients") else None,
        step=entry.step,
        site=entry.site,
        node=entry.node,
        candidate_site=pair.candidate_site,
        source=source if isinstance(source, str) else None,
        verdict=pair.verdict,
        noise_ratio=pair.noise_ratio,
        bound_ratio=None,
        introduced=None,
        inherited=None,
        hints=hints,
        candidate_source=there if isinstance(there, str) else None,
        rank=rank,
    )


def _not_ok_because(
    pairs: Sequence[Pair],
    fail_on: Verdict,
    coverage: float,
    min_coverage: float,
    asked: Sequence[str],
    over: str | None,
) -> str | None:
    bad = [pair for pair in pairs if VERDICTS.index(pair.verdict) >= VERDICTS.index(fail_on)]
    if bad:
        return f"{len(bad)} of {len(pairs)} tensors are {fail_on}" + (" or worse" if fail_on != "wrong" else "")
    if over is not None:
        return over
    missed = [
        pattern for pattern in asked if not any(_names(pattern, pair.site, pair.candidate_site) for pair in pairs)
    ]
    if missed:
        return f"asked for and not judged: {', '.join(missed)}"
    if coverage < min_coverage:
        return f"coverage {coverage:.1%} is below --min-coverage {min_coverage:g}"
    return None


def _deselected(one: Match, show_only: Sequence[str], floating_point_only: bool) -> str | None:
    names = [entry.site for entry in (one.baseline, *one.candidates)]
    if show_only and not any(_names(pattern, *names) for pattern in show_only):
        return "not selected by --show-only"
    if floating_point_only and not all(is_inexact(entry.dtype) for entry in (one.baseline, *one.candidates)):
        return "not floating point"
    return None


def _names(pattern: str, *names: str) -> bool:
    return any(matches(pattern, name) for name in names)


def _skip(entry: Entry, side: str, reason: str) -> Skipped:
    rank = f" (rank {entry.rank})" if entry.rank else ""
    return Skipped(entry.site, side, reason + rank, step=entry.step)


def _environment(side: TensorSource) -> dict[str, Any]:
    known = side.metadata.get("environment")
    facts = {**(known if isinstance(known, dict) else {}), "complete": side.complete}
    return {**facts, "arrangements": side.arrangements} if isinstance(side, PutTogether) else facts


def _key(entry: Entry) -> tuple[int, int, str]:
    return entry.step, entry.rank, entry.site
