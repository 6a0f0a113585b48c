"""Rounding or mistake: the error of a tensor against a float64 reference, over a measured noise floor.

The test is slice-wise, over every index of every axis, because the mean of a whole tensor hides a mistake in one
channel or token:

    noise_ratio  = max over slices of rms_s(candidate - P) / floor_s          (floor_s, P and D: see `floor`)

Thresholds: 4 and 8 are those of the accumulated test in `docs/numerics.md` (4: 0.5 % of legitimate runs exceed it
somewhere, 8: none of 336).

An error that one op introduced is beyond rounding where floor and rounding bound B (`bounds`) agree:

    bound_ratio  = max |candidate - P| / B
    uneven_ratio = rms((candidate - P) / B) / max( rms(D / B) over the runs, 0.15 )       counts where bound_ratio > 2
    suspicious: max(noise_ratio, uneven_ratio) > 2 (wrong: >= 10) and bound_ratio > 1

uneven_ratio shows what noise_ratio hides: errors of small elements beside large ones (half-precision gelu by tanh).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from glassengine.numerics.exemptions import PADDING
from glassengine.numerics.floor import Counted, Floor, QuickFloor, error_means, measured_floor, quick_floor
from glassengine.numerics.judgement import (
    INTRODUCED_SUSPICIOUS,
    INTRODUCED_WRONG,
    SUSPICIOUS,
    UNBOUNDED_WRONG,
    WRONG,
    Judgement,
    smallest_precise,
    unit_roundoff,
)
from glassengine.numerics.kinds import NOTHING, KnownValues, other_kind, parts, unequal
from glassengine.numerics.mask_values import (
    HIDDEN,
    is_below,
    is_finite,
    kind_of,
    mean_where,
    same_where,
    sentinel,
)
from glassengine.results import Verdict

# Large elements hide an error of small ones in a mean. It counts where it is this far beyond the bound of some element
# and, over all of them, that much larger in units of the bound than rounding is.
UNEVEN = 2.0
_LEAST_SHARE = 0.15
"""Of the bound: rounding is never taken to be less, or after an underestimated floor the bound alone would decide."""

TIE = "a tie: the values differ by less than rounding"

TIED = "they depend on a tie, and other values are legal"


class Reference:
    """The float64 reference of one tensor with its noise floor; judges any number of candidates.

    Args:
        exact: P, float64 (or the exact value of an integer or bool tensor).
        native: The same tensor of the run in the program's own dtype.
        noisy: The same tensor of the Monte-Carlo runs, float64.
        dtype: Floating dtype in which the tensor is computed; the coarser one when the candidate's is coarser.
        valid: Bool mask that broadcasts against the tensor, or None when every element counts.
        tied: Bool mask in the shape of the tensor: elements of which another value is legal, as something above chose
            among values that differ by less than rounding. None if there are none.
        known: What the graph says of it; `known.exempt` are the elements that `valid` and `tied` leave out, by reason.
        relative_floor: Largest rms(D) / rms(P) seen for this site so far: that of a short decode row may be too
            small.
        remember: Called when the floor is measured, which is when it is first needed.

    Attributes:
        unstable: Of an integer or bool tensor: elements that are tied, or changed by rounding in a run; None if none.
    """

    def __init__(
        self,
        exact: torch.Tensor,
        native: torch.Tensor,
        noisy: Sequence[torch.Tensor],
        *,
        dtype: torch.dtype,
        valid: torch.Tensor | None,
        tied: torch.Tensor | None = None,
        known: KnownValues = NOTHING,
        relative_floor: float = 0.0,
        remember: Callable[[float], None] | None = None,
    ) -> None:
        self.exact = exact
        self.native = native
        # Where values decide how many rows there are, a run that rounds otherwise may make others.
        self._noisy = [run for run in noisy if run.shape == exact.shape]
        self._runs = [*([native] if native.shape == exact.shape else []), *self._noisy]
        self.valid = valid.expand(exact.shape) if valid is not None else None
        self._tied = tied
        self.known = known
        self._dtype = dtype
        self._relative_floor = relative_floor
        self._remember = remember
        self._floor: Floor | None = None
        self._quick: QuickFloor | None = None
        self.unstable: torch.Tensor | None = None
        if not exact.is_floating_point():
            differs = [] if exact.is_complex() else [run != exact for run in self._runs]
            differs += [] if tied is None else [tied]
            found = torch.stack(differs).any(0) if differs else None
            self.unstable = found if found is not None and bool(found.any()) else None
            return
        self._judged = self.valid if tied is None else ~tied if self.valid is None else self.valid & ~tied
        self._limit = sentinel(dtype)
        self._u, self._tiny = unit_roundoff(dtype), smallest_precise(dtype)

    @property
    def relative_floor(self) -> float:
        """The largest rms(D) / rms(P) seen for this site, this tensor's among them."""
        self.measure_floor()
        return self._relative_floor

    def measure_floor(self) -> Floor | None:
        """Measure the floor; once, and only on demand. An integer or bool tensor has none."""
        if self._floor is None and self.exact.is_floating_point():
            self._floor = measured_floor(
                self.exact,
                self._runs,
                self._judged,
                hidden=self.known.hidden,
                dtype=self._dtype,
                relative=self._relative_floor,
            )
            self._relative_floor = self._floor.relative
            if self._remember is not None:
                self._remember(self._relative_floor)
        return self._floor

    def _quickly(self) -> QuickFloor | None:
        """Return the floor without slices; None where it is measured, or elements are special."""
        if self._floor is not None or self.known.hidden is not None:
            return None
        if self._quick is None:
            self._quick = quick_floor(self.exact, self._runs, self._judged, self._dtype, self._relative_floor)
            if self._quick is not None:
                self._relative_floor = self._quick.relative
                if self._remember is not None:
                    self._remember(self._relative_floor)
        return self._quick

    def with_run(self, run: torch.Tensor) -> Reference:
        """Return the reference with one more run behind its floor: another implementation that only rounds."""
        return self._with(noisy=[*self._noisy, run.double()])

    def kept_in(self, dtype: torch.dtype) -> Reference:
        """Return the reference for a candidate that keeps the tensor in a coarser dtype: a cache in halves, say."""
        if not self.exact.is_floating_point() or unit_roundoff(dtype) <= self._u:
            return self
        return self._with(noisy=[*self._noisy, self.exact.to(dtype).double()], dtype=dtype)

    def among(self, counted: torch.Tensor) -> Reference:
        """Return the reference by which those elements alone count; the mask broadcasts against the tensor."""
        return self._with(valid=counted if self.valid is None else self.valid & counted)

    def without_ties(self) -> Reference:
        """Return the reference by which elements that are tied count as all others do."""
        return self._with(tied=None)

    def by_native(self) -> Reference:
        """Return the reference without ties whose floor is the program's own run alone: no run that chose otherwise."""
        return self._with(tied=None, noisy=())

    def _with(self, **other: Any) -> Reference:
        arguments: dict[str, Any] = {
            "noisy": self._noisy,
            "dtype": self._dtype,
            "valid": self.valid,
            "tied": self._tied,
        }
        arguments |= {"relative_floor": self._relative_floor, "known": self.known}
        return Reference(self.exact, self.native, **(arguments | other))

    @property
    def share_of_ties(self) -> float:
        """Share of the elements that count, padding aside, of which another value is legal below a tie."""
        if self._tied is None or not self._tied.numel():
            return 0.0
        valid = torch.ones_like(self._tied) if self.valid is None else self.valid
        return int((self._tied & valid).sum()) / max(1, int(valid.sum()))

    def judge(self, candidate: torch.Tensor, *, roughly: bool = False) -> Judgement:
        """Judge one candidate tensor of any dtype on the same device by the floor alone.

        With `roughly`, the noise ratio of what is right may be too large.
        """
        found = self.measured(candidate, SUSPICIOUS if roughly else 0.0)
        if (ratio := found.noise_ratio) is None or found.verdict == "identical":
            return found
        verdict: Verdict = "wrong" if ratio > WRONG else "suspicious" if ratio > SUSPICIOUS else "rounding"
        if verdict != "rounding" or self._tied is None:
            return dataclasses.replace(found, verdict=verdict)
        left_out = f"{int(self._tied.sum())} of {self._tied.numel()} elements: {TIED}"
        return dataclasses.replace(found, verdict=verdict, reason=left_out)

    def is_tie(self, candidate: torch.Tensor) -> bool:
        """Whether an integer or bool candidate differs in such elements only as are known to be tied."""
        is_whole = not any(value.is_floating_point() or value.is_complex() for value in (candidate, self.exact))
        return is_whole and self.measured(candidate).verdict != "wrong"

    def judge_introduced(self, candidate: torch.Tensor, bound: torch.Tensor | None) -> Judgement:
        """Judge a candidate of which P is the float64 result of one op on its own inputs: floor and bound must agree.

        Args:
            candidate: Any dtype, on the same device.
            bound: The largest legal error of each element, or None where the class of the op has none.
        """
        found = self.measured(candidate)
        if (ratio := found.noise_ratio) is None or found.verdict == "identical":
            return found
        if bound is None:
            verdict: Verdict = "suspicious" if ratio >= INTRODUCED_WRONG else "rounding"
            verdict = "wrong" if ratio >= self._wrong_without_bound else verdict
            return dataclasses.replace(found, verdict=verdict, reason="no rounding bound is known for this op")
        share = self._share(candidate, bound)
        bound_ratio = float(share.max()) if share.numel() else 0.0
        if bound_ratio > UNEVEN:
            ratio = max(ratio, self._uneven_ratio(share, bound))
        is_beyond = bound_ratio > 1 and ratio > INTRODUCED_SUSPICIOUS
        verdict = "rounding" if not is_beyond else "wrong" if ratio >= INTRODUCED_WRONG else "suspicious"
        return dataclasses.replace(found, verdict=verdict, noise_ratio=ratio, bound_ratio=bound_ratio)

    @property
    def _wrong_without_bound(self) -> float:
        """From which noise ratio on the floor alone decides: three digits beyond rounding, or a tenth of the values."""
        tenth = 0.1 / max(self._relative_floor, self._u / math.sqrt(3))
        return max(INTRODUCED_WRONG, min(UNBOUNDED_WRONG, tenth))

    def distance(self, candidate: torch.Tensor) -> float | None:
        """Return the RMS of the error over every valid element, tied ones too; None where shapes or kinds differ."""
        if candidate.shape != self.exact.shape or not (
            candidate.is_floating_point() and self.exact.is_floating_point()
        ):
            return None
        return float(mean_where((candidate.double() - self.exact).square(), self.valid) ** 0.5)

    @property
    def is_silent(self) -> bool:
        """Whether all elements are tied, so that no candidate is judged by any."""
        return self._tied is not None and bool(self._tied.all())

    def has_outliers(self, candidate: torch.Tensor) -> bool:
        """Whether an element is so far from P that its error may be beyond a bound that the noise ratio does not see.

        No bound is below 1.3 u |P| + 4 tiny (see `bounds`), so without outliers bound_ratio is at most `UNEVEN`.
        """
        least = 1.3 * self._u * self.exact.abs() + 4 * self._tiny
        far = (candidate.double() - self.exact).abs() > UNEVEN * least
        counted = self._counted()
        return bool((far if counted is None else far & counted).any())

    def _share(self, value: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
        """Error over bound of each element that counts, 0 for the others."""
        error = (value.double() - self.exact).abs()
        share = torch.where(error > 0, error / bound, 0.0)
        counted = self._counted()
        return share if counted is None else torch.where(counted, share, 0.0)

    def _uneven_ratio(self, share: torch.Tensor, bound: torch.Tensor) -> float:
        """Rho of the whole tensor with every element in units of its bound."""
        counted = self._counted()
        legal = [self._share(run, bound).nan_to_num(0.0, 0.0, 0.0) for run in self._runs]
        floor = math.sqrt(max(mean_where(own.square(), counted) for own in legal))
        return math.sqrt(mean_where(share.square(), counted)) / max(floor, _LEAST_SHARE)

    def measured(self, candidate: torch.Tensor, at_most: float = 0.0) -> Judgement:
        """Return the noise ratio and the error; the verdict is final where that is None or the values are identical.

        Where the noise ratio is `at_most` that, a number between the two may take its place, which costs less.
        """
        exact = self.exact
        if candidate.shape != exact.shape:
            shapes = f"shape {tuple(candidate.shape)}, baseline {tuple(exact.shape)}"
            return Judgement("wrong", None, None, shapes)
        if (kinds := other_kind(candidate, self.native)) or exact.is_complex():
            found = self._of_kind(candidate)
            return found if found.reason else dataclasses.replace(found, reason=kinds)
        if not exact.is_floating_point():
            return self._judge_exact(candidate)
        if candidate.dtype is self.native.dtype and same_where(candidate, self.native, self.valid):
            known = self._quickly() or self.measure_floor()
            assert known is not None
            return Judgement("identical", 0.0, math.sqrt(known.native))
        if at_most and (within := self._within(candidate, at_most)) is not None:
            return within
        floor = self.measure_floor()
        assert floor is not None
        value = candidate.double()
        squares = error_means(exact, [value], floor.counted)
        # No element of `value` is larger than the largest of P and the largest error together.
        is_large = not floor.largest + squares.totals[0] ** 0.5 < self._limit
        if is_large or self.known.hidden is not None or (self._tied is not None and not is_finite(value)):
            mismatch = self._special_mismatch(value)
            if mismatch:
                return Judgement("wrong", None, None, mismatch)
        (mean,) = squares.means
        ratio = mean / floor.least if floor.least else float("inf") if mean else 0.0
        for of_axis, (by_index,) in zip(floor.by_axis, squares.by_axis, strict=True):
            ratios = by_index / of_axis
            if not (floor.least and mean < math.inf):
                ratios = torch.where(by_index > 0, ratios, 0.0)
            ratio = max(ratio, float(ratios.amax()) if ratios.numel() else 0.0)
        is_empty = self._judged is not None and not bool(self._judged.any())
        return Judgement("rounding", ratio**0.5, mean**0.5, is_empty=is_empty)

    def _within(self, candidate: torch.Tensor, at_most: float) -> Judgement | None:
        """Return that no slice of the error exceeds so many times the floor of the whole tensor; None if one may."""
        quick = self._quickly() if self._tied is None else None
        if quick is None:
            return None
        squares = error_means(self.exact, [candidate], Counted(self._judged))
        worst = max([squares.means[0], *(float(one.amax()) for one in squares.by_axis if one.numel())])
        is_small = quick.largest + squares.totals[0] ** 0.5 < self._limit
        if not is_small or not worst <= at_most**2 * quick.least:
            return None
        is_empty = self._judged is not None and not bool(self._judged.any())
        return Judgement("rounding", (worst / quick.least) ** 0.5, squares.means[0] ** 0.5, is_empty=is_empty)

    def _counted(self) -> torch.Tensor | None:
        """Elements that enter the statistics: valid, not tied and, by a measured floor, not special; None: all."""
        return self._judged if self._floor is None else self._floor.counted.mask

    def _special_mismatch(self, value: torch.Tensor) -> str | None:
        known = None if self._floor is None else self._floor.special
        if known is None and is_below(value, self._limit):
            return None
        odd = ~value.isfinite() | (value.abs() >= self._limit)
        special = known if known is not None else torch.zeros_like(odd)
        differs = (odd != special) | (odd & special & (kind_of(value, self._limit) != kind_of(self.exact, self._limit)))
        if self.known.hidden is not None:
            differs = torch.where(self.known.hidden, ~(value <= HIDDEN), differs)
        if self._judged is not None:
            # No choice makes NaN of numbers.
            is_broken = value.isnan() if self.valid is None else value.isnan() & self.valid
            differs = differs & (self._judged | is_broken)
        if not bool(differs.any()):
            return None
        index = tuple(int(i) for i in differs.nonzero()[0])
        kind = f"{int(differs.sum())} non-finite or mask values differ"
        return f"{kind}, first at {list(index)}: {value[index]:.6g} for {self.exact[index]:.6g}"

    def _of_kind(self, candidate: torch.Tensor) -> Judgement:
        """Measure another kind of number, and complex ones by their parts."""
        if self.exact.is_complex() or candidate.is_complex():
            masks = [None if one is None else torch.stack([one, one], -1) for one in (self.valid, self._tied)]
            native, runs = parts(self.native), [parts(run) for run in self._noisy]
            whole = Reference(parts(self.exact), native, runs, dtype=native.dtype, valid=masks[0], tied=masks[1])
            return whole.measured(parts(candidate))
        is_float = self.exact.is_floating_point()
        return self.measured(candidate.to(self.native.dtype)) if is_float else self._judge_exact(candidate)

    def _judge_exact(self, candidate: torch.Tensor) -> Judgement:
        differs = unequal(candidate, self.exact)
        if self.valid is not None:
            differs = differs & self.valid
        if not bool(differs.any()):
            return Judgement("identical", 0.0, 0.0)
        if self.unstable is not None:
            differs = differs & ~self.unstable
        count = int(differs.sum())
        if not count:
            return Judgement("rounding", None, None, TIE, is_tie=True)
        return Judgement("wrong", None, None, f"{count} of {differs.numel()} {candidate.dtype} elements differ")


class SameBits(Reference):
    """The reference of a tensor of which every side has the bits of the baseline's own run: nothing is measured."""

    def __init__(self, native: torch.Tensor, valid: torch.Tensor | None) -> None:
        known = NOTHING if valid is None else KnownValues({PADDING: ~valid.expand(native.shape)})
        super().__init__(native, native, (), dtype=native.dtype, valid=valid, known=known)

    def judge(self, candidate: torch.Tensor, *, roughly: bool = False) -> Judgement:
        """Return that a tensor with these bits is identical."""
        assert torch.equal(candidate, self.native)
        return Judgement("identical", 0.0, 0.0)

    def with_run(self, run: torch.Tensor) -> Reference:
        """Return itself: without a floor no run is behind it."""
        return self
