"""Compares two records of tensors without their models: pairs by exact name, judges by dtype-aware tolerances.

Pipeline: open both sides, refuse what cannot be compared, pair by (step, rank, site), judge one pair of blocks at a
time, rank. What is not judged is listed with its reason. Tolerances know nothing about the computation, so every
verdict says that it is uncalibrated, and an error cannot be told from one that was inherited.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from glassengine.compare.measure import measure, summarize, summarize_errors
from glassengine.compare.tolerance import is_inexact, tolerance
from glassengine.errors import IncomparableError, UnknownNameError, UsageError
from glassengine.recording.layout import Entry
from glassengine.recording.source import TensorSource, open_source
from glassengine.results import VERDICTS, Comparison, Divergence, Pair, Skipped, Verdict, worst
from glassengine.sites import matches

JUDGED_BY = "tolerance (uncalibrated)"

# Statistics need several passes (the median), so of many pairs only the worst get them.
_NUM_SUMMARIZED = 3

_Key = tuple[int, int, str]


def compare(
    baseline: str | Path | TensorSource,
    candidate: str | Path | TensorSource,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    show_only: Sequence[str] = (),
    floating_point_only: bool = False,
    transpose: Sequence[str] = (),
    device: str = "cpu",
    fail_on: Literal["rounding", "suspicious", "wrong"] = "wrong",
    min_coverage: float = 0.9,
) -> Comparison:
    """Judge every tensor of `candidate` against the tensor of the same name, step and rank in `baseline`.

    Memory: one pair of blocks in float64, whatever the size of the tensors.

    Args:
        baseline: Recording directory, `.pt`, `.pth`, `.safetensors` or `.npz`, or an open source.
        candidate: The same.
        rtol: Relative tolerance instead of the dtype's own; integers and bools stay exact.
        atol: Absolute tolerance instead of the dtype's own; integers and bools stay exact.
        show_only: Site patterns (glob or `re:`): only these tensors are judged and shown, each with its statistics.
        floating_point_only: Leave out integers and bools.
        transpose: Site patterns whose baseline tensor is transposed (its last two dimensions) first.
        device: Where the arithmetic runs, e.g. "cuda"; it must know float64.
        fail_on: The mildest verdict that makes the result not ok.
        min_coverage: The result is not ok when a smaller share of the baseline's float-valued tensors was judged.

    Raises:
        IncomparableError: The sides hold different token ids, or nothing can be compared.
        UnknownNameError: A pattern names nothing.
        UsageError: A side does not exist, or an argument makes no sense.
        CorruptError: A side is damaged.
    """
    _check_arguments(rtol, atol, fail_on, min_coverage, device)
    left, right = (side if not isinstance(side, str | Path) else open_source(side) for side in (baseline, candidate))
    _require_same_tokens(left, right)
    _require_names([*show_only, *transpose], left, right)
    skipped = [
        dataclasses.replace(item, side=name)
        for name, side in (("baseline", left), ("candidate", right))
        for item in side.skipped
    ]
    not_recorded = len(skipped)
    theirs = {_key(entry): entry for entry in right.entries}
    ours = {_key(entry): entry for entry in left.entries}
    pairs: list[Pair] = []
    judged: list[tuple[Entry, Entry]] = []
    wanted: list[Entry] = []
    unmatched = {"baseline": 0, "candidate": 0}
    for entry in left.entries:
        other = theirs.get(_key(entry))
        reason = _deselected(entry, other, show_only, floating_point_only)
        if reason is None:
            wanted.append(entry)
            if other is not None:
                pairs.append(_judge(left, right, entry, other, rtol, atol, transpose, device))
                judged.append((entry, other))
                continue
            reason = "the candidate has no tensor of this name, step and rank"
            unmatched["baseline"] += 1
        skipped.append(_skip(entry, "baseline", reason))
    for entry in right.entries:
        if _key(entry) not in ours:
            reason = _deselected(entry, None, show_only, floating_point_only)
            if reason is None:
                reason = "the baseline has no tensor of this name, step and rank"
                unmatched["candidate"] += 1
            skipped.append(_skip(entry, "candidate", reason))
    if not pairs:
        raise _nothing_to_compare(left, right)
    pairs = _with_statistics(pairs, judged, left, right, transpose, device, all_of_them=bool(show_only))
    verdict = worst(pair.verdict for pair in pairs)
    coverage = _coverage(wanted, judged)
    reason = _not_ok_because(pairs, verdict, fail_on, coverage, min_coverage, show_only)
    divergence = _first_divergence(pairs, judged, left.metadata.get("sources"))
    return Comparison(
        baseline=str(left.path),
        candidate=str(right.path),
        ok=reason is None,
        verdict=verdict,
        first_divergence=divergence,
        origins=() if divergence is None else (divergence,),
        counts={
            "compared": len(pairs),
            **{name: sum(pair.verdict == name for pair in pairs) for name in VERDICTS},
            "inherited": 0,
            "unmatched_baseline": unmatched["baseline"],
            "unmatched_candidate": unmatched["candidate"],
            "not_recorded": not_recorded,
        },
        pairs=tuple(pairs),
        skipped=tuple(skipped),
        environment={"baseline": _environment(left), "candidate": _environment(right)},
        coverage=coverage,
        not_ok_because=reason,
    )


def _judge(
    left: TensorSource,
    right: TensorSource,
    entry: Entry,
    other: Entry,
    rtol: float | None,
    atol: float | None,
    transpose: Sequence[str],
    device: str,
) -> Pair:
    pair = Pair(entry.step, entry.site, other.site, "name", 1.0, "wrong", JUDGED_BY, rank=entry.rank)
    x, y = _tensors(left, right, entry, other, transpose)
    if x.shape != y.shape:
        hint = "; the shapes agree when transposed" if x.ndim > 1 and x.mT.shape == y.shape else ""
        return dataclasses.replace(
            pair, judged_by="shape", reason=f"shapes differ: {list(x.shape)} and {list(y.shape)}{hint}"
        )
    allowed = tolerance(entry.dtype, other.dtype, rtol=rtol, atol=atol)
    figures = measure(x, y, rtol=allowed.rtol, atol=allowed.atol, device=device)
    verdict: Verdict = "wrong" if not figures.allclose else "rounding" if figures.num_different else "identical"
    reason = None if entry.dtype == other.dtype else f"dtypes differ: {entry.dtype} and {other.dtype}"
    return dataclasses.replace(pair, verdict=verdict, figures=figures, reason=reason)


def _tensors(
    left: TensorSource, right: TensorSource, entry: Entry, other: Entry, transpose: Sequence[str]
) -> tuple[Tensor, Tensor]:
    x, y = left.tensor(entry), right.tensor(other)
    if any(matches(pattern, entry.site) for pattern in transpose):
        if x.ndim < 2:
            raise UsageError(
                f"{entry.site!r} cannot be transposed", got=entry.describe(), expected="two dimensions or more"
            )
        x = x.mT
    return x, y


def _with_statistics(
    pairs: list[Pair],
    judged: list[tuple[Entry, Entry]],
    left: TensorSource,
    right: TensorSource,
    transpose: Sequence[str],
    device: str,
    *,
    all_of_them: bool,
) -> list[Pair]:
    """Return `pairs` where all, or else the worst few, carry the statistics of both sides and of the errors."""
    order = sorted(range(len(pairs)), key=lambda i: severity(pairs[i]), reverse=True)
    result = list(pairs)
    for i in order if all_of_them else order[:_NUM_SUMMARIZED]:
        x, y = _tensors(left, right, *judged[i], transpose)
        absolute, relative = summarize_errors(x, y, device=device) if x.shape == y.shape else (None, None)
        result[i] = dataclasses.replace(
            pairs[i],
            baseline=summarize(x, device=device),
            candidate=summarize(y, device=device),
            abs_error=absolute,
            rel_error=relative,
        )
    return result


def severity(pair: Pair) -> tuple[float, ...]:
    """Return a key that sorts pairs: by verdict, then different shapes before non-finite before size of the error."""
    rank = float(VERDICTS.index(pair.verdict))
    if pair.figures is None:
        return (rank, 1.0)
    size = -math.inf if math.isnan(pair.figures.snr_db) else -pair.figures.snr_db
    return (rank, 0.0, float(pair.figures.num_nonfinite_mismatch > 0), size)


def _first_divergence(
    pairs: Sequence[Pair], judged: Sequence[tuple[Entry, Entry]], sources: object
) -> Divergence | None:
    found = next((i for i, pair in enumerate(pairs) if pair.verdict == "wrong"), None)
    if found is None:
        return None
    pair, (entry, _) = pairs[found], judged[found]
    source = sources.get(entry.site) if isinstance(sources, dict) else None
    return Divergence(
        rung=None,
        step=entry.step,
        site=entry.site,
        node=entry.node,
        candidate_site=pair.candidate_site,
        source=source if isinstance(source, str) else None,
        verdict=pair.verdict,
        rho=None,
        beta=None,
        introduced=None,
        inherited=None,
    )


def _not_ok_because(
    pairs: Sequence[Pair],
    verdict: Verdict,
    fail_on: Verdict,
    coverage: float,
    min_coverage: float,
    asked: Sequence[str],
) -> str | None:
    if VERDICTS.index(verdict) >= VERDICTS.index(fail_on):
        bad = [pair for pair in pairs if VERDICTS.index(pair.verdict) >= VERDICTS.index(fail_on)]
        return f"{len(bad)} of {len(pairs)} tensors are {fail_on}" + (" or worse" if fail_on != "wrong" else "")
    missed = [pattern for pattern in asked if not any(matches(pattern, pair.site) for pair in pairs)]
    if missed:
        return f"asked for and not judged: {', '.join(missed)}"
    if coverage < min_coverage:
        return f"coverage {coverage:.1%} is below --min-coverage {min_coverage:g}"
    return None


def _coverage(wanted: Sequence[Entry], judged: Iterable[tuple[Entry, Entry]]) -> float:
    """Return the judged share of the wanted float-valued baseline tensors, or of all where none is float-valued."""
    counted = {_key(entry) for entry in wanted if is_inexact(entry.dtype)} or {_key(entry) for entry in wanted}
    return len(counted & {_key(entry) for entry, _ in judged}) / len(counted)


def _deselected(entry: Entry, other: Entry | None, show_only: Sequence[str], floating_point_only: bool) -> str | None:
    if show_only and not any(matches(pattern, entry.site) for pattern in show_only):
        return "not selected by --show-only"
    if floating_point_only and not all(is_inexact(side.dtype) for side in (entry, other or entry)):
        return "not floating point"
    return None


def _require_same_tokens(left: TensorSource, right: TensorSource) -> None:
    x, y = left.metadata.get("token_ids"), right.metadata.get("token_ids")
    if x is None or y is None or x == y:
        return
    rows_x, rows_y = (side if isinstance(side, list) else [side] for side in (x, y))
    where = next((i for i, (a, b) in enumerate(zip(rows_x, rows_y, strict=False)) if a != b), None)
    got = f"{len(rows_x)} and {len(rows_y)} rows" if where is None else f"the first difference is in row {where}"
    raise IncomparableError(
        "the two sides were run on different token ids",
        got=got,
        expected="the same token ids: what follows a different token is different for good reasons",
        hint="record the candidate with the baseline's token ids",
    )


def _require_names(patterns: Sequence[str], left: TensorSource, right: TensorSource) -> None:
    names = list(dict.fromkeys(entry.site for side in (left, right) for entry in side.entries))
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            raise UnknownNameError("tensor", pattern, names)


def _check_arguments(rtol: float | None, atol: float | None, fail_on: str, min_coverage: float, device: str) -> None:
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not value >= 0:
            raise UsageError(f"--{name} makes no sense", got=str(value), expected="a number from 0 on")
    if not 0 <= min_coverage <= 1:
        raise UsageError("--min-coverage makes no sense", got=str(min_coverage), expected="a share from 0 to 1")
    if fail_on not in VERDICTS[1:]:
        raise UsageError("--fail-on makes no sense", got=fail_on, expected=VERDICTS[1:])
    try:
        torch.zeros(1, dtype=torch.float64, device=device) + 1
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            "the device cannot be used",
            got=f"{device}: {reason}",
            expected="a device with float64",
            hint="--device cpu",
        ) from error


def _nothing_to_compare(left: TensorSource, right: TensorSource) -> IncomparableError:
    def describe(side: TensorSource) -> str:
        steps = sorted({entry.step for entry in side.entries})
        some = ", ".join(entry.site for entry in side.entries[:3])
        return f"{len(side.entries)} tensors, steps {steps[:5]}, {some or 'none'}"

    return IncomparableError(
        "there is nothing to compare: no tensor of the baseline has a partner in the candidate",
        got=f"baseline: {describe(left)}; candidate: {describe(right)}",
        expected="the same name, step and rank on both sides",
    )


def _skip(entry: Entry, side: str, reason: str) -> Skipped:
    rank = f" (rank {entry.rank})" if entry.rank else ""
    return Skipped(entry.site, side, reason + rank, step=entry.step)


def _environment(side: TensorSource) -> dict[str, Any]:
    known = side.metadata.get("environment")
    return {**(known if isinstance(known, dict) else {}), "complete": side.complete}


def _key(entry: Entry) -> _Key:
    return entry.step, entry.rank, entry.site
