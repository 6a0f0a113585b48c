"""Measures the difference of two tensors along every axis, in one pass over blocks: mean squares, slice by slice."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from glassengine.blocks.arrays import PIECE_ELEMENTS, Array, ArrayValues
from glassengine.numerics.limits import sentinel
from glassengine.numerics.metrics.noise_ratio import Slices

_MARGIN = 1 - 1e-6
"""Of a limit, for the rounding of sums of squares."""


def slices(baseline: ArrayValues, candidate: ArrayValues) -> Slices:
    """Return the mean squares of two tensors of one shape and any dtypes; never more than a block is copied."""
    return sums_of_squares(baseline, candidate).means(baseline.array.shape)


def sums_of_squares(baseline: ArrayValues, candidate: ArrayValues) -> Slices:
    """Return the sums of the squares that `slices` gives the means of."""
    shape = baseline.array.shape
    errors, powers = ([np.zeros(size) for size in shape] for _ in range(2))
    error = power = 0.0
    exact = baseline.array.dtype.kind not in "fc"
    is_complex = "c" in (baseline.array.dtype.kind, candidate.array.dtype.kind)
    limit = sentinel(baseline.dtype, candidate.dtype)
    with np.errstate(all="ignore"):
        for where in _blocks(shape):
            b, c = baseline.array[where], candidate.array[where]
            if exact:
                square, size = np.where(b == c, 0.0, math.inf), np.ones(b.shape)
            else:
                square, size = _squares(b, c, limit) if is_complex else _plain_squares(b, c)
            sums = float(square.sum()), float(size.sum())
            if not exact and not is_complex and not sum(map(math.sqrt, sums)) < limit * _MARGIN:
                square, size = _squares(b, c, limit)
                sums = float(square.sum()), float(size.sum())
            error, power = error + sums[0], power + sums[1]
            for axis, index in enumerate(where):
                others = tuple(i for i in range(len(where)) if i != axis)
                errors[axis][index] += square.sum(others) if others else square
                powers[axis][index] += size.sum(others) if others else size
    return Slices(error, power, tuple(errors), tuple(powers))


def _plain_squares(b: Array, c: Array) -> tuple[Array, Array]:
    """Return the squares of what is below every limit, which the roots of their sums show."""
    size, square = b.astype(np.float64), c.astype(np.float64)
    square -= size
    square *= square
    size *= size
    return square, size


def _squares(b: Array, c: Array, limit: float) -> tuple[Array, Array]:
    is_complex = b.dtype.kind == "c" or c.dtype.kind == "c"
    wide = np.complex128 if is_complex else np.float64
    b, c = b.astype(wide), c.astype(wide)
    size = np.abs(b)
    odd_b, odd_c = ~(size < limit), ~(np.abs(c) < limit)
    square = np.square(np.abs(c - b))
    either = odd_b | odd_c
    if either.any():
        # Masks and what is not finite are compared as a class: finfo.min plus a score is finfo.min.
        same = odd_b & odd_c & _agree(b, c)
        if not is_complex:  # which has no sign, and is not a mask
            same |= odd_b & odd_c & (np.sign(b) == np.sign(c))
        square = np.where(either, np.where(same, 0.0, math.inf), square)
        size = np.where(odd_b, 0.0, size)
    return square, np.square(size)


def _agree(b: Array, c: Array) -> Array:
    """Return where b and c are the same value, NaN and NaN included; a complex number in both of its parts."""
    if b.dtype.kind == "c":
        return _agree(b.real, c.real) & _agree(b.imag, c.imag)
    found: Array = (b == c) | (np.isnan(b) & np.isnan(c))
    return found


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Yield the indices of blocks of at most `PIECE_ELEMENTS` elements that cover a tensor of `shape`."""
    if math.prod(shape) == 0:
        return
    ranges: list[list[slice]] = []
    inner = math.prod(shape)
    for size in shape:
        inner //= size
        rows = max(1, min(size, PIECE_ELEMENTS // max(1, inner)))
        ranges.append([slice(first, min(first + rows, size)) for first in range(0, size, rows)])
    yield from _product(ranges)


def _product(ranges: list[list[slice]]) -> Iterator[tuple[slice, ...]]:
    if not ranges:
        yield ()
        return
    for first in ranges[0]:
        for rest in _product(ranges[1:]):
            yield (first, *rest)
