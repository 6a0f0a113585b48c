"""The noise floor of a tensor: how far it gets from its float64 reference by rounding alone, slice by slice.

It comes from runs that differ from the reference by rounding alone (the same program in its own dtype, and Monte-Carlo
rounding runs):

    floor_s^2 = max( mean_s(D^2) over the runs, mean(D^2), r^2 mean(P^2), r^2 mean_s(P^2), (u^2 / 3) mean(P^2),
                     tiny^2 / 3 )

P is the reference, D the error of a noise run, r the largest rms(D) / rms(P) of this site so far, u the unit
roundoff and tiny the largest error of rounding near zero (`smallest_precise`). The two terms with r keep a short slice
(one element, in a decode step) from an underestimated floor; the one per slice matters where a few large elements
hold nearly all of the power.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from glassengine.numerics.judgement import relative_from, smallest_precise, unit_roundoff
from glassengine.numerics.mask_values import is_below, sentinel


@dataclass(frozen=True)
class Floor:
    """The floor of one tensor.

    Attributes:
        by_axis: For each axis the square of the floor of every index of it, float64 [size].
        least: The smallest of them, which is that of the whole tensor.
        relative: The largest rms(D) / rms(P) of the site so far, this tensor's among them.
        largest: No element of the reference is larger.
        special: Elements that are compared as a class, not by size: mask sentinels and what is not finite. None if
            there are none.
        counted: Elements that enter the statistics: those that are judged and not special.
        native: Mean square of the error of the first run; NaN where that is no number.
    """

    by_axis: list[torch.Tensor]
    least: float
    relative: float
    largest: float
    special: torch.Tensor | None
    counted: Counted
    native: float


def measured_floor(
    exact: torch.Tensor,
    runs: Sequence[torch.Tensor],
    judged: torch.Tensor | None,
    *,
    hidden: torch.Tensor | None,
    dtype: torch.dtype,
    relative: float,
) -> Floor:
    """Measure the floor of a floating tensor.

    Args:
        exact: P, float64.
        runs: The same tensor of runs that only round.
        judged: Bool mask in its shape of the elements that are judged; None where all are.
        hidden: Elements that hide a place from a softmax, as in `Known`.
        dtype: Floating dtype in which the tensor is computed.
        relative: Largest rms(D) / rms(P) seen for the site so far.
    """
    limit, special = sentinel(dtype), None
    squares, found = None, error_means(exact, runs, counted := Counted(judged), power=True)
    # No element is larger than the root of the sum of squares, which is NaN where one of them is.
    largest = found.totals[0] ** 0.5
    if hidden is not None or (not largest < limit and not is_below(exact, limit)):
        special = ~exact.isfinite() | (exact.abs() >= limit)
        if hidden is not None:
            special |= hidden
        squares = _squares(exact, runs)
        squares[0].masked_fill_(~exact.isfinite(), 0.0)
        found = slice_means(squares, counted := Counted(~special if judged is None else judged & ~special))
    numbers = [total < math.inf for total in found.totals]
    if not all(numbers[1:]):
        squares = _squares(exact, runs) if squares is None else squares
        for square in squares[1:]:
            square.nan_to_num_(0.0, 0.0, 0.0)
        found = slice_means(squares, counted)
    power, whole = found.means[0], max(found.means[1:], default=0.0)
    relative = _relative(power, whole, dtype, relative)
    share = _share(relative, dtype)
    least = _least(power, whole, share, dtype)
    for of_axis in found.by_axis:
        of_axis[0] *= share
    by_axis = [of_axis.amax(0).clamp_(min=least) for of_axis in found.by_axis]
    native = found.means[1] if len(runs) and numbers[1] else math.nan
    return Floor(by_axis, least, relative, largest, special, counted, native)


def _relative(power: float, whole: float, dtype: torch.dtype, relative: float) -> float:
    """Return the largest rms(D) / rms(P); near zero rounding is large, which does not apply to other steps."""
    return max(relative, (whole / power) ** 0.5) if power > relative_from(dtype) ** 2 else relative


def _share(relative: float, dtype: torch.dtype) -> float:
    """Return which share of the power of P its floor is at least."""
    return max(relative**2, unit_roundoff(dtype) ** 2 / 3)


def _least(power: float, whole: float, share: float, dtype: torch.dtype) -> float:
    """Return the floor of the whole tensor."""
    return max(whole, power * share, smallest_precise(dtype) ** 2 / 3)


@dataclass(frozen=True)
class QuickFloor:
    """A floor without its slices, where no element is special; attributes as of `Floor`."""

    least: float
    relative: float
    largest: float
    native: float


def quick_floor(
    exact: torch.Tensor, runs: Sequence[torch.Tensor], judged: torch.Tensor | None, dtype: torch.dtype, relative: float
) -> QuickFloor | None:
    """Return of what `measured_floor` measures that which needs no slices; None where elements are special."""
    if exact.numel() <= _SMALL:
        squares = _squares(exact, runs)
        kept = squares if judged is None else torch.where(judged, squares, 0.0)
        totals = kept.flatten(1).sum(1).tolist() if exact.dim() else kept.tolist()
    else:
        totals = _totals(exact, runs, judged)
    if not (totals[0] ** 0.5 < sentinel(dtype) and all(total < math.inf for total in totals)):
        return None
    number = max(1, exact.numel() if judged is None else int(judged.sum()))
    power, whole = totals[0] / number, max(totals[1:]) / number
    relative = _relative(power, whole, dtype, relative)
    least = _least(power, whole, _share(relative, dtype), dtype)
    return QuickFloor(least, relative, totals[0] ** 0.5, totals[1] / number)


def _totals(exact: torch.Tensor, runs: Sequence[torch.Tensor], judged: torch.Tensor | None) -> list[float]:
    """Return the sums of the squares of P and of the error of each run."""
    exact, *rest = _dense(exact, *runs, *(() if judged is None else (judged,)))
    runs, mask = rest[: len(runs)], None if judged is None else rest[-1]
    totals = [0.0] * (1 + len(runs))
    for at in range(0, exact.numel(), _BLOCK):
        block = slice(at, at + _BLOCK)
        own = exact[block]
        for index, error in enumerate([own, *(run[block].double() - own for run in runs)]):
            counted = error if mask is None else torch.where(mask[block], error, 0.0)
            totals[index] += float(counted.dot(counted))
    return totals


def _dense(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors of one shape flattened in the order in which the first lies in memory."""
    order = _memory_order(tensors[0])
    return [tensor.permute(order).flatten() for tensor in tensors]


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the axes of a tensor, those of the largest stride first."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda axis: -strides[axis])


