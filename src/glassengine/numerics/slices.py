"""Measures the difference of two tensors along every axis, in one pass over blocks, and judges it slice by slice.

    noise_ratio = max over slices of rms_s(candidate - baseline) / floor_s
    floor_s^2 = max( noise_s^2, noise^2, r^2 mean(B^2), r^2 mean_s(B^2), (u^2 / 3) mean(B^2) )

B is the baseline, r the largest noise of its site in any step, relative to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from glassengine.blocks.arithmetic import RawDifference
from glassengine.blocks.arrays import PIECE_ELEMENTS, Array, ArrayValues
from glassengine.blocks.paths import COMPILED_FROM, compiled_squares
from glassengine.numerics.judgement import smallest_precise, unit_roundoff
from glassengine.numerics.limits import is_floating, sentinel
from glassengine.recording.layout.noise_floor import StoredFloor
from glassengine.results import Figures

Means = np.typing.NDArray[np.float64]


@dataclass(frozen=True)
class Slices:
    """Mean squares, over the whole and for every index of every axis.

    Attributes:
        error: Of candidate - baseline; infinite where an element differs in kind (NaN, infinity, mask, integer).
        power: Of the baseline.
        errors: For each axis float64 [size].
        powers: Likewise.
    """

    error: float
    power: float
    errors: tuple[Means, ...]
    powers: tuple[Means, ...]

    def means(self, shape: Sequence[int]) -> Slices:
        """Return the means of what are sums over a tensor of `shape`."""
        count = max(1, math.prod(shape))
        errors, powers = (
            tuple(sums / max(1, count // max(1, size)) for sums, size in zip(side, shape, strict=True))
            for side in (self.errors, self.powers)
        )
        return Slices(self.error / count, self.power / count, errors, powers)


def noise_ratio(found: Slices, floor: StoredFloor, relative: float, dtype: str) -> float:
    """Return the error over the floor, in the worst slice.

    Args:
        found: The two sides.
        floor: What rounding alone does to the baseline.
        relative: The largest noise of this site in any step, relative to the baseline.
        dtype: torch dtype name of the baseline; the last rounding alone is part of every floor.
    """
    u, tiny = (unit_roundoff(dtype), smallest_precise(dtype)) if is_floating(dtype) else (0.0, 0.0)
    share = max(relative**2, u**2 / 3)
    least = max(floor.whole, found.power * share, tiny**2 / 3)
    ratio: float = _ratio(np.array(found.error), np.array(least))
    for errors, powers, noise in zip(found.errors, found.powers, floor.slices, strict=True):
        ratio = max(ratio, _ratio(errors, np.maximum(np.maximum(noise, powers * share), least)))
    return math.sqrt(ratio)


def _ratio(error: Means, floor: Means) -> float:
    # An infinite floor (rounding alone changes the kind of value) does not judge the candidate.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where((error > 0) & np.isfinite(floor), error / floor, 0.0)
    return float(ratio.max()) if ratio.size else 0.0


_MARGIN = 1 - 1e-6
"""Of a limit, for the rounding of sums of squares."""


def slices(baseline: ArrayValues, candidate: ArrayValues) -> Slices:
    """Return the mean squares of two tensors of one shape and any dtypes; never more than a block is copied."""
    return sums_of_squares(baseline, candidate).means(baseline.array.shape)


def sums_of_squares(baseline: ArrayValues, candidate: ArrayValues) -> Slices:
    """Return the sums of the squares that `slices` gives the means of."""
    shape = baseline.array.shape
    compiled = _in_one_pass(baseline, candidate)
    if compiled is not None:
        return compiled
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


def _in_one_pass(baseline: ArrayValues, candidate: ArrayValues) -> Slices | None:
    """Return the sums of large tensors whose values are below every limit, where numba is installed."""
    b, c = baseline.array, candidate.array
    if b.size < COMPILED_FROM or b.dtype != c.dtype or b.dtype not in (np.float32, np.float64):
        return None
    add = compiled_squares()
    if add is None or not (b.flags.c_contiguous and c.flags.c_contiguous):
        return None
    leading, last = b.shape[:-1], b.shape[-1]
    rows, columns = np.empty((2, b.size // last)), np.zeros((2, last))
    add(b.reshape(-1, last), c.reshape(-1, last), rows, columns)
    error, power = columns.sum(axis=1).tolist()
    if not math.sqrt(error) + math.sqrt(power) < sentinel(baseline.dtype, candidate.dtype) * _MARGIN:
        return None
    by_axis = [
        tuple(side.sum(tuple(i for i in range(len(leading)) if i != axis)) for axis in range(len(leading)))
        for side in rows.reshape(2, *leading)
    ]
    return Slices(error, power, (*by_axis[0], columns[0]), (*by_axis[1], columns[1]))


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


def figures_of(raw: RawDifference, shape: tuple[int, ...], *, rtol: float, atol: float) -> Figures:
    """Return the figures of two tensors of `shape` whose sums are known; see `measure`."""
    worst = None if raw.worst is None else tuple(int(i) for i in np.unravel_index(raw.worst, shape))
    return Figures(
        num_elements=raw.num_elements,
        num_different=raw.num_different,
        max_abs_diff=math.inf if raw.num_mismatched else raw.max_abs,
        mean_abs_diff=raw.sum_abs / max(raw.num_finite, 1),
        rms_diff=math.sqrt(raw.sum_squares / max(raw.num_finite, 1)),
        max_rel_diff=math.inf if raw.num_mismatched else raw.max_rel,
        mean_rel_diff=raw.sum_rel / max(raw.num_nonzero, 1),
        cosine_similarity=_cosine(raw),
        snr_db=_snr_db(raw),
        worst_index=worst,
        baseline_at_worst=raw.baseline_at_worst,
        candidate_at_worst=raw.candidate_at_worst,
        num_nonfinite_mismatch=raw.num_mismatched,
        num_beyond_tolerance=raw.num_beyond,
        rtol=rtol,
        atol=atol,
    )


def _cosine(raw: RawDifference) -> float:
    if raw.num_different == 0 or raw.baseline_squares == raw.candidate_squares == 0:
        return 1.0
    if raw.baseline_squares == 0 or raw.candidate_squares == 0:
        return 0.0
    # The roots are taken one by one: the product of two sums of squares overflows long before the norms do.
    return max(-1.0, min(1.0, raw.dot / math.sqrt(raw.baseline_squares) / math.sqrt(raw.candidate_squares)))


def _snr_db(raw: RawDifference) -> float:
    if raw.sum_squares == 0:
        return math.inf
    if raw.baseline_squares == 0:
        return -math.inf
    return 10 * (math.log10(raw.baseline_squares) - math.log10(raw.sum_squares))
