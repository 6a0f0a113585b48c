"""Aligns the tensors of two calls that differ in batch, length or padding: which part belongs to which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_WIDTH = 8
"""Numbers of a row from which on no two rows are the same by chance."""
_MOST_ROWS = 1 << 16
"""Rows that are searched for by their values."""


@dataclass(frozen=True)
class PositionSpan:
    """A range of positions on both sides.

    Attributes:
        sizes: Of the dimension, on both sides.
        starts: Where the range begins.
        length: Of the range.
    """

    sizes: tuple[int, int]
    starts: tuple[int, int]
    length: int

    def of(self, tensor: Tensor, axis: int, side: int) -> Tensor:
        """Return the range of one side."""
        return tensor.narrow(axis, self.starts[side], self.length)


@dataclass(frozen=True)
class PartMapping:
    """Which part of the tensors of one call belongs to which part of those of another.

    Attributes:
        batch: Numbers of rows, on both sides.
        rows: Rows that belong together; None where all do, in order.
        tokens: Positions of the call that belong together.
        keys: Positions of the sequence up to the end of the call, likewise.
    """

    batch: tuple[int, int] = (1, 1)
    rows: tuple[Sequence[int], Sequence[int]] | None = None
    tokens: PositionSpan | None = None
    keys: PositionSpan | None = None

    def aligned(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the parts that belong together, of one shape; None where shapes do not say which."""
        if a.dim() != b.dim():
            return None
        axis = 0
        while axis < a.dim():
            sizes = a.shape[axis], b.shape[axis]
            if self.rows is not None and sizes == self.batch:
                a, b = (one.index_select(axis, torch.tensor(rows)) for one, rows in zip((a, b), self.rows, strict=True))
            elif span := next(
                (one for one in (self.tokens, self.keys) if one is not None and one.sizes == sizes), None
            ):
                a, b = span.of(a, axis, 0), span.of(b, axis, 1)
            elif axis == 0 and self._is_folded(sizes):
                a, b = (one.reshape(rows, -1, *one.shape[1:]) for one, rows in zip((a, b), self.batch, strict=True))
                continue
            elif sizes[0] != sizes[1]:
                return None
            axis += 1
        return a, b

    def _is_folded(self, sizes: tuple[int, int]) -> bool:
        """Whether rows and positions, or rows and heads, are one dimension."""
        if self.batch == (1, 1) or any(not rows or size % rows for size, rows in zip(sizes, self.batch, strict=True)):
            return False
        parts = sizes[0] // self.batch[0], sizes[1] // self.batch[1]
        is_span = any(one is not None and one.sizes == parts for one in (self.tokens, self.keys))
        return parts != (1, 1) and (is_span or (parts[0] == parts[1] and self.rows is not None))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape hold the same bits; zeros of either sign are the same, and NaN is NaN."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def same_under(view: PartMapping, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    """Whether all results of a call that belong together hold the same bits."""
    pairs = [view.aligned(x, after[name]) for name, x in before.items()]
    return all(pair is None or same_bits(*pair) for pair in pairs)


def largest_difference(a: Tensor, b: Tensor) -> float | None:
    """Return the largest difference of two tensors; None where they cannot be subtracted."""
    if a.shape != b.shape or not a.numel():
        return None
    if a.is_complex() or b.is_complex():
        return float((a - b).abs().max())
    return float((a.double() - b.double()).abs().max())


def matching_rows(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return which rows of two matrices hold the same bits, where every row of the smaller one is in the other.

    Experts get the rows of a batch in an order of their own.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or a.shape[1] < _WIDTH or a.dtype is not b.dtype:
        return None
    if not 0 < len(a) <= _MOST_ROWS or not 0 < len(b) <= _MOST_ROWS:
        return None
    known = {row.tobytes(): i for i, row in enumerate(_rows(b))}
    found = [known.get(row.tobytes()) for row in _rows(a)]
    pairs = [(i, j) for i, j in enumerate(found) if j is not None]
    if len(pairs) < min(len(a), len(b)):
        return None
    return torch.tensor([i for i, _ in pairs]), torch.tensor([j for _, j in pairs])


def _rows(tensor: Tensor) -> Sequence[memoryview]:
    return list(tensor.detach().contiguous().view(torch.uint8).numpy().reshape(len(tensor), -1))
