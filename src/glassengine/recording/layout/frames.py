"""The frames of an index in bulk: where they begin, which are whole, and those of a fixed size as columns.

A frame is: payload length (u32), CRC-32 of the payload (u32), payload; little-endian. A payload is a JSON object, or of
what every step has: 32 bytes that begin with what they are. Millions of these are found, verified and read at once.

    bytes   block                           commit                            token
    0       1                               2                                 3
    1-3     0                               0                                 0
    4-7     number of the group             0                                 row of the batch
    8-15    step                            step                              step
    16-23   offset behind the shard's head  number of tensors                 id of the token
    24-27   number of the shard             number of tensors without values  0
    28-31   CRC-32 of the bytes             0                                 0
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from glassengine.recording.layout.layout import MAX_FRAME_BYTES, Location
from glassengine.writing.checksums import crc32

Array = np.typing.NDArray[Any]

BLOCK, COMMIT, TOKEN = 1, 2, 3
_JSON = ord("{")

_HEAD = struct.Struct("<II")
_FIXED = struct.Struct("<B3xIQQII")
_COLUMNS = np.dtype(
    [
        ("kind", "u1"),
        ("zeros", "V3"),
        ("group", "<u4"),
        ("step", "<u8"),
        ("place", "<u8"),
        ("low", "<u4"),
        ("high", "<u4"),
    ]
)
_STRIDE = _HEAD.size + _FIXED.size
LARGEST = 1 << 32
"""Numbers of groups and of tensors without values are below it; larger ones are written as JSON."""

# Pieces of an index that are in memory at once.
_PIECE_BYTES = 1 << 25
# Number of frames of one length in a row from which reading more at once is worth it.
_FEW, _MANY = 16, 1 << 16
# Rows whose checksums are computed at once stay in a cache, for a column is a byte of each.
_ROWS = 1 << 13


def block_frame(group: int, step: int, location: Location) -> bytes:
    """Return the frame of a block of a group."""
    return _fixed(BLOCK, group, step, location.offset, location.shard, location.checksum)


def commit_frame(step: int, num_tensors: int, num_left_out: int) -> bytes:
    """Return the frame that completes a step; less than `LARGEST` tensors may be without values."""
    return _fixed(COMMIT, 0, step, num_tensors, num_left_out, 0)


def token_frame(row: int, step: int, token: int) -> bytes:
    """Return the frame of the only token of a row in a step; its id is not negative and below 2**62."""
    return _fixed(TOKEN, row, step, token, 0, 0)


def _fixed(kind: int, group: int, step: int, place: int, low: int, high: int) -> bytes:
    payload = _FIXED.pack(kind, group, step, place, low, high)
    return _HEAD.pack(_FIXED.size, crc32(payload)) + payload


@dataclass(frozen=True)
class Frames:
    """The good frames of a piece of an index.

    Attributes:
        first: How many frames are before them.
        count: How many these are.
        numbers: Of those of a fixed size: the position of each in the index, ascending.
        fixed: These frames; fields as in `_COLUMNS`.
        texts: (position in the index, payload) of all others, in order.
        damage: Why there is none after them, if that is not the end of the file.
    """

    first: int
    count: int
    numbers: Array
    fixed: Array
    texts: list[tuple[int, bytes]]
    damage: str | None


def read_frames(file: BinaryIO) -> Iterator[Frames]:
    """Yield the frames of an open index up to the first that is damaged, some millions at a time."""
    rest = b""
    first = 0
    while True:
        more = file.read(_PIECE_BYTES)
        data = rest + more if rest else more
        if not data:
            return
        starts, lengths, end, damage = _chain(data)
        rest = data[end:]
        if damage is None and not more:
            damage = "the file ends inside a record" if rest else None
        found = _verified(data, starts, lengths, first, damage)
        yield found
        if found.damage is not None or not more:
            return
        first += found.count


def _chain(data: bytes) -> tuple[Array, Array, int, str | None]:
    """Return where payloads begin and how long they are, where the last whole one ends, and why no other follows."""
    starts: list[Array] = []
    lengths: list[Array] = []
    alone: list[tuple[int, int]] = []
    position, size, last, damage = 0, len(data), -1, None

    def add_alone() -> None:
        if alone:
            pairs = np.array(alone, dtype=np.int64)
            starts.append(pairs[:, 0])
            lengths.append(pairs[:, 1])
            alone.clear()

    while position + _HEAD.size <= size:
        (length,) = struct.unpack_from("<I", data, position)
        if length > MAX_FRAME_BYTES:
            damage = f"a record claims {length} bytes"
            break
        stride = _HEAD.size + length
        if position + stride > size:
            break
        if length == last == _FIXED.size and (count := _run(data, position, length)) > 1:
            add_alone()
            starts.append(position + _HEAD.size + stride * np.arange(count, dtype=np.int64))
            lengths.append(np.full(count, length, dtype=np.int64))
            position += stride * count
            continue
        alone.append((position + _HEAD.size, length))
        position += stride
        last = length
    add_alone()
    if not starts:
        nothing = np.empty(0, dtype=np.int64)
        return nothing, nothing, position, damage
    return np.concatenate(starts), np.concatenate(lengths), position, damage


def _run(data: bytes, position: int, length: int) -> int:
    """Return how many whole frames from `position` on have this length."""
    stride = _HEAD.size + length
    most, count, window = (len(data) - position) // stride, 0, _FEW
    while count < most:
        here = min(window, most - count)
        claimed = np.ndarray((here,), "<u4", data, position + count * stride, (stride,))
        others = np.flatnonzero(claimed != length)
        if others.size:
            return count + int(others[0])
        count += here
        window = min(window * 4, _MANY)
    return count


def _verified(data: bytes, starts: Array, lengths: Array, first: int, damage: str | None) -> Frames:
    """Return the frames up to the first whose checksum does not match or that is of no known kind."""
    raw = np.frombuffer(data, np.uint8)
    kinds = np.where(lengths > 0, raw[np.minimum(starts, max(len(raw) - 1, 0))], 0)
    is_fixed = (lengths == _FIXED.size) & (kinds != _JSON)
    bad = len(starts)
    fixed = np.empty(0, dtype=_COLUMNS)
    numbers = np.flatnonzero(is_fixed)
    if numbers.size:
        rows = _rows(data, starts, numbers)
        wrong = _first_wrong(rows)
        if wrong < len(rows):
            bad, damage = int(numbers[wrong]), "the checksum of a record does not match"
        fixed = np.ascontiguousarray(rows[:, _HEAD.size :]).view(_COLUMNS)[:, 0]
        known = (fixed["kind"] >= BLOCK) & (fixed["kind"] <= TOKEN) & (fixed["zeros"] == np.void(bytes(3)))
        if not known.all() and (odd := int(numbers[np.flatnonzero(~known)[0]])) < bad:
            bad, damage = odd, "unknown kind of record"
    texts: list[tuple[int, bytes]] = []
    for number in np.flatnonzero(~is_fixed[:bad]).tolist():
        start = int(starts[number])
        payload = data[start : start + int(lengths[number])]
        if crc32(payload) != int.from_bytes(data[start - 4 : start], "little"):
            bad, damage = number, "the checksum of a record does not match"
            break
        texts.append((first + number, payload))
    kept = int(np.searchsorted(numbers, bad))
    return Frames(first, bad, first + numbers[:kept], fixed[:kept], texts, damage)


def _rows(data: bytes, starts: Array, numbers: Array) -> Array:
    """Return the frames of a fixed size, one a row; a view if they are contiguous."""
    begin = int(starts[numbers[0]]) - _HEAD.size
    if len(numbers) * _STRIDE == int(starts[numbers[-1]]) + _FIXED.size - begin:
        return np.ndarray((len(numbers), _STRIDE), np.uint8, data, begin)
    view = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), _STRIDE)
    return np.asarray(view[starts[numbers] - _HEAD.size])


def _first_wrong(rows: Array) -> int:
    """Return the first row whose checksum is not that of its payload, or how many there are."""
    tables, start = _tables()
    for first in range(0, len(rows), _ROWS):
        some = rows[first : first + _ROWS]
        found = np.full(len(some), start, dtype=np.uint32)
        for place, table in enumerate(tables):
            found ^= table[some[:, _HEAD.size + place]]
        claimed = np.ascontiguousarray(some[:, 4:8]).view("<u4")[:, 0]
        wrong = np.flatnonzero(found != claimed)
        if wrong.size:
            return first + int(wrong[0])
    return len(rows)


@functools.cache
def _tables() -> tuple[Array, int]:
    """Return what each byte at each place does to the CRC-32 of a payload of a fixed size, and that of zeros."""
    nothing = bytearray(_FIXED.size)
    start = crc32(nothing)
    tables = np.zeros((_FIXED.size, 256), dtype=np.uint32)
    for place in range(_FIXED.size):
        for value in range(256):
            nothing[place] = value
            tables[place, value] = crc32(nothing) ^ start
        nothing[place] = 0
    return tables, start
