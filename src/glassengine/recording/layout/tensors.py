"""Facts of one tensor of torch: its description and bytes, or why it has none; statistics, and a sketch of a large one.

Statistics are all of them, or a few cheap ones while the model runs. What was computed once for a recording is kept in
`statistics.log` beside its index, in frames like those of the index; what is damaged there, belongs to other values or
cannot be written is computed again.

A sketch says where the values of a tensor lie, and which they are. Its quantiles do not depend on the order of the
elements. Its projection does: the expectation of `|p - q|^2` is `|x - y|^2`. Both are the same on every machine: what
is random in them comes from a hash of the position in row-major order.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import msgspec
import numpy as np
import torch
from torch import Tensor

from glassengine import blocks
from glassengine.blocks.arrays import statistics_of, stream_of, values_of
from glassengine.blocks.pieces import one_thread
from glassengine.errors import CorruptError, UsageError
from glassengine.reading.files import open_regular
from glassengine.recording.layout import layout
from glassengine.recording.layout.description import Description, Facts
from glassengine.recording.layout.layout import STATISTICS, Entry, LightStatistics, LightTable, block_starts
from glassengine.recording.layout.records import decoded, frame, read_payload
from glassengine.results import Summary
from glassengine.writing import open_to_append, write_whole

_NUMPY = (torch.float32, torch.float64)
_NUMPY_DTYPES: dict[str, str] = {
    **{name: name for name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")},
    "bfloat16": "uint16",
}
MEASURED = frozenset(_NUMPY_DTYPES)
"""torch dtype names that `light_of_bytes` and `light_of_blocks` know."""
_room = threading.local()
_Array = np.typing.NDArray[Any]
# A sum of squares below it may have lost some that float32 cannot hold.
_LEAST_SQUARES = 1e-25
_DOT_ELEMENTS = 8192
_PIECE_ELEMENTS = 1 << 17
_FAST = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


_MAX_DESCRIPTIONS = 1 << 14


def describe(site: str, tensor: Tensor, **facts: Unpack[Facts]) -> Description:
    """Return what the records of `tensor` say in every step."""
    _check(site, tensor)
    return Description(site, dtype_name(tensor.dtype), tuple(tensor.shape), **facts)


class Descriptions:
    """The descriptions of tensors that come in every step, so that each is made once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Description] = {}

    def of(self, site: str, tensor: Tensor, **facts: Unpack[Facts]) -> Description:
        """Return what `describe` does, the same object for the same arguments."""
        _check(site, tensor)
        axes = facts.get("axes") or {}
        key = (site, tensor.dtype, tensor.shape, tuple(axes.items()), facts.get("node"), facts.get("sharding"))
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MAX_DESCRIPTIONS:
                self._known.clear()
            found = self._known[key] = describe(site, tensor, **facts)
        return found


def _check(site: str, tensor: Tensor) -> None:
    if len(site.encode(errors="surrogatepass")) > layout.MAX_NAME_BYTES:
        got, expected = "a longer name", f"at most {layout.MAX_NAME_BYTES} bytes"
        raise UsageError(f"the tensor {site[:200]!r} cannot be recorded", got=got, expected=expected)
    obstacle = why_not(tensor)
    if obstacle is not None:
        raise UsageError(f"the tensor {site[:200]!r} cannot be recorded", got=obstacle, expected="a dense tensor")


def why_not(tensor: Tensor) -> str | None:
    """Return why the values of `tensor` cannot be recorded, or None."""
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.layout != torch.strided:
        return f"layout {tensor.layout}"
    if tensor.is_meta:
        return "a meta tensor, which has no values"
    if dtype_name(tensor.dtype) not in layout.STORED:
        return f"dtype {tensor.dtype}"
    if has_no_memory(tensor):
        return "a tensor without memory: its storage was freed, or never made"
    return None


