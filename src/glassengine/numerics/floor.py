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
    """

    by_axis: list[torch.Tensor]
    least: float
    relative: float
    largest: float
    special: torch.Tensor | None
    counted: Counted


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
    finite_power = exact.square()
    (of_power,) = slice_means([finite_power], counted := Counted(judged))
    # No element is larger than the root of the sum of squares, which is NaN where one of them is.
    largest = of_power.total**0.5
    if hidden is not None or (not largest < limit and not is_below(exact, limit)):
        special = ~exact.isfinite() | (exact.abs() >= limit)
        if hidden is not None:
            special |= hidden
        finite_power = torch.where(exact.isfinite(), finite_power, 0.0)
        (of_power,) = slice_means([finite_power], counted := Counted(~special if judged is None else judged & ~special))
    of_runs = _of_runs(exact, runs, counted)
    power, whole = of_power.mean, max((means.mean for means in of_runs), default=0.0)
    # Near zero rounding is large, which does not apply to other steps.
    if power > relative_from(dtype) ** 2:
        relative = max(relative, (whole / power) ** 0.5)
    share = max(relative**2, unit_roundoff(dtype) ** 2 / 3)
    least = max(whole, power * share, smallest_precise(dtype) ** 2 / 3)
    by_axis = []
    for axis, by_index in enumerate(of_power.by_axis):
        means = [run.by_axis[axis] for run in of_runs]
        by_axis.append(torch.stack([*means, share * by_index]).amax(0).clamp(min=least))
    return Floor(by_axis, least, relative, largest, special, counted)


def _of_runs(exact: torch.Tensor, runs: Sequence[torch.Tensor], counted: Counted) -> list[SliceMeans]:
    squares = [(run.double() - exact).square_() for run in runs]
    found = slice_means(squares, counted)
    for i, means in enumerate(found):
        if not means.total < math.inf:
            (found[i],) = slice_means([squares[i].nan_to_num_(0.0, 0.0, 0.0)], counted)
    return found


_SMALL = 1 << 16
"""Elements up to which calls cost more than sums; several tensors of that size are summed as one."""


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


class SliceMeans:
    """Means of squares: over all elements, and for each axis over all other axes, for every index of it.

    Attributes:
        total: The sum.
        mean: Of all elements that count; 0 where none does.
        by_axis: For each axis float64 [size]; 0 where nothing counts.
    """

    def __init__(self, total: float, sums: Sequence[torch.Tensor], size: int, counted: Counted) -> None:
        self.total = total
        if counted.mask is None:
            self.mean = total / max(1, size)
            self.by_axis = [part / max(1, size // max(1, part.numel())) for part in sums]
            return
        number, numbers = counted.numbers
        self.mean = total / number
        self.by_axis = [part / own for part, own in zip(sums, numbers, strict=True)]


def slice_means(squares: Sequence[torch.Tensor], counted: Counted) -> list[SliceMeans]:
    """Return the means of each of several tensors of squares, float64, all of one shape."""
    if counted.mask is not None:
        squares = [torch.where(counted.mask, square, 0.0) for square in squares]
    if len(squares) > 1 and squares[0].numel() <= _SMALL:
        sums = _slice_sums(stacked := torch.stack(list(squares)), 1)
        totals = (sums[0] if sums else stacked.unsqueeze(-1)).sum(-1).tolist()
        return [
            SliceMeans(total, [part[i] for part in sums], square.numel(), counted)
            for i, (total, square) in enumerate(zip(totals, squares, strict=True))
        ]
    found = []
    for square in squares:
        sums = _slice_sums(square, 0)
        found.append(SliceMeans(float((sums[0] if sums else square).sum()), sums, square.numel(), counted))
    return found


def _slice_sums(value: torch.Tensor, first: int) -> list[torch.Tensor]:
    """For each axis from `first` on, the sum over all others of these for every index of it.

    Large tensors are read twice, not once for each axis.
    """
    if value.dim() < 2 + first:
        return [value] * (value.dim() - first)
    rows = value.sum(-1)
    return [*_slice_sums(rows, first), value.sum(list(range(first, value.dim() - 1)))]
