"""The verdict on a match by its figures: what they are compared with, and what follows; no tensor is asked."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from glassengine.blocks.merging import merged
from glassengine.compare.evidence import Evidence, whole_of
from glassengine.compare.matching.matching import Match
from glassengine.compare.precision import by_drift
from glassengine.compare.roundings import ROUNDED, Noise, Roundings, may_be_rounding
from glassengine.compare.sides import Counted, Sides
from glassengine.compare.small import IF_COARSE, SCALED, TOO_SMALL, is_multiple, is_small, may_be_coarse
from glassengine.numerics.judgement import SUSPICIOUS, WRONG
from glassengine.numerics.limits import is_floating, limits
from glassengine.numerics.metrics.drift import DriftSums
from glassengine.numerics.metrics.figures import figures_of
from glassengine.numerics.metrics.noise_ratio import Means, Slices, noise_ratio
from glassengine.numerics.metrics.tolerance import Tolerance, tolerance
from glassengine.recording.layout.noise_floor import Floor, NoiseFloor
from glassengine.results import VERDICTS, Figures, Pair, Verdict

BY_FLOOR = "noise floor"
BY_TOLERANCE = "tolerance (uncalibrated)"
BY_GIVEN_TOLERANCE = "given tolerance"
BY_SHAPE = "shape"
BY_PRECISION = "what is left of the signal"


_Slices = Callable[[], Slices]


class Kind(NamedTuple):
    """What a tensor is, without its values."""

    dtype: str
    shape: tuple[int, ...]


class Judged(NamedTuple):
    """The verdict on a pair, and what it adds to tables of all pairs."""

    pair: Pair
    drift: DriftSums | None
    counted: Counted


@dataclass(frozen=True)
class Ruling(Sides):
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

    def of_rows(self, match: Match, parts: Sequence[Evidence]) -> Judged | None:
        """Return the verdict on a match of all whose rows the figures are known; None if it takes both at once.

        So does one whose bytes do not match their checksum: they are then read again.
        """
        entry, other = match.baseline, match.candidates[0]
        whole = whole_of(parts, entry.shape)
        for one, checksum in zip((entry, other), whole.checksums, strict=True):
            if one.location is not None and checksum != one.location.checksum:
                return None
        allowed = self.tolerance(match, entry.dtype, other.dtype)
        figures = figures_of(whole.difference, entry.shape, rtol=allowed.rtol, atol=allowed.atol)
        if whole.may_hide and not figures.allclose:
            return None
        x, y = (Kind(one.dtype, entry.shape) for one in (entry, other))
        verdict = self.verdict(match, figures, x, y, whole.drift, functools.partial(_known, whole.slices))
        return Judged(verdict, whole.drift, (0, ()))

    def same(self, match: Match) -> Judged:
        """Return the verdict on a match that is known to hold the same bytes on both sides."""
        allowed = self.tolerance(match, match.baseline.dtype, match.candidates[0].dtype)
        figures = _no_difference(math.prod(match.baseline.shape), allowed)
        pair = dataclasses.replace(self.pair_of(match), figures=figures)
        return Judged(pair, None, self.count(match, match.baseline.shape))

    def verdict(
        self, match: Match, figures: Figures, x: Kind, y: Kind, drift: DriftSums | None, of_slices: _Slices
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
        pair = dataclasses.replace(self.pair_of(match), verdict=verdict, figures=figures, reason=reason)
        if figures.num_different == 0:
            return pair
        floor = self.floor_of(match)
        if self.floor is not None and floor is not None:
            why_not = _floor_does_not_fit(match, x, y, floor.slices)
            if why_not is None:
                found = noise_ratio(of_slices(), floor, self.floor.relative(match.baseline), x.dtype)
                by_floor: Verdict = "wrong" if found > WRONG else "suspicious" if found > SUSPICIOUS else "rounding"
                return dataclasses.replace(pair, verdict=by_floor, noise_ratio=found, judged_by=BY_FLOOR)
            pair = dataclasses.replace(pair, reason="; ".join(filter(None, (reason, why_not))))
        is_unknown = not self.is_given and is_small(figures, Tolerance(figures.rtol, figures.atol), x.dtype)
        is_apart = is_unknown or not figures.allclose
        if drift is not None and self.is_drift and is_apart and not figures.num_nonfinite_mismatch:
            is_real = is_floating(x.dtype) and is_floating(y.dtype)
            left = by_drift(drift, num_elements=math.prod(x.shape), is_real=is_real)
            return dataclasses.replace(pair, verdict=left, judged_by=BY_PRECISION)
        if is_unknown:
            small: Verdict = "wrong" if is_multiple(figures) else "suspicious"
            return dataclasses.replace(pair, verdict=small, reason=SCALED if small == "wrong" else TOO_SMALL)
        noise = self.noise_of(match) if pair.verdict == "wrong" else None
        if noise is not None and may_be_rounding(figures, of_slices(), noise):
            return dataclasses.replace(pair, verdict="suspicious", reason=ROUNDED)
        if not self.is_given and pair.verdict == "wrong" and may_be_coarse(figures, x.dtype, y.dtype):
            return dataclasses.replace(pair, reason=IF_COARSE)
        return pair

    def noise_of(self, match: Match) -> Noise | None:
        """Return what roundings add up to in a tensor, where tolerances are those of dtypes and do not know it."""
        return None if self.is_given or self.has_drift or self.floor is not None else self._roundings.before(match)

    @functools.cached_property
    def _roundings(self) -> Roundings:
        return Roundings(self.left, self.right)

    def pair_of(self, match: Match, verdict: Verdict | None = None) -> Pair:
        """Return a pair of which nothing but the verdict is known."""
        entry = match.baseline
        by = BY_GIVEN_TOLERANCE if self.is_given else BY_TOLERANCE
        told: dict[str, Any] = {"rank": entry.rank, "dtype": entry.dtype, "shape": tuple(entry.shape)}
        return Pair(entry.step, entry.site, match.candidate_site, match.method, 1.0, verdict or "identical", by, **told)

    def floor_of(self, match: Match) -> Floor | None:
        """Return what rounding alone does to the baseline of a match, where that is known and asked for."""
        return None if self.floor is None or self.is_given else self.floor.of(match.baseline)

    @property
    def is_given(self) -> bool:
        """Whether tolerances are given, which no evidence widens."""
        return self.rtol is not None or self.atol is not None

    def tolerance(self, match: Match, x: str, y: str) -> Tolerance:
        """Return the loosest tolerance of the dtypes involved: a cast does not undo the rounding of what it is from."""
        dtypes = {match.baseline.dtype, x, y, *(entry.dtype for entry in match.candidates)}
        return _loosest(frozenset(dtypes), self.rtol, self.atol)


@functools.lru_cache(maxsize=256)
def _no_difference(num_elements: int, allowed: Tolerance) -> Figures:
    figures = figures_of(merged(()), (0,), rtol=allowed.rtol, atol=allowed.atol)
    return dataclasses.replace(figures, num_elements=num_elements)


def _known(found: Slices | None) -> Slices:
    assert found is not None
    return found


@functools.lru_cache(maxsize=256)
def _loosest(dtypes: frozenset[str], rtol: float | None, atol: float | None) -> Tolerance:
    each = [tolerance(dtype, dtype, rtol=rtol, atol=atol) for dtype in dtypes]
    return Tolerance(max(one.rtol for one in each), max(one.atol for one in each))


def _floor_does_not_fit(match: Match, x: Kind, y: Kind, noise: Sequence[Means]) -> str | None:
    """Return why the floor of the baseline does not apply to this pair, if it does not."""
    if match.rule is not None and match.rule.baseline_ops:
        return "the floor is of another layout"
    if any(len(means) != size for means, size in zip(noise, x.shape, strict=True)):
        return "the floor is of another shape"
    if all(is_floating(side.dtype) for side in (x, y)) and limits(y.dtype).eps > limits(x.dtype).eps:
        return f"the floor is that of {x.dtype}, too fine for {y.dtype}"
    return None


def severity(pair: Pair) -> tuple[float, ...]:
    """Return a key that sorts pairs: by verdict, then different shapes before non-finite before size of the error."""
    rank = float(VERDICTS.index(pair.verdict))
    if pair.figures is None:
        return (rank, 1.0)
    size = -math.inf if math.isnan(pair.figures.snr_db) else -pair.figures.snr_db
    return (rank, 0.0, float(pair.figures.num_nonfinite_mismatch > 0), size)
