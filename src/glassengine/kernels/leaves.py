"""Judges one tensor of a result beside the float64 reference, and says in words which elements are meant."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from glassengine.kernels.trace import OnlyOp
from glassengine.numerics.floor import Counted, error_means
from glassengine.numerics.judgement import Judgement, smallest_precise, unit_roundoff
from glassengine.numerics.verdict import Reference
from glassengine.results.kernels import TensorMatch

_AXES = {1: ("elements",), 2: ("rows", "columns")}


def described(mask: Tensor) -> str:
    """Return which elements of a bool mask are set: "all", "the last 3 columns", "rows 64 to 99 of axis 1"."""
    if not mask.dim() or bool(mask.all()):
        return "all elements"
    if not bool(mask.any()):
        return "no elements"
    parts = []
    for axis in reversed(range(mask.dim())):
        others = [i for i in range(mask.dim()) if i != axis]
        hit = mask.any(others) if others else mask
        if hit.shape[0] > 1 and not bool(hit.all()):
            parts.append(_along(hit, axis, mask.dim()))
    share = int(mask.sum()) / mask.numel()
    if not parts:
        triangle = _triangle(mask)
        return triangle or f"{100 * share:.2g} % of the elements"
    return ", ".join(parts)


def _along(hit: Tensor, axis: int, rank: int) -> str:
    names = _AXES.get(rank)
    called = names[axis] if names else f"indices of axis {axis}" if axis < rank - 1 else "columns"
    size, places = hit.shape[0], hit.nonzero().flatten().tolist()
    first, last, count = places[0], places[-1], len(places)
    if count == last - first + 1:
        one = called.removesuffix("s") if called != "indices of axis" else called
        if last == size - 1:
            return f"the last {count} {called}" if count > 1 else f"the last of {size} {called}"
        if first == 0:
            return f"the first {count} {called}" if count > 1 else f"the first of {size} {called}"
        return f"{called} {first} to {last}" if count > 1 else f"{one} {first} of {size}"
    steps = {b - a for a, b in itertools.pairwise(places)}
    if len(steps) == 1 and count > 2:
        nth = {2: "second", 3: "third"}.get(step := steps.pop(), f"{step}th")
        return f"every {nth} of the {called}, from {first} on"
    few = ", ".join(map(str, places[:6])) + (", ..." if count > 6 else "")
    return f"{count} of {size} {called} ({few})"


def _triangle(mask: Tensor) -> str | None:
    """Return which triangle or diagonal of its last two axes a mask is."""
    if mask.dim() < 2 or mask.shape[-1] < 2 or mask.shape[-2] < 2:
        return None
    flat = mask.reshape(-1, *mask.shape[-2:])
    rows, columns = flat.any(0).nonzero(as_tuple=True)
    offsets = columns - rows
    low, high = int(offsets.min()), int(offsets.max())
    if low == high:
        return "the diagonal" if not low else f"the diagonal {abs(low)} {'above' if low > 0 else 'below'} the main one"
    if low > 0:
        return "the upper triangle"
    return "the lower triangle" if high < 0 else None


RIGHT = ("identical", "rounding")


def passes(one: TensorMatch) -> bool:
    """Whether rounding explains a tensor.

    Of several ops there is a floor and no bound: an error of four to eight times the floor is no proof of a mistake.
    """
    return one.verdict in RIGHT or (one.verdict == "suspicious" and one.bound_ratio is None)


_CHEAP = 2.0
"""Noise ratio that needs no noise run: the floor of the reference in its own dtype is one of rounding."""
FEW_RUNS, MANY_RUNS = 2, 8
_BEYOND = 8.0
_FAR = 16.0
_HALF = 2.0**-12
_BIASED = 5.0
"""Factor less 1 of all elements, over that of legal rounding, which no rounding makes."""

Runs = Callable[[int], list[Tensor]]
"""How many -> results of so many runs with rounding noise."""


@dataclasses.dataclass
class Expectation:
    """What a tensor should be: exact (in float64, or the integers themselves), and of the reference as it is."""

    exact: Tensor
    native: Tensor
    runs: Runs
    only: OnlyOp | None
    tied: Callable[[Tensor], Tensor | None]
    """Takes an integer candidate; says where another choice is legal."""
    chooses: bool
    """Whether the reference chooses among values that rounding changes."""
    unsettled_of: Callable[[], Tensor | None]
    u_ops: float
    """Unit roundoff of the coarsest op but casts and products, whose rounding is no factor of all elements."""
    cheap: float = _CHEAP
    """Error over that of the reference in its own dtype that needs no noise run."""
    quick_ratio: float = math.inf

    def __post_init__(self) -> None:
        self._native_dtype = self._own = self.native.dtype
        self.native = _usable(self.native)

    @cached_property
    def bound(self) -> Tensor | None:
        """The rounding bound; None where there is none."""
        return None if self.only is None else self.only.bound()

    @cached_property
    def unsettled(self) -> Tensor | None:
        """The elements that depend on a choice that rounding may turn; None if there are none."""
        return self.unsettled_of()

    @torch.no_grad()
    def judge(self, candidate: Tensor) -> Judgement:
        """Judge a candidate: cheaply where that decides, else with as much noise as it takes."""
        exact, native = self.exact, self.native
        if not exact.numel():
            return Judgement("identical", None, None)
        if exact.dtype == torch.bool or not (exact.is_floating_point() or exact.is_complex()):
            return self._whole_numbers(candidate)
        if candidate.is_complex() != exact.is_complex() or candidate.dtype == torch.bool:
            return Judgement("wrong", None, None, f"{candidate.dtype} in place of {native.dtype}")
        self._own, candidate = candidate.dtype, _usable(candidate)
        if self._own is self._native_dtype and torch.equal(candidate, native):
            return Judgement("identical", 0.0, None)
        # A choice that rounding has turned would make any floor too large.
        quick = None if self.chooses else self._quick(candidate)
        if quick is not None and not self._may_be_biased(candidate):
            return quick
        candidate, bound = self._accepting_overflow(candidate), self.bound
        for number in (0, FEW_RUNS, MANY_RUNS):
            found = self._by(candidate, self.runs(number), bound)
            if found.verdict in RIGHT or found.noise_ratio is None:
                break
        is_decided = found.verdict == "wrong" or (bound is not None and not self._may_be_biased(candidate))
        return found if is_decided else self._further(candidate, found)

    def _may_be_biased(self, candidate: Tensor) -> bool:
        """Whether results of half precision may all be off in one direction, as no rounding to nearest makes them."""
        if unit_roundoff(self._own) < _HALF or self._own.itemsize < 2 or not self.exact.is_floating_point():
            return False
        errors = [(t.double() - self.exact).nan_to_num(0.0, 0.0, 0.0) for t in (candidate, self.native)]
        own, level = self._factors(errors, list(range(self.exact.dim())))
        return abs(float(own)) > _BIASED * float(level)

    @cached_property
    def _size(self) -> Tensor:
        """The results, 0 where they are not counted."""
        counted = self.exact.isfinite() if self.unsettled is None else self.exact.isfinite() & ~self.unsettled
        return torch.where(counted, self.exact, 0.0)

    def _factors(self, errors: Sequence[Tensor], dims: list[int]) -> tuple[Tensor, Tensor]:
        """Return (factor less 1 of the first of `errors`, that of legal rounding), of slices that have these axes."""
        size, u = self._size, max(map(unit_roundoff, (self._own, self._native_dtype)))
        square = size.square()
        power = square.sum(dims)
        power = power.clamp(min=max(float(power.mean()), 1e-300))  # in small slices a factor is no error that counts
        own, *legal = ((error * size).sum(dims) / power for error in errors)
        noise = torch.stack([error.square() for error in errors[1:]]).mean(0)
        spread = (torch.maximum(noise, square * u * u / 3) * square).sum(dims).sqrt() / power
        level = torch.stack([spread, *map(torch.abs, legal)]).amax(0)
        return own, level.clamp(min=max(float(level.mean()), self.u_ops))

    def _further(self, candidate: Tensor, found: Judgement) -> Judgement:
        """Judge what a floor of the whole tensor hides: an error of small rows, and a factor of all or of a slice."""
        if not self.exact.is_floating_point():
            return found
        value, runs = candidate.double(), [self.native.double(), *self.runs(MANY_RUNS)]
        errors = [(run - self.exact).nan_to_num(0.0, 0.0, 0.0) for run in (value, *runs)]
        axes = range(self.exact.dim())
        for kept in (None, *(axes if len(axes) > 1 else ())):
            own, level = self._factors(errors, [axis for axis in axes if axis != kept])
            place = int((own.abs() / level).argmax())
            if float(own.abs().flatten()[place]) > _BIASED * float(level.flatten()[place]):
                which = "all" if kept is None else f"those of index {place} of axis {kept}"
                text = f"{which} are multiplied by {1 + float(own.flatten()[place]):.6g}"
                return Judgement("wrong", found.noise_ratio, found.rms_error, text)
        size, u = self._size, max(map(unit_roundoff, (self._own, self._native_dtype)))
        if self.exact.dim() < 2:
            return found
        noise = torch.stack([error.square() for error in errors[1:]]).mean(0)
        level = torch.where(size != 0, noise + (u * size).square() / 3, 0.0).mean(-1, keepdim=True).sqrt()
        level = level.clamp(min=smallest_precise(self._own))
        scaled = [tensor / level for tensor in (self.exact, *runs)]
        by_rows = Reference(scaled[0], scaled[1], scaled[2:], dtype=self._native_dtype, valid=None, tied=self.unsettled)
        other = by_rows.judge(value / level)
        is_worse = (other.noise_ratio or 0.0) > (found.noise_ratio or 0.0)
        return dataclasses.replace(other, rms_error=found.rms_error, reason=found.reason) if is_worse else found

    def _quick(self, candidate: Tensor) -> Judgement | None:
        """Return the judgment of what is within the error of the reference in its own dtype; None for the rest."""
        exact = self.exact
        if not exact.is_floating_point() or self._own.itemsize < self._native_dtype.itemsize:
            return None
        error = candidate.double() - exact
        size, ratio = error.abs(), math.inf
        if self.only is not None and self.only.is_cheap and self.bound is not None:
            # This costs less than the means of slices, and decides.
            if bool((size <= self.bound).all()):
                return Judgement("rounding", None, None, bound_ratio=1.0)
            if not self.only.is_alone:
                return None
        squares = error_means(exact, [candidate, self.native], Counted(None))
        own, others = squares.means
        if 0 < others < math.inf and own < math.inf:
            ratio = own / others
            for ours, theirs in squares.by_axis:
                ratio = max(ratio, float((ours / theirs.clamp(min=others)).amax()))
        if self.only is None and ratio < math.inf and exact.dim() > 1:
            # Small rows have a floor of their own; by chance a row has twice as much of the noise.
            ours, theirs = squares.by_axis[0]
            rows = ours / theirs.clamp(min=1e-300)
            ratio = max(ratio, float(rows.amax()) / 2)
        found, self.quick_ratio = Judgement("rounding", ratio**0.5, own**0.5), ratio**0.5
        if self.only is None:
            return found if self.quick_ratio <= self.cheap else None
        if self.quick_ratio <= self.cheap:
            # Small elements may hide an error beside large ones: those are held against the bound.
            u, tiny = unit_roundoff(self._own), smallest_precise(self._own)
            far = torch.add(size, exact.abs(), alpha=-_FAR * u) > _FAR * tiny
            if not bool(far.any()):
                return found
            bound, size = self.only.bound(far), size[far]
        else:
            bound = self.bound
        is_within = bound is not None and bool((size <= bound).all())
        return dataclasses.replace(found, noise_ratio=None, bound_ratio=1.0) if is_within else None

    def _by(self, candidate: Tensor, runs: list[Tensor], bound: Tensor | None) -> Judgement:
        reference = Reference(self.exact, self.native, runs, dtype=self._native_dtype, valid=None, tied=self.unsettled)
        reference = reference if candidate.is_complex() else reference.kept_in(self._own)
        if bound is None:
            return reference.judge(candidate)
        if self.native.is_floating_point() and unit_roundoff(self._own) > unit_roundoff(self._native_dtype):
            bound = bound + unit_roundoff(self._own) * self.exact.abs() * 1.3
        return reference.judge_introduced(candidate, bound)

    def _accepting_overflow(self, candidate: Tensor) -> Tensor:
        """Return the candidate with what overflows as the reference does in its own dtype as float64 has it."""
        native, odd = self.native, ~candidate.isfinite()
        if not native.is_floating_point() or not candidate.is_floating_point() or not bool(odd.any()):
            return candidate
        largest = torch.finfo(self._own).max
        beyond = self.exact.isfinite() & (self.exact.abs() >= largest * (1 - unit_roundoff(self._own)))
        same = (candidate.isnan() & native.isnan()) | (candidate.double() == native.double())
        legal = odd & ((beyond & (candidate.sign() == self.exact.sign())) | (self.exact.isfinite() & same))
        return torch.where(legal, self.exact, candidate.double()) if bool(legal.any()) else candidate

    def _whole_numbers(self, candidate: Tensor) -> Judgement:
        if candidate.is_floating_point() or candidate.is_complex():
            return Judgement("wrong", None, None, f"{candidate.dtype} in place of {self.native.dtype}")
        differs = candidate.to(self.exact.dtype) != self.exact
        if not bool(differs.any()):
            return Judgement("identical", 0.0, 0.0)
        tied = self.tied(candidate)
        if tied is not None:
            differs &= ~tied
        if bool(differs.any()):
            runs = [self.native, *self.runs(MANY_RUNS)]
            moved = [run == candidate for run in runs if run.shape == candidate.shape]
            differs &= ~torch.stack(moved).any(0)
        count = int(differs.sum())
        if not count:
            return Judgement("rounding", None, None, "ties: other choices are as good", is_tie=True)
        return Judgement("wrong", None, None, f"{count} of {differs.numel()} elements differ")


def _usable(tensor: Tensor) -> Tensor:
    """Return numbers of one byte, on which hardly any op works, in float32."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def figures(path: str, expectation: Expectation, candidate: Tensor, found: Judgement) -> TensorMatch:
    """Return the figures of a judged tensor, and of a wrong one which elements are wrong."""
    dtype, shape = str(candidate.dtype).removeprefix("torch."), tuple(candidate.shape)
    num_tied = int(expectation.unsettled.sum()) if expectation.chooses and expectation.unsettled is not None else 0
    plain = TensorMatch(
        path, shape, dtype, found.verdict, found.noise_ratio, found.bound_ratio, found.reason, num_tied=num_tied
    )
    if passes(plain):
        return plain
    beyond, score = beyond_rounding(expectation, candidate)
    place = int(score.flatten().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), score.shape)) if score.dim() else ()
    expected, actual = (float(t[index].abs() if t.is_complex() else t[index]) for t in (expectation.exact, candidate))
    return dataclasses.replace(
        plain,
        index=index,
        expected=expected,
        actual=actual,
        ulp=_ulp(expected, actual, candidate.dtype),
        where=described(beyond),
        num_beyond=int(beyond.sum()),
    )


