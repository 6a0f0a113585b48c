"""Judges one match: brings both tensors into one layout, measures them, compares the figures with a tolerance."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glassengine.blocks import difference
from glassengine.compare import shapes
from glassengine.compare.evidence import Evidence, Sums, whole_of
from glassengine.compare.matching.matching import Match
from glassengine.compare.precision import by_drift, drift_of
from glassengine.compare.sides import Counted, Sides
from glassengine.numerics.judgement import SUSPICIOUS, WRONG
from glassengine.numerics.mask_values import both_may_hide, without_hidden
from glassengine.numerics.metrics.drift import DriftSums
from glassengine.numerics.metrics.measure import figures_of, measure, summarize, summarize_errors
from glassengine.numerics.metrics.slices import Slices, noise_ratio, slices, sums_of_squares
from glassengine.numerics.metrics.tolerance import Tolerance, tolerance
from glassengine.recording.layout.noise_floor import Floor, NoiseFloor
from glassengine.recording.layout.values import dtype_name
from glassengine.recording.read.reader import damaged_values
from glassengine.results import VERDICTS, Figures, Pair, Summary, Verdict

BY_FLOOR = "noise floor"
BY_TOLERANCE = "tolerance (uncalibrated)"
BY_GIVEN_TOLERANCE = "given tolerance"
BY_SHAPE = "shape"
BY_PRECISION = "what is left of the signal"


_Slices = Callable[[], Slices]


class Judged(NamedTuple):
    """The verdict on a pair, and what it adds to tables of all pairs."""

    pair: Pair
    drift: DriftSums | None
    counted: Counted


@dataclass(frozen=True)
class Judge(Sides):
    """The two sides and how their tensors are judged.

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

    def pair(self, match: Match, *, added: Sequence[Match] = ()) -> Judged:
        """Return the verdict on one match.

        Args:
            match: What belongs together.
            added: What the candidate has of the same tensor under other names: shares of a gradient.

        Raises:
            UsageError: An operation of the map, or a transposition, does not fit the tensor.
        """
        x, y = self.tensors(match)
        counted = self.count(match, tuple(x.shape))
        for one in added:
            _, share = self.tensors(one)
            y = y + share if share.shape == y.shape else y
        if x.shape != y.shape:
            what = shapes.difference(tuple(x.shape), tuple(y.shape), match.baseline.site)
            pair = dataclasses.replace(self.pair_of(match), verdict="wrong", judged_by=BY_SHAPE, reason=what)
            return Judged(pair, None, counted)
        allowed = self._tolerance(match, _name(x), _name(y))
        figures = measure(x, y, rtol=allowed.rtol, atol=allowed.atol, device=self.device)
        if not figures.allclose and (shown := without_hidden(x, y)) is not None:
            # All mask values are equal.
            x, y = shown
            figures = measure(x, y, rtol=allowed.rtol, atol=allowed.atol, device=self.device)
        drift = drift_of(x, y) if self.has_drift else None
        return Judged(self._verdict(match, figures, x, y, drift, functools.partial(slices, x, y)), drift, counted)

    def rows(self, match: Match, first: int, end: int) -> tuple[Evidence, Counted]:
        """Return the figures of some rows of a match that `can_be_cut`."""
        x, y, checksums = self.rows_of(match, first, end)
        counted = self.count(match, match.baseline.shape, rows=(first, end))
        allowed = self._tolerance(match, _name(x), _name(y))
        found = difference(x, y, rtol=allowed.rtol, atol=allowed.atol, device=self.device)
        floor = self._floor_of(match)
        return Evidence(
            first * math.prod(match.baseline.shape[1:]),
            found,
            bool(found.num_beyond) and both_may_hide(x, y),
            drift_of(x, y) if self.has_drift else None,
            None if floor is None else Sums.of(sums_of_squares(x, y)),
            checksums,
        ), counted

    def of_rows(self, match: Match, parts: Sequence[Evidence]) -> Judged | None:
        """Return the verdict on a match of all whose rows the figures are known; None if it takes both at once.

        Raises:
            CorruptError: The bytes of a side do not match their checksum.
        """
        entry, other = match.baseline, match.candidates[0]
        whole = whole_of(parts, entry.shape)
        for one, checksum in zip((entry, other), whole.checksums, strict=True):
            if one.location is not None and checksum != one.location.checksum:
                raise damaged_values(one)
        allowed = self._tolerance(match, entry.dtype, other.dtype)
        figures = figures_of(whole.difference, entry.shape, rtol=allowed.rtol, atol=allowed.atol)
        if whole.may_hide and not figures.allclose:
            return None
        x, y = (torch.empty(one.shape, dtype=getattr(torch, one.dtype), device="meta") for one in (entry, other))
        verdict = self._verdict(match, figures, x, y, whole.drift, functools.partial(_known, whole.slices))
        return Judged(verdict, whole.drift, (0, ()))

    def same(self, match: Match) -> Judged:
        """Return the verdict on a match that is known to hold the same bytes on both sides."""
        allowed = self._tolerance(match, match.baseline.dtype, match.candidates[0].dtype)
        figures = _no_difference(math.prod(match.baseline.shape), allowed)
        pair = dataclasses.replace(self.pair_of(match), figures=figures)
        return Judged(pair, None, self.count(match, match.baseline.shape))

    def statistics(self, match: Match) -> tuple[Summary, Summary, Summary | None, Summary | None]:
        """Return the statistics of both sides, and of absolute and relative errors where the shapes are the same."""
        x, y = self.tensors(match)
        errors = summarize_errors(x, y, device=self.device) if x.shape == y.shape else (None, None)
        return summarize(x, device=self.device), summarize(y, device=self.device), *errors

    def _verdict(
        self, match: Match, figures: Figures, x: Tensor, y: Tensor, drift: DriftSums | None, of_slices: _Slices
    ) -> Pair:
        """Return the verdict of figures; of `x` and `y` only dtype and shape are asked."""
        reason = None if x.dtype == y.dtype else f"dtypes differ: {_name(x)} and {_name(y)}"
        verdict: Verdict = "identical" if figures.num_different == 0 else "rounding" if figures.allclose else "wrong"
        pair = dataclasses.replace(self.pair_of(match), verdict=verdict, figures=figures, reason=reason)
        if figures.num_different == 0:
            return pair
        floor = self._floor_of(match)
        if self.floor is not None and floor is not None:
            why_not = _floor_does_not_fit(match, x, y, floor.slices)
            if why_not is None:
                found = noise_ratio(of_slices(), floor, self.floor.relative(match.baseline), x.dtype)
                by_floor: Verdict = "wrong" if found > WRONG else "suspicious" if found > SUSPICIOUS else "rounding"
                return dataclasses.replace(pair, verdict=by_floor, noise_ratio=found, judged_by=BY_FLOOR)
            pair = dataclasses.replace(pair, reason="; ".join(filter(None, (reason, why_not))))
        if drift is not None and self.is_drift and not figures.allclose and not figures.num_nonfinite_mismatch:
            is_real = x.is_floating_point() and y.is_floating_point()
            left = by_drift(drift, num_elements=x.numel(), is_real=is_real)
            return dataclasses.replace(pair, verdict=left, judged_by=BY_PRECISION)
        return pair

    def pair_of(self, match: Match, verdict: Verdict | None = None) -> Pair:
        """Return a pair of which nothing but the verdict is known."""
        entry = match.baseline
        by = BY_GIVEN_TOLERANCE if self._is_given else BY_TOLERANCE
        told: dict[str, Any] = {"rank": entry.rank, "dtype": entry.dtype, "shape": tuple(entry.shape)}
        return Pair(entry.step, entry.site, match.candidate_site, match.method, 1.0, verdict or "identical", by, **told)

    def _floor_of(self, match: Match) -> Floor | None:
        return None if self.floor is None or self._is_given else self.floor.of(match.baseline)

    @property
    def _is_given(self) -> bool:
        return self.rtol is not None or self.atol is not None

    def _tolerance(self, match: Match, x: str, y: str) -> Tolerance:
        """Return the loosest tolerance of the dtypes involved: a cast does not undo the rounding of what it is from."""
        dtypes = {match.baseline.dtype, x, y, *(entry.dtype for entry in match.candidates)}
        return _loosest(frozenset(dtypes), self.rtol, self.atol)


