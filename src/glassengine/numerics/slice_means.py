"""Means of squares of a tensor and of every slice of it: one pass over the tensor, not one per axis."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

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
