"""How two tensors differ along every axis, in one pass over blocks: mean squares of the error, slice by slice."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from glassengine.blocks import BLOCK_ELEMENTS, agree
from glassengine.numerics.mask_values import sentinel
from glassengine.numerics.metrics.noise_ratio import Slices


def slices(baseline: Tensor, candidate: Tensor) -> Slices:
    """Return the mean squares of two tensors of one shape and any dtypes; never more than a block is copied."""
    return sums_of_squares(baseline, candidate).means(baseline.shape)


def sums_of_squares(baseline: Tensor, candidate: Tensor) -> Slices:
    """Return the sums of the squares that `slices` gives the means of."""
    shape = baseline.shape
    errors = [torch.zeros(size, dtype=torch.float64) for size in shape]
    powers = [torch.zeros(size, dtype=torch.float64) for size in shape]
    error = power = 0.0
    exact = not (baseline.is_floating_point() or baseline.is_complex())
    limit = sentinel(baseline.dtype, candidate.dtype)
    for where in _blocks(tuple(shape)):
        b, c = baseline[where], candidate[where]
        if exact:
            square, size = torch.where(b == c, 0.0, math.inf).double(), torch.ones(b.shape, dtype=torch.float64)
        else:
            square, size = _squares(b, c, limit)
        error, power = error + float(square.sum()), power + float(size.sum())
        for axis, index in enumerate(where):
            others = [i for i in range(len(where)) if i != axis]
            errors[axis][index] += square.sum(others) if others else square
            powers[axis][index] += size.sum(others) if others else size
    return Slices(error, power, tuple(x.numpy() for x in errors), tuple(x.numpy() for x in powers))


def _squares(b: Tensor, c: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    wide = torch.complex128 if b.is_complex() or c.is_complex() else torch.float64
    b, c = b.to(wide), c.to(wide)
    size = b.abs()
    odd_b, odd_c = ~(size < limit), ~(c.abs() < limit)
    square = (c - b).abs().square()
    either = odd_b | odd_c
    if bool(either.any()):
        # Masks and what is not finite are compared as a class: finfo.min plus a score is finfo.min.
        alike = agree(b, c)
        # A complex number has no sign, and is not a mask.
        same = odd_b & odd_c & (alike if b.is_complex() else alike | (torch.sign(b) == torch.sign(c)))
        square = torch.where(either, torch.where(same, 0.0, math.inf), square)
        size = torch.where(odd_b, 0.0, size)
    return square, size.square()


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Yield the indices of blocks of at most `BLOCK_ELEMENTS` elements that cover a tensor of `shape`."""
    if math.prod(shape) == 0:
        return
    ranges: list[list[slice]] = []
    inner = math.prod(shape)
    for size in shape:
        inner //= size
        rows = max(1, min(size, BLOCK_ELEMENTS // max(1, inner)))
        ranges.append([slice(first, min(first + rows, size)) for first in range(0, size, rows)])
    yield from _product(ranges)


def _product(ranges: list[list[slice]]) -> Iterator[tuple[slice, ...]]:
    if not ranges:
        yield ()
        return
    for first in ranges[0]:
        for rest in _product(ranges[1:]):
            yield (first, *rest)
