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
    found = slice_means(squares := _squares(exact, runs), counted := Counted(judged))
    # No element is larger than the root of the sum of squares, which is NaN where one of them is.
    largest = found.totals[0] ** 0.5
    if hidden is not None or (not largest < limit and not is_below(exact, limit)):
        special = ~exact.isfinite() | (exact.abs() >= limit)
        if hidden is not None:
            special |= hidden
        squares[0].masked_fill_(~exact.isfinite(), 0.0)
        found = slice_means(squares, counted := Counted(~special if judged is None else judged & ~special))
    numbers = [total < math.inf for total in found.totals]
    if not all(numbers[1:]):
        for square in squares[1:]:
            square.nan_to_num_(0.0, 0.0, 0.0)
        found = slice_means(squares, counted)
    power, whole = found.means[0], max(found.means[1:], default=0.0)
    # Near zero rounding is large, which does not apply to other steps.
    if power > relative_from(dtype) ** 2:
        relative = max(relative, (whole / power) ** 0.5)
    share = max(relative**2, unit_roundoff(dtype) ** 2 / 3)
    least = max(whole, power * share, smallest_precise(dtype) ** 2 / 3)
    for of_axis in found.by_axis:
        of_axis[0] *= share
    by_axis = [of_axis.amax(0).clamp_(min=least) for of_axis in found.by_axis]
    native = found.means[1] if len(runs) and numbers[1] else math.nan
    return Floor(by_axis, least, relative, largest, special, counted, native)


def _squares(exact: torch.Tensor, runs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the squares of P, and of the error of each run; of small tensors as one tensor."""
    if exact.numel() <= _SMALL:
        stacked = torch.stack([exact, *(run.double() for run in runs)])
        stacked[1:] -= exact
        return stacked.square_()  # type: ignore[return-value]
    return [exact.square(), *((run.double() - exact).square_() for run in runs)]


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


def slice_means(squares: Sequence[torch.Tensor], counted: Counted) -> SliceMeans:
    """Return the means of several tensors of squares, float64, all of one shape; they may be one stacked tensor."""
    size, mask = squares[0].numel(), counted.mask

    def kept(square: torch.Tensor) -> torch.Tensor:
        return square if mask is None else torch.where(mask, square, 0.0)

    if size <= _SMALL:
        stacked = kept(squares if isinstance(squares, torch.Tensor) else torch.stack(list(squares)))
        sums = _slice_sums(stacked, 1)
        whole = sums[0].sum(-1) if sums else stacked
    else:
        each = [_slice_sums(kept(square), 0) for square in squares]
        sums = [torch.stack(parts) for parts in zip(*each, strict=True)]
        whole = sums[0].sum(-1)
    totals: list[float] = whole.tolist()
    if mask is None:
        number, by_axis = max(1, size), [part / max(1, size // max(1, part.shape[-1])) for part in sums]
    else:
        number, numbers = counted.numbers
        by_axis = [part / own for part, own in zip(sums, numbers, strict=True)]
    return SliceMeans(totals, [total / number for total in totals], by_axis)


def _slice_sums(value: torch.Tensor, first: int) -> list[torch.Tensor]:
    """For each axis from `first` on, the sum over all others of these for every index of it.

    Large tensors are read twice, not once for each axis.
    """
    if value.dim() < 2 + first:
        return [value] * (value.dim() - first)
    rows = value.sum(-1)
    return [*_slice_sums(rows, first), value.sum(list(range(first, value.dim() - 1)))]