def beyond_rounding(expectation: Expectation, candidate: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bool mask of the elements that are beyond rounding, error of each in units of rounding)."""
    exact = expectation.exact
    if not exact.is_floating_point() or not candidate.is_floating_point():
        differs = candidate != exact
        return differs, differs.double()
    value = candidate.double()
    same = (value == exact) | (value.isnan() & exact.isnan())
    error = torch.where(same, 0.0, (value - exact).abs()).nan_to_num(math.inf, math.inf)
    u, tiny = unit_roundoff(candidate.dtype), smallest_precise(candidate.dtype)
    if expectation.bound is not None:
        unit = expectation.bound + u * exact.abs().nan_to_num(0.0, 0.0, 0.0)
        score = error / unit.clamp(min=tiny)
        return score > 1, score
    errors = [(run.double() - exact).nan_to_num(0.0, 0.0, 0.0) for run in (expectation.native, *expectation.runs(2))]
    square = torch.stack([e.square() for e in errors]).mean(0)
    size = exact.nan_to_num(0.0, 0.0, 0.0)
    level = (square.mean() + square + (u * size).square() / 3 + tiny**2).sqrt()
    score = error / level
    if expectation.unsettled is not None:
        score = torch.where(expectation.unsettled, 0.0, score)
    return score > _BEYOND, score


def _ulp(expected: float, actual: float, dtype: torch.dtype) -> float | None:
    if not dtype.is_floating_point or not math.isfinite(expected) or not math.isfinite(actual):
        return None
    info = torch.finfo(dtype)
    spacing = max(math.ldexp(info.eps, math.frexp(abs(expected))[1] - 1) if expected else 0.0, info.tiny * info.eps)
    return abs(actual - expected) / spacing
