"""Differences and statistics of numpy arrays: what `totals` and `statistics` do of tensors, without torch.

torch is imported for what the arithmetic here declines: complex numbers, 64-bit integers that differ, odd tolerances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from glassengine.blocks.arithmetic import BFLOAT16, DifferenceSums, RawDifference
from glassengine.blocks.paths import arithmetic_for

if TYPE_CHECKING:
    from torch import Tensor


Array = np.ndarray[Any, np.dtype[Any]]
IN_NUMPY = {
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}
"""torch dtype names that numpy has."""

PIECE_ELEMENTS = 1 << 16
_SAMPLE = 1 << 14
_SAMPLED = 1 / 512
"""Share of a stream that says about where its median is."""
_COMPARED = 1 << 18
"""Bytes that are compared at once."""
SELECT_ELEMENTS = 1 << 18
"""Elements of a stream that are sorted as they are, without a sample."""

Stream = Callable[[], Iterable[Array]]
"""Opens a fresh pass over the real float64 pieces of one array."""


class ArrayValues(NamedTuple):
    """The values of a tensor.

    Attributes:
        array: In the dtype of the tensor where numpy has it, else in float32 (or complex64), which holds them.
        dtype: torch dtype name of the tensor.
    """

    array: Array
    dtype: str


def values_of(tensor: Tensor) -> ArrayValues:
    """Return the values of a dense tensor; the same memory where numpy has the dtype."""
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    if dtype not in IN_NUMPY:
        plain = plain.to(torch.complex64) if plain.is_complex() else plain.float()
    return ArrayValues(plain.numpy(), dtype)


def values_of_bytes(data: Any, dtype: str, shape: tuple[int, ...]) -> ArrayValues:
    """Return the values that lie in a buffer in row-major order."""
    return widened(stored_values(data, dtype, shape))


def stored_values(data: Any, dtype: str, shape: tuple[int, ...]) -> ArrayValues:
    """Return the values that lie in a buffer in row-major order; of bfloat16 the bits, see `widened`."""
    if dtype in IN_NUMPY or dtype == "bfloat16":
        array = np.frombuffer(data, np.uint16 if dtype == "bfloat16" else dtype)
        array = array if array.flags.aligned else array.copy()
        array = array.view(BFLOAT16) if dtype == "bfloat16" else array
    else:
        import torch

        array = torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, dtype)).float().numpy()
    return ArrayValues(array.reshape(shape), dtype)


def widened(values: ArrayValues) -> ArrayValues:
    """Return values of which bfloat16 is in float32."""
    return values._replace(array=_widened(values.array))


def _widened(array: Array) -> Array:
    if array.dtype != BFLOAT16:
        return array
    return np.left_shift(array.view(np.uint16), np.uint32(16), dtype=np.uint32).view(np.float32)


def are_same_bytes(one: memoryview, other: memoryview) -> bool:
    """Whether two buffers hold the same; the first difference ends it."""
    x, y = np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)
    starts = range(0, len(x), _COMPARED)
    return len(x) == len(y) and all(np.array_equal(x[at : at + _COMPARED], y[at : at + _COMPARED]) for at in starts)


def difference_of_arrays(baseline: Array, candidate: Array, *, rtol: float, atol: float) -> RawDifference:
    """Return what `difference` does of two tensors; bfloat16 may come as its bits."""
    b, c = baseline.reshape(-1), candidate.reshape(-1)
    dtypes = {np.dtype(np.float32) if side.dtype == BFLOAT16 else side.dtype for side in (b, c)}
    quick = arithmetic_for(dtypes, len(b), PIECE_ELEMENTS, rtol, atol)
    if not quick or quick[0].bfloat16 is None:
        b, c = _widened(b), _widened(c)
    total = None
    most = (quick[0].capacity if quick else 0) or PIECE_ELEMENTS
    with np.errstate(all="ignore"):
        for start in range(0, len(b), most):
            x, y = b[start : start + most], c[start : start + most]
            part, above = None, 0.0 if total is None else total.max_abs
            for arithmetic in quick:
                if (part := arithmetic.partial(start, x, y, above=above)) is not None:
                    break
            part = part or _same_integers(x, y) or _by_torch(start, _widened(x), _widened(y), rtol, atol)
            if total is None:
                total = part
            else:
                total.merge(part)
    return RawDifference(len(b), **vars(total or DifferenceSums()))


def _same_integers(x: Array, y: Array) -> DifferenceSums | None:
    if x.dtype != y.dtype or x.dtype.kind not in "iu" or not np.array_equal(x, y):
        return None
    wide, part = x.astype(np.float64), DifferenceSums()
    part.num_finite, part.num_nonzero = len(x), int(np.count_nonzero(x))
    part.dot = part.baseline_squares = part.candidate_squares = float(np.square(wide).sum())
    return part


def _by_torch(start: int, x: Array, y: Array, rtol: float, atol: float) -> DifferenceSums:
    import torch

    from glassengine.blocks.pieces import Totals

    totals = Totals()
    totals.add(start, torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(np.ascontiguousarray(y)), rtol, atol)
    return totals


@dataclass(frozen=True)
class Statistics:
    """Counts and statistics of a stream; None where no element is finite. `median` is the lower one."""

    num_elements: int
    num_nan: int
    num_inf: int
    min: float | None = None
    mean: float | None = None
    median: float | None = None
    max: float | None = None
    std: float | None = None


def stream_of(values: Array) -> Stream:
    """Return the stream of an array; complex numbers are represented by their magnitude."""
    flat = values.reshape(-1)

    def stream() -> Iterator[Array]:
        for start in range(0, len(flat), PIECE_ELEMENTS):
            piece = flat[start : start + PIECE_ELEMENTS]
            yield (np.abs(piece) if piece.dtype.kind == "c" else piece).astype(np.float64)

    return stream


def error_stream_of(baseline: Array, candidate: Array, *, relative: bool) -> Stream:
    """Return the stream of |c - b|, or of |c - b| / |b| where b is not 0; what is the same, NaN included, has none."""
    if baseline.shape != candidate.shape:
        raise ValueError(f"shapes differ: {list(baseline.shape)} and {list(candidate.shape)}")
    b, c = baseline.reshape(-1), candidate.reshape(-1)
    kinds, is_integer = {b.dtype.kind, c.dtype.kind}, {b.dtype.kind, c.dtype.kind} <= set("iu")
    # Neighbors above 2**53 are the same number in float64.
    wide = np.complex128 if "c" in kinds else np.longdouble if is_integer else np.float64

    def stream() -> Iterator[Array]:
        for start in range(0, len(b), PIECE_ELEMENTS):
            with np.errstate(all="ignore"):
                x, y = (side[start : start + PIECE_ELEMENTS].astype(wide) for side in (b, c))
                error = np.abs(np.subtract(y, x)).astype(np.float64)
                if not math.isfinite(float(error.sum())):
                    error[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
                if relative:
                    size = np.abs(x).astype(np.float64)
                    where = size != 0
                    error = error[where] / size[where]
            yield error

    return stream


def statistics_of(stream: Stream, *, has_median: bool = True) -> Statistics:
    """Return the statistics of the float64 pieces of a stream, of which never more than a few per cent are held.

    The median takes a second pass.
    """
    num_elements = count = num_nan = 0
    low, high, mean, squares = math.inf, -math.inf, 0.0, 0.0
    generator, sample = np.random.default_rng(0), [np.empty(0)]
    with np.errstate(all="ignore"):
        for piece in stream():
            num_elements += len(piece)
            total = float(piece.sum())
            if not math.isfinite(total):
                num_nan += int(np.count_nonzero(np.isnan(piece)))
                piece = piece[np.isfinite(piece)]
                total = float(piece.sum())
            if not len(piece):
                continue
            low, high = min(low, float(piece.min())), max(high, float(piece.max()))
            if has_median:
                sample.append(_some(piece, _SAMPLED, generator))
            # Chan's update: moments of pieces are merged, so a large common offset does not cancel.
            own, shift = len(piece), total / len(piece) - mean
            squares += float(np.square(piece - total / own).sum()) + shift * shift * count * own / (count + own)
            count += own
            mean += shift * own / count
        num_inf = num_elements - count - num_nan
        if not count:
            return Statistics(num_elements, num_nan, num_inf)
        drawn = np.concatenate(sample)
        median = None if not has_median else low if low == high else lower_median_of(stream, count, drawn)
    std = math.sqrt(squares / max(count - 1, 1))
    return Statistics(num_elements, num_nan, num_inf, low, mean, median, high, std)


def lower_median_of(stream: Stream, num_finite: int, sample: Array | None = None) -> float:
    """Return the lower median of the finite elements of a stream: an element of it, never an average of two.

    Two elements near the middle of a random sample have a few per cent of all between them, and most likely the median.

    Args:
        stream: Float64 pieces; read once when small, or with a sample, unless the median is outside of its middle.
        num_finite: How many finite elements it has, at least 1.
        sample: Random finite elements of the stream; None to draw them.
    """
    if num_finite <= SELECT_ELEMENTS:
        rank = (num_finite - 1) // 2
        return float(np.partition(np.concatenate(list(_finite(stream))), rank)[rank])
    generator = np.random.default_rng(0)
    while True:
        if sample is None:
            share = _SAMPLE / num_finite
            sample = np.concatenate([_some(piece, share, generator) for piece in _finite(stream)])
        sample.sort()
        rank, middle = (num_finite - 1) // 2, len(sample) // 2
        low, high = sample[middle - len(sample) // 32], sample[min(len(sample) - 1, middle + len(sample) // 32)]
        below, at_low, at_high, between = 0, 0, 0, []
        for piece in _finite(stream):
            below += int(np.count_nonzero(piece < low))
            at_low += int(np.count_nonzero(piece == low))
            at_high += int(np.count_nonzero(piece == high))
            between.append(piece[(piece > low) & (piece < high)])
        inside = np.concatenate(between)
        rank -= below
        if 0 <= rank < at_low:
            return float(low)
        rank -= at_low
        if 0 <= rank < len(inside):
            return float(np.partition(inside, rank)[rank])
        if 0 <= rank - len(inside) < at_high:
            return float(high)
        sample = None


def _finite(stream: Stream) -> Iterator[Array]:
    for piece in stream():
        yield piece if math.isfinite(float(piece.sum())) else piece[np.isfinite(piece)]


def _some(piece: Array, share: float, generator: np.random.Generator) -> Array:
    return piece[generator.integers(0, len(piece), math.ceil(share * len(piece)))] if len(piece) else piece
