"""The sums of `totals`, for pieces of any dtype on any device: in torch and float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from glassengine.blocks.merging import Sums
from glassengine.blocks.pieces import agree, subtract, widen


class Totals(Sums):
    """Running sums to which pieces are added."""

    def add(self, start: int, b: Tensor, c: Tensor, rtol: float, atol: float) -> None:
        """Add one pair of flat pieces that begins at flat position `start`."""
        wide_b = widen(b)
        if b.dtype == c.dtype and torch.equal(b.view(torch.uint8), c.view(torch.uint8)):
            squares = _dot(wide_b, wide_b)
            if math.isfinite(squares):
                # Bitwise the same and finite: most tensors of most comparisons; nothing else can change.
                self.num_finite += b.numel()
                self.num_nonzero += int(wide_b.count_nonzero())
                self.dot += squares
                self.baseline_squares += squares
                self.candidate_squares += squares
                return
        wide_c = widen(c)
        delta = subtract(b, c, wide_b, wide_c)
        error = delta.abs()
        self.num_finite += b.numel()
        if not math.isfinite(float(error.sum())):
            both = wide_b.isfinite() & wide_c.isfinite()
            mismatched = ~both & ~agree(wide_b, wide_c)
            if count := int(mismatched.count_nonzero()):
                first = int(mismatched.to(torch.uint8).argmax())
                self.add_mismatched(count, start + first, _magnitude(wide_b[first]), _magnitude(wide_c[first]))
            self.num_finite -= int((~both).sum())
            error, wide_b, wide_c = (torch.where(both, x, torch.zeros_like(x)) for x in (error, wide_b, wide_c))
        self._accumulate(start, error, wide_b, wide_c, rtol, atol)

    def _accumulate(self, start: int, error: Tensor, b: Tensor, c: Tensor, rtol: float, atol: float) -> None:
        size = b.abs()
        largest = float(error.amax())
        self.num_different += int(error.count_nonzero())
        self.sum_abs += float(error.sum())
        self.sum_squares += _dot(error, error)
        self.dot += _dot(b, c)
        self.baseline_squares += _dot(b, b)
        self.candidate_squares += _dot(c, c)
        if largest > self.max_abs:
            self.max_abs = largest
            if not self.num_mismatched:
                position = int(error.argmax())
                self.worst = start + position
                self.baseline_at_worst, self.candidate_at_worst = _magnitude(b[position]), _magnitude(c[position])
        if largest > atol:
            self.num_beyond += int((error > size * rtol + atol).count_nonzero())
        nonzero = int(size.count_nonzero())
        self.num_nonzero += nonzero
        relative = error / size if nonzero == size.numel() else error[size != 0] / size[size != 0]
        if nonzero:
            self.sum_rel += float(relative.sum())
            self.max_rel = max(self.max_rel, float(relative.amax()))


def _magnitude(value: Tensor) -> float:
    return float(value.abs() if value.is_complex() else value)


def _dot(x: Tensor, y: Tensor) -> float:
    if x.is_complex() or y.is_complex():
        return float(torch.vdot(x.to(torch.complex128), y.to(torch.complex128)).real)
    return float(torch.dot(x, y))