def _squares(
    exact: torch.Tensor, runs: Sequence[torch.Tensor], *, power: bool = True, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the squares of P, if asked for, and of the error of each run, stacked; in `out`, if given."""
    made = torch.empty(power + len(runs), *exact.shape, dtype=torch.float64) if out is None else out
    if power:
        made[0] = exact
    for error, run in zip(made[power:], runs, strict=True):
        torch.sub(run.double(), exact, out=error)
    return made.mul_(made)


_SMALL = 1 << 12
"""Elements up to which calls cost more than sums."""
_BLOCK = 1 << 16
"""Elements of a tensor that are worked on at once: what becomes of so many stays in the cache of the processor."""


class Counted:
    """Which elements count: a bool mask in the shape of the tensor, or all of them."""

    def __init__(self, mask: torch.Tensor | None) -> None:
        self.mask = mask

    @cached_property
    def numbers(self) -> tuple[int, list[torch.Tensor]]:
        """How many count: of all, and by axis for every index of it, float64 [size], at least 1 each."""
        assert self.mask is not None
        by_axis = [number.clamp(min=1) for number in _slice_sums(self.mask.double(), 0)]
        return max(1, int(self.mask.sum())), by_axis


@dataclass(frozen=True)
class SliceMeans:
    """Means of each of several tensors of squares: over all elements, and for each axis over all other axes.

    Attributes:
        totals: The sum of each.
        means: Of all elements of each that count; 0 where none does.
        by_axis: For each axis float64 [number of tensors, size]; 0 where nothing counts.
    """

    totals: list[float]
    means: list[float]
    by_axis: list[torch.Tensor]


def error_means(
    exact: torch.Tensor, runs: Sequence[torch.Tensor], counted: Counted, *, power: bool = False
) -> SliceMeans:
    """Return the means of the squares of P, if asked for, and of the error of each run.

    Args:
        exact: P, float64.
        runs: Tensors of its shape.
        counted: Elements that count.
        power: Whether P is the first of the tensors.
    """
    if exact.dim() < 2 or exact.numel() <= _BLOCK:
        return slice_means(_squares(exact, runs, power=power), counted)
    order = _memory_order(exact)
    shape = [exact.shape[axis] for axis in order]
    own, *rest = [one.permute(order).reshape(-1, shape[-1]) for one in (exact, *runs)]
    mask = None if counted.mask is None else counted.mask.permute(order).reshape(-1, shape[-1])
    rows, columns = [], torch.zeros(power + len(runs), shape[-1], dtype=torch.float64)
    step = max(1, _BLOCK // shape[-1])
    made = torch.empty(len(columns), step, shape[-1], dtype=torch.float64)  # once: the system zeroes new memory
    for at in range(0, len(own), step):
        block = slice(at, at + step)
        part = own[block]
        squares = _squares(part, [run[block] for run in rest], power=power, out=made[:, : len(part)])
        if mask is not None:
            squares = torch.where(mask[block], squares, 0.0)
        rows.append(squares.sum(-1))
        columns += squares.sum(1)
    sums = [*_slice_sums(torch.cat(rows, 1).reshape(-1, *shape[:-1]), 1), columns]
    by_axis = [sums[order.index(axis)] for axis in range(exact.dim())]
    return _means(by_axis, columns.sum(-1), counted, exact.numel())


def slice_means(squares: torch.Tensor, counted: Counted) -> SliceMeans:
    """Return the means of several stacked tensors of squares, float64."""
    kept = squares if counted.mask is None else torch.where(counted.mask, squares, 0.0)
    sums = _slice_sums(kept, 1)
    return _means(sums, sums[0].sum(-1) if sums else kept, counted, squares[0].numel())


def _means(sums: list[torch.Tensor], whole: torch.Tensor, counted: Counted, size: int) -> SliceMeans:
    """Return the means of tensors of `size` elements from the sums over all axes but one, and over all."""
    totals: list[float] = whole.tolist()
    if counted.mask is None:
        number, by_axis = max(1, size), [part / max(1, size // max(1, part.shape[-1])) for part in sums]
    else:
        number, numbers = counted.numbers
        by_axis = [part / own for part, own in zip(sums, numbers, strict=True)]
    return SliceMeans(totals, [total / number for total in totals], by_axis)


def _slice_sums(value: torch.Tensor, first: int) -> list[torch.Tensor]:
    """For each axis from `first` on, the sum over all others of these for every index of it."""
    if value.dim() < 2 + first:
        return [value] * (value.dim() - first)
    rows = value.sum(-1)
    return [*_slice_sums(rows, first), value.sum(list(range(first, value.dim() - 1)))]
