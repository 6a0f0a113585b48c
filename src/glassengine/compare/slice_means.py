"""Means of squares of a tensor and of every slice of it: one pass over the tensor, not one per axis."""

from __future__ import annotations

import torch


class SliceMeans:
    """Means of squares: over all elements, and for each axis over all other axes, for every index of it.

    Attributes:
        total: The sum.
        mean: Of all elements that count; 0 where none does.
        by_axis: For each axis float64 [size]; 0 where nothing counts.
    """

    def __init__(self, square: torch.Tensor, counted: torch.Tensor | None) -> None:
        square = square if counted is None else torch.where(counted, square, 0.0)
        sums = _slice_sums(square)
        self.total = float((sums[0] if sums else square).sum())
        if counted is None:
            self.mean = self.total / max(1, square.numel())
            self.by_axis = [part / max(1, square.numel() // max(1, part.numel())) for part in sums]
            return
        numbers = _slice_sums(counted.double())
        self.mean = self.total / max(1, int(counted.sum()))
        self.by_axis = [part / number.clamp(min=1) for part, number in zip(sums, numbers, strict=True)]


def _slice_sums(value: torch.Tensor) -> list[torch.Tensor]:
    """For each axis, the sum over all other axes for every index of it; large tensors are read twice, not once each."""
    if value.dim() < 2:
        return [value] * value.dim()
    rows = value.sum(-1)
    return [*_slice_sums(rows), value.sum(list(range(value.dim() - 1)))]