def has_no_memory(tensor: Tensor) -> bool:
    """Return whether elements of `tensor` are nowhere: to read them would end the process."""
    return tensor.data_ptr() == 0 and tensor.numel() > 0


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" of torch.float32."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of `tensor` in row-major order; a copy only where the tensor is elsewhere or not contiguous."""
    flat = blocks.flat(tensor.to("cpu").resolve_conj().resolve_neg())
    # Not `flat.numpy()`: afterwards torch refuses to resize the storage, and the model may want to.
    return memoryview(np.from_dlpack(flat.view(torch.uint8)))  # type: ignore[arg-type]  # a buffer at run time


def identity(tensor: Tensor) -> tuple[object, ...]:
    """Return what tells two live tensors of one step apart; equal for views that have the same bytes."""
    place = (str(tensor.device), tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return place if tensor.is_contiguous() else (*place, tensor.dtype, tensor.shape, tensor.stride())


def summarize(tensor: Tensor) -> Summary:
    """Return the statistics of `tensor`, computed in float64 piece by piece.

    Complex elements are represented by their magnitude. `std` divides by n - 1 as `torch.std` does (0 for a single
    element) and `median` is the lower median as in `torch.median`.

    Args:
        tensor: Any shape, strides and dtype that can be converted to float64.
    """
    values = values_of(tensor)
    found = statistics_of(stream_of(values.array))
    return Summary(shape=values.array.shape, dtype=values.dtype, **vars(found))


def light(tensor: Tensor) -> LightStatistics:
    """Return the statistics that are taken in place of values.

    Two or three fast passes, the norm in the precision of the dtype; where something is not finite, or the
    dtype is none of the common ones, block by block in float64. Waits for the device the tensor is on.

    Args:
        tensor: Dense; any shape, strides and dtype that can be converted to float64.
    """
    tensor = tensor.detach()
    if tensor.dtype in _NUMPY and tensor.numel() > 1 and tensor.is_cpu and tensor.is_contiguous():
        # numpy takes a third of the time that torch does. (A single element may be one that is to be negated.)
        # Not `tensor.numpy()`: afterwards torch refuses to resize the storage, and the model may want to.
        found = _light_of_array(np.from_dlpack(tensor).reshape(-1), dtype_name(tensor.dtype))
        if found is not None:
            return found
    elif tensor.dtype in _FAST and tensor.numel():
        low, high = torch.aminmax(tensor)
        dtype = torch.float32 if tensor.dtype.itemsize < 4 else None
        norm = float(torch.linalg.vector_norm(tensor, dtype=dtype))
        if math.isfinite(norm):
            return LightStatistics(float(low), float(high), norm, 0)
    return _exact(tensor)


def norm_of(tensor: Tensor) -> tuple[float, int]:
    """Return the norm of the finite elements, and how many others there are: one fast pass where there are none.

    The norm is in the precision of the dtype. Waits for the device the tensor is on.

    Args:
        tensor: Dense; any shape, strides and dtype that can be converted to float64.
    """
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return 0.0, 0
    if tensor.dtype in _NUMPY and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
        flat = np.from_dlpack(tensor).reshape(-1)
        with np.errstate(all="ignore"):
            squares = _sum_of_squares(flat)
        if squares >= _LEAST_SQUARES and squares < math.inf:
            return math.sqrt(squares), 0
        if squares == 0 and not flat.any():
            return 0.0, 0
    elif tensor.dtype in _FAST:
        norm = float(torch.linalg.vector_norm(tensor))
        if _LEAST_SQUARES <= norm < math.inf:
            return norm, 0
    found = _exact(tensor)
    return found.norm, found.num_nonfinite


def copied_norm(target: Tensor, source: Tensor) -> float | None:
    """Copy a tensor piece by piece and return its norm; None where both have to be had in another way."""
    if source.dtype not in _NUMPY or not source.is_cpu or not source.is_contiguous() or source.is_neg():
        return None
    given, taken = np.from_dlpack(source.detach()).reshape(-1), np.from_dlpack(target).reshape(-1)
    squares = 0.0
    with np.errstate(all="ignore"):
        for start in range(0, len(given), _PIECE_ELEMENTS):
            piece = slice(start, start + _PIECE_ELEMENTS)
            taken[piece] = given[piece]
            squares += _sum_of_squares(taken[piece])
    return math.sqrt(squares) if squares >= _LEAST_SQUARES and squares < math.inf else None


def light_of_bytes(data: memoryview, dtype: str) -> LightStatistics:
    """Return what `light` does of the bytes of a tensor in row-major order, on one thread."""
    found = _light_of_array(np.frombuffer(data, _NUMPY_DTYPES[dtype]), dtype)
    return found or _exact(torch.frombuffer(data, dtype=getattr(torch, dtype)))


def _light_of_array(flat: _Array, dtype: str) -> LightStatistics | None:
    """Return the statistics of real elements; None where squares are too large or too small to be added up."""
    low, high, squares = math.inf, -math.inf, 0.0
    with np.errstate(all="ignore"):
        # In pieces that stay in a cache for all three passes.
        for start in range(0, len(flat), _PIECE_ELEMENTS):
            piece = _computable(flat[start : start + _PIECE_ELEMENTS], dtype)
            squares += _sum_of_squares(piece)
            low, high = min(low, float(piece.min())), max(high, float(piece.max()))
    return LightStatistics(low, high, math.sqrt(squares), 0) if _is_sum(squares, low, high) else None


def _computable(values: _Array, dtype: str) -> _Array:
    """Return values in a dtype that holds them exactly, and whose arithmetic is fast."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    if dtype in ("float32", "float64"):
        return values
    return values.astype(np.float32 if dtype == "float16" else np.float64)


