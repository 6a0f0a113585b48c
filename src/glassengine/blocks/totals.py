"""How two tensors differ, added up in one pass of bounded memory.

`Totals.add` is the definition, in torch and float64. On the CPU most pieces go through `arithmetic` instead, which
adds to the same sums and declines the pieces it is not meant for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from glassengine.blocks.arithmetic import arithmetic_for
from glassengine.blocks.pieces import BLOCK_ELEMENTS, agree, blocks, flat, one_thread, resolved, subtract, widen


@dataclass(frozen=True)
class Difference:
    """Raw sums of candidate - baseline; sums and counts are over elements that are finite on both sides.

    `num_mismatched` counts elements that are not finite and do not agree (NaN agrees with NaN, an infinity with the
    same infinity); they are also in `num_different` and `num_beyond`. `worst` is the flat row-major position of the
    first mismatched element or else of the largest `|c - b|`, and None when nothing differs.
    """

    num_elements: int
    num_finite: int
    num_different: int
    num_mismatched: int
    num_beyond: int
    sum_abs: float
    sum_squares: float
    max_abs: float
    num_nonzero: int
    sum_rel: float
    max_rel: float
    dot: float
    baseline_squares: float
    candidate_squares: float
    worst: int | None
    baseline_at_worst: float | None
    candidate_at_worst: float | None


def difference(
    baseline: Tensor, candidate: Tensor, *, rtol: float, atol: float, device: str | torch.device = "cpu"
) -> Difference:
    """Return the raw sums of `candidate - baseline` in one pass.

    Sums are good to 1e-6 relative (of tensors of fewer than 256 elements, or of a dtype that float32 does not hold:
    1e-12), and dot products to that of the product of the norms. Counts, `max_abs` and `worst` are exact.

    Args:
        baseline: Any dtype and strides.
        candidate: The same shape as `baseline`.
        rtol: Relative tolerance of `num_beyond`: elements with `|c - b| > atol + rtol * |b|`.
        atol: Absolute tolerance of `num_beyond`.
        device: Where the arithmetic runs; it must know float64.

    Raises:
        ValueError: The shapes differ.
    """
    if 0 < baseline.numel() <= BLOCK_ELEMENTS and torch.device(device).type == "cpu":
        same = _same(baseline, candidate)
        if same is not None:
            return same
    return _difference(baseline, candidate, rtol, atol, device)


def _same(b: Tensor, c: Tensor) -> Difference | None:
    """Return what `difference` does of two small tensors of one dtype that are equal and finite: most of most sides."""
    if b.dtype != c.dtype or b.shape != c.shape or not (b.is_cpu and c.is_cpu):
        return None
    raw, other = (flat(resolved(side)) for side in (b, c))
    if not torch.equal(raw.view(torch.uint8), other.view(torch.uint8)):
        return None
    values = widen(raw).numpy()
    squares = float(np.vdot(values, values).real)
    if not math.isfinite(squares):
        return None
    count = len(values)
    nothing = {"num_different": 0, "num_mismatched": 0, "num_beyond": 0, "sum_abs": 0.0, "sum_squares": 0.0}
    largest = {"max_abs": 0.0, "sum_rel": 0.0, "max_rel": 0.0, "worst": None}
    return Difference(
        num_elements=count,
        num_finite=count,
        num_nonzero=int(np.count_nonzero(values)),
        dot=squares,
        baseline_squares=squares,
        candidate_squares=squares,
        baseline_at_worst=None,
        candidate_at_worst=None,
        **nothing,  # type: ignore[arg-type]
        **largest,  # type: ignore[arg-type]
    )


@one_thread()
def _difference(
    baseline: Tensor, candidate: Tensor, rtol: float, atol: float, device: str | torch.device
) -> Difference:
    total = Totals()
    quick = arithmetic_for(baseline, candidate, rtol, atol) if torch.device(device).type == "cpu" else ()
    with np.errstate(all="ignore"):
        for start, (b, c) in blocks(baseline, candidate, device=device):
            if not any(arithmetic.add(total, start, b, c) for arithmetic in quick):
                total.add(start, b, c, rtol, atol)
    return Difference(baseline.numel(), **vars(total))


class Totals:
    """The running sums behind `difference`; the attributes are the fields of `Difference` but `num_elements`."""

    def __init__(self) -> None:
        self.num_finite = self.num_different = self.num_mismatched = self.num_beyond = self.num_nonzero = 0
        self.sum_abs = self.sum_squares = self.max_abs = self.sum_rel = self.max_rel = 0.0
        self.dot = self.baseline_squares = self.candidate_squares = 0.0
        self.worst: int | None = None
        self.baseline_at_worst: float | None = None
        self.candidate_at_worst: float | None = None

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

    def add_mismatched(self, count: int, first: int, baseline: float, candidate: float) -> None:
        """Add elements that are not finite and do not agree; the first is at `first` and has these values."""
        if not self.num_mismatched:
            self.worst, self.baseline_at_worst, self.candidate_at_worst = first, baseline, candidate
        self.num_mismatched += count
        self.num_different += count
        self.num_beyond += count


def _magnitude(value: Tensor) -> float:
    return float(value.abs() if value.is_complex() else value)


def _dot(x: Tensor, y: Tensor) -> float:
    if x.is_complex() or y.is_complex():
        return float(torch.vdot(x.to(torch.complex128), y.to(torch.complex128)).real)
    return float(torch.dot(x, y))
