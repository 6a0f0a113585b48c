"""Differences and statistics of numpy arrays: what `totals` and `statistics` do of tensors, without torch.

torch is imported for what the arithmetic here declines: complex numbers, 64-bit integers that differ, odd tolerances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from glassengine.blocks.arithmetic import arithmetic_for
from glassengine.blocks.merging import Difference, Sums

if TYPE_CHECKING:
    from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]
IN_NUMPY = {
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}
"""torch dtype names that numpy has."""

PIECE_ELEMENTS = 1 << 16
_SAMPLE = 4096
MOST_SORTED = 1 << 24
"""Elements of an array whose statistics are taken from a copy in float64; of larger ones torch does it in pieces."""


class Values(NamedTuple):
    """The values of a tensor.

    Attributes:
        array: In the dtype of the tensor where numpy has it, else in float32 (or complex64), which holds them.
        dtype: torch dtype name of the tensor.
    """

    array: Array
    dtype: str


def values_of(tensor: Tensor) -> Values:
    """Return the values of a dense tensor; the same memory where numpy has the dtype."""
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    if dtype not in IN_NUMPY:
        plain = plain.to(torch.complex64) if plain.is_complex() else plain.float()
    return Values(plain.numpy(), dtype)


def values_of_bytes(data: Any, dtype: str, shape: tuple[int, ...]) -> Values:
    """Return the values that lie in a buffer in row-major order."""
    if dtype in IN_NUMPY:
        array = np.frombuffer(data, dtype)
    elif dtype == "bfloat16":
        halves = np.frombuffer(data, np.uint16)
        array = np.left_shift(halves, 16, dtype=np.uint32).view(np.float32)
    else:
        import torch

        array = torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, dtype)).float().numpy()
    return Values(array.reshape(shape), dtype)


def difference_of_arrays(baseline: Array, candidate: Array, *, rtol: float, atol: float) -> Difference:
    """Return what `difference` does of two tensors.

    Args:
        baseline: Of any dtype that numpy has.
        candidate: The same shape.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
    """
    b, c = baseline.reshape(-1), candidate.reshape(-1)
    quick = arithmetic_for({b.dtype, c.dtype}, len(b), PIECE_ELEMENTS, rtol, atol)
    total = None
    with np.errstate(all="ignore"):
        for start in range(0, len(b), PIECE_ELEMENTS):
            x, y = b[start : start + PIECE_ELEMENTS], c[start : start + PIECE_ELEMENTS]
            part, above = None, 0.0 if total is None else total.max_abs
            for arithmetic in quick:
                if (part := arithmetic.partial(start, x, y, above=above)) is not None:
                    break
            part = part or _same_integers(x, y) or _by_torch(start, x, y, rtol, atol)
            if total is None:
                total = part
            else:
                total.merge(part)
    return Difference(len(b), **vars(total or Sums()))


def _same_integers(x: Array, y: Array) -> Sums | None:
    if x.dtype != y.dtype or x.dtype.kind not in "iu" or not np.array_equal(x, y):
        return None
    wide, part = x.astype(np.float64), Sums()
    part.num_finite, part.num_nonzero = len(x), int(np.count_nonzero(x))
    part.dot = part.baseline_squares = part.candidate_squares = float(np.square(wide).sum())
    return part


def _by_torch(start: int, x: Array, y: Array, rtol: float, atol: float) -> Sums:
    import torch

    from glassengine.blocks.sums import Totals

    totals = Totals()
    totals.add(start, torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(np.ascontiguousarray(y)), rtol, atol)
    return totals


@dataclass(frozen=True)
class Statistics:
    """Counts and statistics of an array; None where no element is finite. `median` is the lower one."""

    num_elements: int
    num_nan: int
    num_inf: int
    min: float | None = None
    mean: float | None = None
    median: float | None = None
    max: float | None = None
    std: float | None = None


def statistics_of(values: Array) -> Statistics:
    """Return the statistics of the elements of an array: float64 [N]."""
    num_elements, num_nan = len(values), 0
    with np.errstate(all="ignore"):
        total = float(values.sum())
        if not math.isfinite(total):
            num_nan = int(np.count_nonzero(np.isnan(values)))
            values = values[np.isfinite(values)]
            total = float(values.sum())
        count = len(values)
        num_inf = num_elements - count - num_nan
        if not count:
            return Statistics(num_elements, num_nan, num_inf)
        low, high, mean = float(values.min()), float(values.max()), total / count
        squares, median = 0.0, low
        if low != high:
            for start in range(0, count, PIECE_ELEMENTS):
                deviations = values[start : start + PIECE_ELEMENTS] - mean
                squares += float(np.square(deviations, out=deviations).sum())
            median = _lower_median(values)
        std = math.sqrt(squares / max(count - 1, 1))
    return Statistics(num_elements, num_nan, num_inf, low, mean, median, high, std)


def _lower_median(values: Array) -> float:
    """Return the element that a sorted array has in its middle, or just before it."""
    rank = (len(values) - 1) // 2
    if len(values) > PIECE_ELEMENTS:
        # Between two elements near the middle of a sample are a few per cent of all.
        sample = np.sort(values[:: len(values) // _SAMPLE])
        middle = len(sample) // 2
        low, high = sample[middle - _SAMPLE // 16], sample[middle + _SAMPLE // 16]
        below = int(np.count_nonzero(values < low))
        inside = values[(values >= low) & (values <= high)]
        if below <= rank < below + len(inside):
            if low == high:
                return float(low)
            values, rank = inside, rank - below
    return float(np.partition(values, rank)[rank])


def errors_of(baseline: Array, candidate: Array) -> tuple[Array, Array]:
    """Return absolute errors, |c - b|, and relative ones, |c - b| / |b| where b is not 0: float64 [N] and [at most N].

    What is the same on both sides, NaN included, has no error.
    """
    b, c = baseline.reshape(-1), candidate.reshape(-1)
    absolute, relative, used = np.empty(len(b)), np.empty(len(b)), 0
    with np.errstate(all="ignore"):
        for start in range(0, len(b), PIECE_ELEMENTS):
            piece = slice(start, start + PIECE_ELEMENTS)
            x, y = b[piece].astype(np.float64), c[piece].astype(np.float64)
            error = np.abs(np.subtract(y, x, out=absolute[piece]), out=absolute[piece])
            if not math.isfinite(float(error.sum())):
                error[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
            size = np.abs(x, out=x)
            where = size != 0
            if not where.all():
                error, size = error[where], size[where]
            np.divide(error, size, out=relative[used : used + len(size)])
            used += len(size)
    return absolute, relative[:used]