def _is_sum(squares: Any, low: Any, high: Any) -> Any:
    """Whether sums of squares, of float32 or float64, lost nothing to overflow or underflow; element by element."""
    return ((squares >= _LEAST_SQUARES) & (squares < math.inf)) | ((low == 0) & (high == 0))


def _sum_of_squares(flat: _Array) -> float:
    """Return the sum of squares of `flat` on one thread; row by row in its own dtype, the rows in float64.

    BLAS gives a longer dot product to threads of its own, which then fight with those of the model for the cores.
    """
    even = len(flat) // _DOT_ELEMENTS * _DOT_ELEMENTS
    rest = flat[even:]
    total = float(np.dot(rest, rest))
    if even:
        rows = flat[:even].reshape(-1, _DOT_ELEMENTS)
        total += float(np.vecdot(rows, rows).sum(dtype=np.float64))
    return total


def light_of_blocks(
    data: memoryview, count: int, tensors: tuple[tuple[str, int], ...], columns: Sequence[int]
) -> list[LightTable]:
    """Return min, max, norm and number of non-finite elements of contiguous small tensors.

    Takes a few passes over all of them together.

    Args:
        data: The bytes of `count` blocks of one size, a multiple of `layout.ALIGNMENT` where there are several; in each
            the tensors lie as `layout.block_starts` says.
        count: How many tables are returned.
        tensors: dtype name (one of `MEASURED`) and number of bytes (not 0) of each tensor of a block.
        columns: Which of them the columns of a table are.
    """
    rows = np.empty((count, 3, len(tensors)))
    nonfinite: list[dict[int, int]] = [{} for _ in range(count)]
    raw = np.frombuffer(data, np.uint8).reshape(count, -1)
    for name, mine, places in _places(tensors):
        dtype = np.dtype(_NUMPY_DTYPES[name])
        # Up to the end of the last one of them, which `reduceat` takes as given.
        first, bounds = int(places[0]), (places - places[0])[:-1]
        values = raw[:, first * dtype.itemsize : int(places[-1]) * dtype.itemsize].view(dtype)
        with np.errstate(all="ignore"):
            values = _computable(values, name)
            rows[:, 0, mine] = low = np.minimum.reduceat(values, bounds, axis=1)[:, ::2]
            rows[:, 1, mine] = high = np.maximum.reduceat(values, bounds, axis=1)[:, ::2]
            squares = np.multiply(values, values, out=_room_like(values))
            sums = np.add.reduceat(squares, bounds, axis=1)[:, ::2]
            rows[:, 2, mine] = np.sqrt(sums, dtype=np.float64)
        for block, which in np.argwhere(~_is_sum(sums, low, high)).tolist():
            index, start = mine[which], int(places[2 * which]) * dtype.itemsize
            flat = raw[block, start : start + tensors[index][1]]
            exact = _exact(torch.frombuffer(flat.data, dtype=getattr(torch, name)))
            rows[block, :, index] = (_or_nan(exact.min), _or_nan(exact.max), exact.norm)
            nonfinite[block][index] = exact.num_nonfinite
    chosen = rows[:, :, columns]
    return [LightTable(table, _chosen(counts, columns)) for table, counts in zip(chosen, nonfinite, strict=True)]