@functools.lru_cache(maxsize=256)
def _no_difference(num_elements: int, allowed: Tolerance) -> Figures:
    nothing = torch.empty(0, dtype=torch.uint8)
    figures = measure(nothing, nothing, rtol=allowed.rtol, atol=allowed.atol)
    return dataclasses.replace(figures, num_elements=num_elements)


def _known(found: Slices | None) -> Slices:
    assert found is not None
    return found


@functools.lru_cache(maxsize=256)
def _loosest(dtypes: frozenset[str], rtol: float | None, atol: float | None) -> Tolerance:
    each = [tolerance(dtype, dtype, rtol=rtol, atol=atol) for dtype in dtypes]
    return Tolerance(max(one.rtol for one in each), max(one.atol for one in each))


def _floor_does_not_fit(match: Match, x: Tensor, y: Tensor, noise: Sequence[Tensor]) -> str | None:
    """Return why the floor of the baseline does not apply to this pair, if it does not."""
    if match.rule is not None and match.rule.baseline_ops:
        return "the floor is of another layout"
    if any(len(means) != size for means, size in zip(noise, x.shape, strict=True)):
        return "the floor is of another shape"
    if all(side.dtype.is_floating_point for side in (x, y)) and torch.finfo(y.dtype).eps > torch.finfo(x.dtype).eps:
        return f"the floor is that of {_name(x)}, too fine for {_name(y)}"
    return None


def severity(pair: Pair) -> tuple[float, ...]:
    """Return a key that sorts pairs: by verdict, then different shapes before non-finite before size of the error."""
    rank = float(VERDICTS.index(pair.verdict))
    if pair.figures is None:
        return (rank, 1.0)
    size = -math.inf if math.isnan(pair.figures.snr_db) else -pair.figures.snr_db
    return (rank, 0.0, float(pair.figures.num_nonfinite_mismatch > 0), size)


def _name(tensor: Tensor) -> str:
    return dtype_name(tensor.dtype)
