"""Judges one pair: measures both tensors, and compares the figures with a noise floor or a tolerance."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from glassengine.blocks.arithmetic import RawDifference, merged
from glassengine.blocks.arrays import (
    Array,
    ArrayValues,
    Stream,
    difference_of_arrays,
    error_stream_of,
    statistics_of,
    stream_of,
    widened,
)
from glassengine.compare.loader import Checksums, Counted, PairLoader
from glassengine.compare.matching import layouts
from glassengine.compare.matching.matching import MatchedPair
from glassengine.compare.roundings import (
    BY_TOLERANCE,
    COARSE,
    IF_COARSE,
    ROUNDED,
    SCALED,
    TOO_SMALL,
    Noise,
    Roundings,
    by_drift,
    drift_of,
    is_along,
    is_multiple,
    is_small,
    may_be_coarse,
    may_be_rounding,
    precision_of,
)
from glassengine.numerics.drift import DriftSums
from glassengine.numerics.judgement import SUSPICIOUS, WRONG
from glassengine.numerics.limits import both_may_hide, is_floating, limits, without_hidden
from glassengine.numerics.slices import Means, Slices, figures_of, noise_ratio, slices, sums_of_squares
from glassengine.numerics.tolerance import Tolerance, tolerance
from glassengine.recording.layout.noise_floor import NoiseFloor, StoredFloor
from glassengine.results import Figures, Pair, Summary, Verdict
from glassengine.writing import crc32_joined

BY_FLOOR = "noise floor"
BY_GIVEN_TOLERANCE = "given tolerance"
BY_SHAPE = "shape"
BY_PRECISION = "what is left of the signal"

ROW_BYTES = 4 << 20
"""Of a side: larger tensors are measured by rows of so many bytes, which stay in a cache and need little memory."""


class TensorKind(NamedTuple):
    """What a tensor is, without its values."""

    dtype: str
    shape: tuple[int, ...]


class PairVerdict(NamedTuple):
    """The verdict on a pair, and what it adds to tables of all pairs."""

    pair: Pair
    drift: DriftSums | None
    counted: Counted


@dataclass(frozen=True)
class PairJudge(PairLoader):
    """The two sides and how their figures are judged.

    Attributes:
        rtol: Relative tolerance instead of the dtype's own.
        atol: Absolute tolerance instead of the dtype's own.
        device: Device of the arithmetic.
        floor: What rounding alone does to the tensors of the baseline, where that was measured.
        has_drift: Whether the sides are of two precisions.
        is_drift: Whether what is beyond tolerance is then judged by what is left of the signal.
    """

    rtol: float | None = None
    atol: float | None = None
    device: str = "cpu"
    floor: NoiseFloor | None = None
    has_drift: bool = False
    is_drift: bool = False

    def judged(self, match: MatchedPair, *, added: Sequence[MatchedPair] = ()) -> PairVerdict:
        """Return the verdict on one pair.

        Args:
            match: What belongs together.
            added: What the candidate has of the same tensor under other names: shares of a gradient.

        Raises:
            UsageError: An operation of the map, or a transposition, does not fit the tensor.
        """
        if not added and not self.has_drift and self.has_equal_bytes(match):
            return self.same(match)
        if match.baseline.nbytes > ROW_BYTES and not added and self.can_be_cut(match):
            found = self.of_rows(match, [self.row_figures(match, *rows) for rows in rows_of(match, ROW_BYTES)])
            if found is not None:
                return found
        return self.judged_whole(match, added=added)

    def judged_whole(self, match: MatchedPair, *, added: Sequence[MatchedPair] = ()) -> PairVerdict:
        """Return the verdict on one pair, both tensors of which are held at once; see `judged`."""
        x, y = self.whole(match)
        counted = self.count(match, x.array.shape)
        for one in added:
            _, share = self.whole(one)
            y = y._replace(array=y.array + share.array) if share.array.shape == y.array.shape else y
        if x.array.shape != y.array.shape:
            what = layouts.difference(x.array.shape, y.array.shape, match.baseline.site)
            pair = replace(self.pair_of(match), verdict="wrong", judged_by=BY_SHAPE, reason=what)
            return PairVerdict(pair, None, counted)
        allowed = self.tolerance(match, x.dtype, y.dtype)
        raw = self._difference(x, y, allowed)
        if raw.num_beyond and (shown := without_hidden(x, y)) is not None:
            # All mask values are equal.
            x, y = shown
            raw = self._difference(x, y, allowed)
        figures = figures_of(raw, x.array.shape, rtol=allowed.rtol, atol=allowed.atol)
        drift = drift_of(x, y) if self.has_drift else None
        pair = self.verdict(match, figures, _kind(x), _kind(y), drift, functools.partial(slices, x, y))
        if pair.reason == IF_COARSE and _are_coarse(x, y):
            pair = replace(pair, verdict="suspicious", reason=COARSE)
        if not figures.num_different and is_floating(x.dtype) and raw.num_elements and not raw.num_finite:
            pair = replace(pair, reason="no value is finite, on either side")
        if pair.reason == ROUNDED and self._is_another_update(match, y.array, x.array):
            pair = replace(pair, verdict="wrong", reason=None)
        return PairVerdict(pair, drift, counted)

    def row_figures(self, match: MatchedPair, first: int, end: int) -> RowFigures:
        """Return the figures of some rows of a pair that `can_be_cut`."""
        x, y, checksums = self.rows(match, first, end)
        x, y = (x, y) if self.device == "cpu" else (widened(x), widened(y))
        found = self._difference(x, y, self.tolerance(match, x.dtype, y.dtype))
        needs_slices = self._needs_slices(match, found.num_beyond)
        if needs_slices or found.num_beyond or self.has_drift:
            x, y = widened(x), widened(y)
        return RowFigures(
            first * math.prod(match.baseline.shape[1:]),
            found,
            bool(found.num_beyond) and both_may_hide(x, y),
            drift_of(x, y) if self.has_drift else None,
            sums_of_squares(x, y) if needs_slices else None,
            checksums,
        )

    def of_rows(self, match: MatchedPair, parts: Sequence[RowFigures]) -> PairVerdict | None:
        """Return the verdict on a pair whose rows are all measured; None if it takes both tensors at once.

        So does one whose bytes do not match their checksum: they are then read again.
        """
        entry, other = match.baseline, match.candidates[0]
        whole = merged_rows(parts, entry.shape)
        for one, checksum in zip((entry, other), whole.checksums, strict=True):
            if one.location is not None and checksum != one.location.checksum:
                return None
        allowed = self.tolerance(match, entry.dtype, other.dtype)
        figures = figures_of(whole.difference, entry.shape, rtol=allowed.rtol, atol=allowed.atol)
        x, y = (TensorKind(one.dtype, entry.shape) for one in (entry, other))
        is_odd = not figures.num_different and whole.difference.num_elements and not whole.difference.num_finite
        if is_odd or (whole.may_hide and not figures.allclose):
            return None
        if whole.slices is None and self._needs_slices(match, not figures.allclose):
            whole = merged_rows([self._with_squares(match, part) for part in parts], entry.shape)
        pair = self.verdict(match, figures, x, y, whole.drift, functools.partial(_known, whole.slices))
        noise = self.noise_of(match) if pair.reason == ROUNDED else None
        is_update = noise is not None and noise.gradient is not None
        if is_update or (pair.reason == IF_COARSE and _are_coarse(*self.whole(match))):
            return None
        return PairVerdict(pair, whole.drift, self.count(match, entry.shape))

    def _needs_slices(self, match: MatchedPair, is_beyond: object) -> bool:
        """Whether a verdict asks for mean squares slice by slice: of a floor, or of what is beyond a tolerance."""
        return self.floor_of(match) is not None or (bool(is_beyond) and self.noise_of(match) is not None)

    def _with_squares(self, match: MatchedPair, part: RowFigures) -> RowFigures:
        """Return the figures of rows with their sums of squares; rows within tolerance were measured without."""
        if part.squares is not None:
            return part
        each = math.prod(match.baseline.shape[1:])
        first, number = part.start // each, part.difference.num_elements // each
        x, y, _ = self.rows(match, first, first + number)
        return replace(part, squares=sums_of_squares(widened(x), widened(y)))

    def same(self, match: MatchedPair) -> PairVerdict:
        """Return the verdict on a pair that is known to hold the same bytes on both sides."""
        allowed = self.tolerance(match, match.baseline.dtype, match.candidates[0].dtype)
        figures = _no_difference(math.prod(match.baseline.shape), allowed)
        pair = replace(self.pair_of(match), figures=figures)
        return PairVerdict(pair, None, self.count(match, match.baseline.shape))

    def verdict(
        self,
        match: MatchedPair,
        figures: Figures,
        x: TensorKind,
        y: TensorKind,
        drift: DriftSums | None,
        of_slices: Callable[[], Slices],
    ) -> Pair:
        """Return the verdict of figures.

        Args:
            match: What belongs together.
            figures: Of both sides.
            x: What the baseline's tensor is.
            y: What the candidate's is.
            drift: Of two precisions, the sums of their difference.
            of_slices: Returns the mean squares slice by slice, where a floor is known.
        """
        reason = None if x.dtype == y.dtype else f"dtypes differ: {x.dtype} and {y.dtype}"
        verdict: Verdict = "identical" if figures.num_different == 0 else "rounding" if figures.allclose else "wrong"
        pair = replace(self.pair_of(match), verdict=verdict, figures=figures, reason=reason)
        if figures.num_different == 0:
            return pair
        floor = self.floor_of(match)
        if self.floor is not None and floor is not None:
            why_not = _floor_does_not_fit(match, x, y, floor.slices)
            if why_not is None:
                found = noise_ratio(of_slices(), floor, self.floor.relative(match.baseline), x.dtype)
                by_floor: Verdict = "wrong" if found > WRONG else "suspicious" if found > SUSPICIOUS else "rounding"
                return replace(pair, verdict=by_floor, noise_ratio=found, judged_by=BY_FLOOR)
            pair = replace(pair, reason="; ".join(filter(None, (reason, why_not))))
        is_unknown = not self.is_given and is_small(figures, Tolerance(figures.rtol, figures.atol), x.dtype)
        is_apart = is_unknown or not figures.allclose
        if drift is not None and self.is_drift and is_apart and not figures.num_nonfinite_mismatch:
            is_real = is_floating(x.dtype) and is_floating(y.dtype)
            left = by_drift(drift, num_elements=math.prod(x.shape), is_real=is_real)
            return replace(pair, verdict=left, judged_by=BY_PRECISION)
        if is_unknown:
            small: Verdict = "wrong" if is_multiple(figures) else "suspicious"
            return replace(pair, verdict=small, reason=SCALED if small == "wrong" else TOO_SMALL)
        noise = self.noise_of(match) if pair.verdict == "wrong" else None
        if noise is not None and may_be_rounding(figures, of_slices(), noise):
            return replace(pair, verdict="suspicious", reason=ROUNDED)
        if not self.is_given and pair.verdict == "wrong" and may_be_coarse(figures, x.dtype, y.dtype):
            return replace(pair, reason=IF_COARSE)
        return pair

    def statistics(self, match: MatchedPair) -> tuple[Summary, Summary, Summary | None, Summary | None]:
        """Return the statistics of both sides, and of absolute and relative errors where the shapes are the same."""
        x, y = self.whole(match)
        if x.dtype == y.dtype and np.array_equal(x.array, y.array):  # false where there are NaN
            same = _summary(stream_of(x.array), x)
            return (
                same,
                same,
                _zeros(x.array.shape, x.array.size),
                _zeros(x.array.shape, int(np.count_nonzero(x.array))),
            )
        own = [_summary(stream_of(one.array), one) for one in (x, y)]
        if x.array.shape != y.array.shape:
            return own[0], own[1], None, None
        kind = ArrayValues(x.array, "float64")
        errors = [_summary(error_stream_of(x.array, y.array, relative=relative), kind) for relative in (False, True)]
        return own[0], own[1], errors[0], errors[1]

    def noise_of(self, match: MatchedPair) -> Noise | None:
        """Return what roundings add up to in a tensor, where tolerances are those of dtypes and do not know it."""
        return None if self.is_given or self.has_drift or self.floor is not None else self._roundings.before(match)

    @functools.cached_property
    def _roundings(self) -> Roundings:
        return Roundings(self.left, self.right)

    def pair_of(self, match: MatchedPair, verdict: Verdict | None = None) -> Pair:
        """Return a pair of which nothing but the verdict is known."""
        entry = match.baseline
        by = BY_GIVEN_TOLERANCE if self.is_given else BY_TOLERANCE
        facts: dict[str, Any] = {"rank": entry.rank, "dtype": entry.dtype, "shape": tuple(entry.shape)}
        return Pair(
            entry.step, entry.site, match.candidate_site, match.method, 1.0, verdict or "identical", by, **facts
        )

    def floor_of(self, match: MatchedPair) -> StoredFloor | None:
        """Return what rounding alone does to the baseline of a match, where that is known and asked for."""
        return None if self.floor is None or self.is_given else self.floor.of(match.baseline)

    @property
    def is_given(self) -> bool:
        """Whether tolerances are given, which no evidence widens."""
        return self.rtol is not None or self.atol is not None

    def tolerance(self, match: MatchedPair, x: str, y: str) -> Tolerance:
        """Return the loosest tolerance of the dtypes involved: a cast does not undo the rounding of what it is from."""
        dtypes = {match.baseline.dtype, x, y, *(entry.dtype for entry in match.candidates)}
        return _loosest(frozenset(dtypes), self.rtol, self.atol)

    def _difference(self, x: ArrayValues, y: ArrayValues, allowed: Tolerance) -> RawDifference:
        if self.device == "cpu":
            return difference_of_arrays(x.array, y.array, rtol=allowed.rtol, atol=allowed.atol)
        import torch

        from glassengine.blocks import difference

        tensors = (torch.from_numpy(one.array) for one in (x, y))
        return difference(*tensors, rtol=allowed.rtol, atol=allowed.atol, device=self.device)

    def _is_another_update(self, match: MatchedPair, y: Array, x: Array) -> bool:
        """Whether a parameter differs by a multiple of its gradient: by another learning rate, or scale of the loss."""
        noise = self.noise_of(match)
        if noise is None or noise.gradient is None or self.left.is_assembled:
            return False
        gradient = self.left.values(noise.gradient).array.astype(np.float64)
        difference = y.astype(np.float64) - x.astype(np.float64)
        return gradient.shape == x.shape and any(is_along(difference, one) for one in (gradient, np.sign(gradient)))


def rows_of(match: MatchedPair, num_bytes: int, first: int = 0, end: int | None = None) -> list[tuple[int, int]]:
    """Return first and end of the rows that a pair, or its rows from `first` to `end`, is cut into.

    Args:
        match: The pair.
        num_bytes: Of a side of such rows, at most, unless a single row has more.
        first: Row.
        end: Row; None is that after the last one.
    """
    count = match.baseline.shape[0]
    size = max(one.nbytes for one in (match.baseline, match.candidates[0]))
    at_once, end = max(1, count * num_bytes // max(1, size)), count if end is None else end
    return [(start, min(end, start + at_once)) for start in range(first, end, at_once)]


def _summary(stream: Stream, of: ArrayValues) -> Summary:
    return Summary(shape=of.array.shape, dtype=of.dtype, **vars(statistics_of(stream)))


def _zeros(shape: tuple[int, ...], number: int) -> Summary:
    """Return the statistics of so many errors of 0."""
    each = 0.0 if number else None
    return Summary(shape, "float64", number, min=each, mean=each, median=each, max=each, std=each, num_nan=0, num_inf=0)


def _are_coarse(x: ArrayValues, y: ArrayValues) -> bool:
    return all(precision_of(one) != one.dtype for one in (x, y))


def _kind(values: ArrayValues) -> TensorKind:
    return TensorKind(values.dtype, values.array.shape)


def _known(found: Slices | None) -> Slices:
    assert found is not None
    return found


@functools.lru_cache(maxsize=256)
def _no_difference(num_elements: int, allowed: Tolerance) -> Figures:
    figures = figures_of(merged(()), (0,), rtol=allowed.rtol, atol=allowed.atol)
    return replace(figures, num_elements=num_elements)


@functools.lru_cache(maxsize=256)
def _loosest(dtypes: frozenset[str], rtol: float | None, atol: float | None) -> Tolerance:
    each = [tolerance(dtype, dtype, rtol=rtol, atol=atol) for dtype in dtypes]
    return Tolerance(max(one.rtol for one in each), max(one.atol for one in each))


def _floor_does_not_fit(match: MatchedPair, x: TensorKind, y: TensorKind, noise: Sequence[Means]) -> str | None:
    """Return why the floor of the baseline does not apply to this pair, if it does not."""
    if match.rule is not None and match.rule.baseline_ops:
        return "the floor is of another layout"
    if any(len(means) != size for means, size in zip(noise, x.shape, strict=True)):
        return "the floor is of another shape"
    if all(is_floating(side.dtype) for side in (x, y)) and limits(y.dtype).eps > limits(x.dtype).eps:
        return f"the floor is that of {x.dtype}, too fine for {y.dtype}"
    return None


@dataclass(frozen=True)
class RowFigures:
    """The figures of some rows.

    Attributes:
        start: Flat position of the first element.
        difference: Sums over the elements.
        may_hide: Whether both sides have values by which a mask hides something; `difference` is then not meaningful.
        drift: Sums of the difference of two precisions.
        squares: Sums of squares by slices, where they are asked for.
        checksums: Of the bytes of both sides.
    """

    start: int
    difference: RawDifference
    may_hide: bool
    drift: DriftSums | None
    squares: Slices | None
    checksums: Checksums


@dataclass(frozen=True)
class WholeFigures:
    """The figures of all rows of a pair; `slices` are means."""

    difference: RawDifference
    may_hide: bool
    drift: DriftSums | None
    slices: Slices | None
    checksums: tuple[int, int]


def merged_rows(parts: Sequence[RowFigures], shape: tuple[int, ...]) -> WholeFigures:
    """Return the figures of a tensor of `shape`, each row of which is in one of `parts`, in their order."""
    drift = None
    if parts[0].drift is not None:
        drift = DriftSums()
        for part in parts:
            assert part.drift is not None
            drift.merge(part.drift)
        drift.num_tensors = min(1, drift.num_tensors)
    return WholeFigures(
        merged([(part.start, part.difference) for part in parts]),
        any(part.may_hide for part in parts),
        drift,
        _means([part.squares for part in parts], shape),
        (crc32_joined([part.checksums[0] for part in parts]), crc32_joined([part.checksums[1] for part in parts])),
    )


def _means(of_rows: Sequence[Slices | None], shape: tuple[int, ...]) -> Slices | None:
    parts = [part for part in of_rows if part is not None]
    if len(parts) < len(of_rows):
        return None

    def along(sides: Sequence[tuple[Means, ...]]) -> tuple[Means, ...]:
        rows = np.concatenate([axes[0] for axes in sides])
        return (rows, *(np.stack([axes[axis] for axes in sides]).sum(0) for axis in range(1, len(shape))))

    errors, powers = along([part.errors for part in parts]), along([part.powers for part in parts])
    return Slices(sum(part.error for part in parts), sum(part.power for part in parts), errors, powers).means(shape)