def _chosen(counts: dict[int, int], columns: Sequence[int]) -> dict[int, int]:
    if not counts:
        return counts
    return {index: counts[column] for index, column in enumerate(columns) if column in counts}


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _room_like(values: _Array) -> _Array:
    """Return room that is used again: memory that is new each time takes longer than the arithmetic."""
    room: _Array | None = getattr(_room, "bytes", None)
    if room is None or room.nbytes < values.nbytes:
        room = _room.bytes = np.empty(values.nbytes, dtype=np.uint8)
    return room[: values.nbytes].view(values.dtype).reshape(values.shape)


@functools.lru_cache(maxsize=256)
def _places(tensors: tuple[tuple[str, int], ...]) -> list[tuple[str, list[int], np.typing.NDArray[np.int64]]]:
    """Return, for each dtype in a block, which tensors have it, and where each of these begins and ends, in elements.

    A reduction between these places also yields something for what lies between two tensors.
    """
    starts, _ = block_starts([num_bytes for _, num_bytes in tensors])
    found = []
    for name in dict.fromkeys(name for name, _ in tensors):
        mine = [index for index, (other, _) in enumerate(tensors) if other == name]
        bounds = [starts[index] + end for index in mine for end in (0, tensors[index][1])]
        found.append((name, mine, np.array(bounds, dtype=np.int64) // np.dtype(_NUMPY_DTYPES[name]).itemsize))
    return found


def _exact(tensor: Tensor) -> LightStatistics:
    found = statistics_of(stream_of(values_of(tensor).array), has_median=False)
    num_nonfinite = found.num_nan + found.num_inf
    if found.min is None or found.max is None or found.mean is None or found.std is None:
        return LightStatistics(None, None, 0.0, num_nonfinite)
    count = found.num_elements - num_nonfinite
    with np.errstate(all="ignore"):
        norm = float(np.sqrt(np.float64(found.std) ** 2 * max(count - 1, 1) + count * np.float64(found.mean) ** 2))
    if not math.isfinite(norm):
        # The squares are too large for float64, and so may be the norm; an index holds finite numbers only.
        largest = max(abs(found.min), abs(found.max))
        scaled = (torch.nan_to_num(tensor.double(), 0.0, 0.0, 0.0) / largest).square().sum().sqrt()
        norm = min(largest * float(scaled), sys.float_info.max)
    return LightStatistics(found.min, found.max, norm, num_nonfinite)


NUM_QUANTILES = 33
LENGTH = 32
"""Numbers of a projection; a power of two."""

_SEED = 0x9E3779B97F4A7C15
_MAX_SAMPLED = 1 << 18

_Floats = np.typing.NDArray[np.float64]


@dataclass(frozen=True)
class Sketch:
    """What stands for a tensor where its values are too many.

    Attributes:
        quantiles: `NUM_QUANTILES` elements at equal distances of rank, from the smallest to the largest, of a sample of
            the finite ones; empty where there are none.
        projection: `LENGTH` sums of the finite elements, each in one of them and with a sign.
        num_sampled: Elements in the sample: all finite ones of a small tensor, of a large one those at equal distances.
    """

    quantiles: tuple[float, ...]
    projection: tuple[float, ...]
    num_sampled: int


def sketch(tensor: Tensor) -> Sketch:
    """Return the sketch of `tensor`, computed in float64 block by block; complex elements count by their magnitude.

    Args:
        tensor: Any shape, strides and dtype that can be converted to float64.
    """
    every = max(1, math.ceil(tensor.numel() / _MAX_SAMPLED))
    sample = []
    projection = np.zeros(LENGTH)
    with one_thread(), np.errstate(all="ignore"):
        for start, (piece,) in blocks.blocks(tensor):
            wide = blocks.widen(piece)
            values: _Floats = (wide.abs() if wide.is_complex() else wide).numpy()
            is_finite = np.isfinite(values)
            first = -start % every
            sample.append(values[first::every][is_finite[first::every]])
            places, signs = _projection_places(start, len(values)) if start else _first_places(len(values))
            projection += np.bincount(places, np.where(is_finite, values, 0.0) * signs, LENGTH)
    sampled = np.sort(np.concatenate(sample)) if sample else np.zeros(0)
    ranks = np.arange(NUM_QUANTILES) * (len(sampled) - 1) // (NUM_QUANTILES - 1)
    quantiles = sampled[ranks].tolist() if len(sampled) else []
    # Sums of the largest numbers there are may be none.
    return Sketch(tuple(quantiles), tuple(np.nan_to_num(projection).tolist()), len(sampled))


@functools.lru_cache(maxsize=16)
def _first_places(count: int) -> tuple[np.typing.NDArray[np.int64], _Floats]:
    return _projection_places(0, count)


def _projection_places(start: int, count: int) -> tuple[np.typing.NDArray[np.int64], _Floats]:
    """Return, for each position from `start` on, the sum it belongs to and its sign."""
    # The finaliser of splitmix64: every bit of the position changes half of the result.
    bits = np.arange(start + 1, start + 1 + count, dtype=np.uint64) * np.uint64(_SEED)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    signs = np.where(bits & np.uint64(LENGTH), 1.0, -1.0)
    return (bits & np.uint64(LENGTH - 1)).astype(np.int64), signs


_MAX_BYTES = 1 << 28
_Key = tuple[int, int, int, str]


class StatisticsCache:
    """The statistics and sketches kept beside one recording."""

    def __init__(self, directory: Path, *, writable: bool) -> None:
        self._path = directory / STATISTICS
        self._writable = writable
        self._is_read = False
        self._descriptor: int | None = None
        self._summaries: dict[_Key, Summary] = {}
        self._sketches: dict[_Key, Sketch] = {}

    def summary(self, entry: Entry) -> Summary | None:
        """Return the statistics of `entry`, if they are known."""
        self._read()
        found = self._summaries.get(_key(entry))
        return found if found is not None and (found.shape, found.dtype) == (entry.shape, entry.dtype) else None

    def sketch(self, entry: Entry) -> Sketch | None:
        """Return the sketch of `entry`, if it is known."""
        self._read()
        return self._sketches.get(_key(entry))

    def put(self, entry: Entry, found: Summary | Sketch) -> None:
        """Keep statistics or a sketch for the next time."""
        key = _key(entry)
        if isinstance(found, Sketch):
            self._sketches[key] = found
            fields = {"num_sampled": found.num_sampled, "quantiles": found.quantiles, "projection": found.projection}
        else:
            self._summaries[key] = found
            fields = vars(found)
        if not self._writable:
            return
        try:
            if self._descriptor is None:
                self._descriptor = open_to_append(self._path)
                weakref.finalize(self, _close, self._descriptor)
            write_whole(self._descriptor, frame({"key": key, **fields}))
        except OSError:
            self._writable = False
        except ValueError:
            # Sums of large numbers are infinite, which JSON does not know: they are computed again.
            return

    def _read(self) -> None:
        if self._is_read:
            return
        self._is_read = True
        if not self._path.exists():
            return
        with (
            contextlib.suppress(ValueError, TypeError, CorruptError),
            open_regular(self._path, inside=self._path.parent) as file,
        ):
            while file.tell() < _MAX_BYTES and (data := read_payload(file)) is not None:
                payload = decoded(data)
                shard, offset, checksum, dtype = payload.get("key") or [None] * 4
                if "quantiles" in payload:
                    self._sketches[shard, offset, checksum, dtype] = _sketch(payload)
                else:
                    self._summaries[shard, offset, checksum, dtype] = msgspec.convert(payload, Summary)


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _key(entry: Entry) -> _Key:
    """Return what tells the values of `entry` from all others: their place, their bytes and what these mean."""
    location = entry.location if entry.added is None else entry.added.location
    assert location is not None
    return location.shard, location.offset, location.checksum, entry.describe()


def _sketch(payload: dict[str, Any]) -> Sketch:
    found = msgspec.convert(payload, Sketch)
    if len(found.quantiles) not in (0, NUM_QUANTILES) or len(found.projection) != LENGTH:
        raise ValueError("a sketch of another kind")
    if not all(map(math.isfinite, (*found.quantiles, *found.projection))):
        raise ValueError("a sketch is not made of numbers")
    return found
