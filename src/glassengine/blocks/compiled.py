"""The sums of `arithmetic` in one pass, compiled by numba where it is installed (`pip install glassengine[fast]`).

Counts, the largest difference and its place are those of the plain path; sums differ by the order of their summands.
A maximum of floats keeps a loop from being vectorized, so maxima are taken of the bits of positive floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import njit

from glassengine.blocks.arithmetic import BFLOAT16, ROW, Arithmetic, Array, Sums

_NEAR = 2.0**-20
"""Share of a difference by which float32 can be wrong about the tolerance: 16 roundings."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
_exactly: Callable[[_Function], _Function] = njit(nogil=True, cache=True)
_compiled: Callable[[_Function], _Function] = njit(
    nogil=True, cache=True, error_model="numpy", boundscheck=False, fastmath={"nsz", "reassoc"}
)


@_exactly
def _is_rounded(x: Any, y: Any, delta: Any) -> Any:
    """Return whether y - x is not exactly delta; without the freedom to cancel terms."""
    return (delta + x != y) | (y - delta != x)


@_compiled
def _add_row(
    b: Array, c: Array, limits: Array, sizes: Array, bits: Array, maxima: Array, sums: Array, counts: Array
) -> None:
    rtol, atol, near = limits[0], limits[1], limits[2]
    zero = rtol - rtol
    absolute = squares = dot = baseline = relative = zero
    different = nonzero = maybe = surely = rounded = 0
    for i in range(ROW):
        x, y = b[i], c[i]
        delta = y - x
        error, size = abs(delta), abs(x)
        ratio = error / size if size != zero else zero
        absolute += error
        squares += delta * delta
        dot += x * delta
        baseline += x * x
        relative += ratio
        different += x != y
        nonzero += size != zero
        limit = rtol * size + atol
        slack = near * error
        maybe += error + slack > limit
        surely += error - slack > limit
        rounded += _is_rounded(x, y, delta)
        sizes[0, i] = error
        sizes[1, i] = ratio
    largest, largest_ratio = bits[0, 0], bits[1, 0]
    for i in range(ROW):
        largest = max(largest, bits[0, i])
        largest_ratio = max(largest_ratio, bits[1, i])
    maxima[0] = largest
    maxima[1] = largest_ratio
    sums[0] += baseline
    sums[1] += dot
    sums[2] += squares
    sums[3] += absolute
    sums[4] += relative
    counts[0] += different
    counts[1] += nonzero
    counts[2] += maybe
    counts[3] += surely
    counts[4] += rounded


@_compiled
def _add(
    b: Array, c: Array, limits: Array, sizes: Array, bits: Array, maxima: Array, sums: Array, counts: Array
) -> None:
    for at in range(0, b.size, ROW):
        _add_row(b[at : at + ROW], c[at : at + ROW], limits, sizes, bits, maxima[at // ROW], sums, counts)


@_compiled
def _add_halves(
    b: Array, c: Array, limits: Array, sizes: Array, bits: Array, maxima: Array, sums: Array, counts: Array
) -> None:
    x, y = np.empty(ROW, np.uint32), np.empty(ROW, np.uint32)
    for at in range(0, b.size, ROW):
        b_row, c_row = b[at : at + ROW], c[at : at + ROW]
        for i in range(ROW):
            x[i] = np.uint32(b_row[i]) << np.uint32(16)
            y[i] = np.uint32(c_row[i]) << np.uint32(16)
        _add_row(x.view(np.float32), y.view(np.float32), limits, sizes, bits, maxima[at // ROW], sums, counts)


@_compiled
def add_squares(b: Array, c: Array, rows: Array, columns: Array) -> None:
    """Add the squares of c - b and of b, by rows and by columns.

    Args:
        b: Floating [R, C].
        c: Likewise.
        rows: float64 [2, R], overwritten.
        columns: float64 [2, C], added to.
    """
    for i in range(b.shape[0]):
        error = power = 0.0
        for j in range(b.shape[1]):
            x = np.float64(b[i, j])
            delta = np.float64(c[i, j]) - x
            delta *= delta
            x *= x
            error += delta
            power += x
            columns[0, j] += delta
            columns[1, j] += x
        rows[0, i] = error
        rows[1, i] = power


class CompiledArithmetic(Arithmetic):
    """Adds up a piece in one pass; bfloat16 is widened in registers."""

    pieces = 4
    bfloat16 = BFLOAT16

    def __init__(self, dtype: np.dtype[Any], size: int, rtol: float, atol: float) -> None:
        super().__init__(dtype, size, rtol, atol)
        bits = np.dtype(np.int64 if self._is_wide else np.int32)
        sizes = np.empty((2, ROW), dtype)
        self._maxima = np.empty((self.capacity // ROW, 2), bits)
        limits = np.array([rtol, atol, 0.0 if self._is_wide else _NEAR], dtype)
        self._given = limits, sizes, sizes.view(bits), self._maxima

    def _pass_over(self, x: Array, y: Array) -> Sums | None:
        sums, counts = np.zeros(5), np.zeros(5, np.int64)
        if x.dtype == y.dtype == np.uint16:
            _add_halves(x, y, *self._given, sums, counts)
        else:
            _add(self._values(x, self._x), self._values(y, self._y), *self._given, sums, counts)
        if not np.isfinite(sums).all():
            return None
        num_different, num_nonzero, maybe, surely, num_rounded = counts.tolist()
        b_squares, dot, squares, sum_abs, sum_rel = sums.tolist()
        largest, largest_rel = self._maxima[: len(x) // ROW].max(axis=0).view(self._dtype).tolist()
        return Sums(
            num_different=num_different,
            num_zero=len(x) - num_nonzero,
            baseline_squares=b_squares,
            dot=dot,
            squares=squares,
            sum_abs=sum_abs,
            sum_rel=sum_rel,
            largest=largest,
            largest_rel=largest_rel,
            num_beyond=maybe if maybe == surely else None,
            is_exact=not num_rounded,
        )

    def _places_of(self, largest: float, x: Array, y: Array) -> Array:
        x_rows, y_rows = self._rows(x), self._rows(y)
        rows = np.flatnonzero(self._maxima[: len(x_rows), 0].view(self._dtype) == largest)
        found = np.flatnonzero(np.abs(y_rows[rows] - x_rows[rows]) == largest)
        return rows[found // ROW] * ROW + found % ROW

    def _num_beyond(self, x: Array, y: Array, found: Sums) -> int:
        if found.num_beyond is not None:
            return found.num_beyond
        return self._num_beyond_in_float64(self._values(x, self._x), self._values(y, self._y))

    def _load(self, piece: Array, scratch: Array) -> Array:
        if piece.dtype != BFLOAT16:
            return super()._load(piece, scratch)
        halves = piece.view(np.uint16)
        return halves if len(piece) == self._length and not self._is_wide else self._widened(halves, scratch)

    def _values(self, piece: Array, scratch: Array) -> Array:
        return self._widened(piece, scratch) if piece.dtype == np.uint16 else piece

    def _widened(self, halves: Array, scratch: Array) -> Array:
        return super()._load((halves.astype(np.uint32) << 16).view(np.float32), scratch)
