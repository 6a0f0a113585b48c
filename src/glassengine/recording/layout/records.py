"""The records of `index.log`: their bytes, and what they say. Reading them trusts nothing.

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

Readers raise ValueError for a field that is missing, of the wrong kind, or contradicts another.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeGuard

import msgspec
import numpy as np

from glassengine.reading.documents import Size
from glassengine.reading.tensors import shape_from
from glassengine.recording.layout.entries import Measured
from glassengine.recording.layout.layout import (
    ALIGNMENT,
    MAX_FRAME_BYTES,
    MAX_GROUP_TENSORS,
    MAX_ROWS,
    MAX_SHARD_NUMBER,
    STORED,
    Entry,
    LeftOut,
    LightStatistics,
    LightTable,
    Location,
    Sharding,
    aligned,
    num_bytes,
)
from glassengine.writing import crc32

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


_FRAME = struct.Struct("<II")


def frame(payload: dict[str, Any]) -> bytes:
    """Return the bytes of one index frame."""
    return text_frame(json.dumps(payload, ensure_ascii=True, allow_nan=False, separators=(",", ":")))


def text_frame(text: str) -> bytes:
    """Return the bytes of one index frame, of a payload that is JSON text already."""
    return framed(text.encode())


def framed(payload: bytes) -> bytes:
    """Return the bytes of one frame: length, checksum, payload."""
    return _FRAME.pack(len(payload), crc32(payload)) + payload


def read_payload(file: BinaryIO) -> bytes | None:
    """Read what the next frame holds; None at the end of the file."""
    head = file.read(_FRAME.size)
    if not head:
        return None
    if len(head) < _FRAME.size:
        raise ValueError("the file ends inside a record")
    length, checksum = _FRAME.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a record claims {length} bytes")
    payload = file.read(length)
    if len(payload) < length:
        raise ValueError("the file ends inside a record")
    if crc32(payload) != checksum:
        raise ValueError("the checksum of a record does not match")
    return payload


def decoded(text: bytes) -> dict[str, Any]:
    """Return the object that the payload of a frame is."""
    try:
        try:
            payload = msgspec.json.decode(text)
        except msgspec.DecodeError:
            # Names may hold halves of characters, which it does not take.
            payload = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("a record is not JSON") from error
    if not isinstance(payload, dict):
        raise ValueError("a record is not an object")
    return payload


class _Place(msgspec.Struct):
    shard: Size
    offset: Size
    checksum: Size


class _Tensor(_Place):
    site: str
    step: Size
    rank: Size
    dtype: str
    shape: list[int]
    axes: dict[str, Size]
    nbytes: Size
    node: str | None = None
    sharding: Any = None


def entry_from(payload: dict[str, Any]) -> Entry:
    """Return the entry of a tensor's payload, trusting nothing."""
    found = msgspec.convert(payload, _Tensor)
    if found.dtype not in STORED:
        raise ValueError(f"unknown dtype {found.dtype!r}")
    shape = shape_from(found.shape)
    if any(axis >= len(shape) for axis in found.axes.values()):
        raise ValueError("axes do not name dimensions")
    if found.nbytes != num_bytes(found.dtype, shape):
        raise ValueError(f"{found.nbytes} bytes do not hold {found.dtype}{list(shape)}")
    of = (found.site, found.step, found.rank, found.dtype, shape, found.axes, found.node, found.nbytes)
    return Entry(*of, _location(found), sharding_from(found.sharding))


def sharding_from(payload: Any) -> Sharding | None:
    """Return how a tensor is spread over processes, trusting nothing."""
    if payload is None:
        return None
    # Recordings of earlier versions do not say which ranks a mesh has.
    if not isinstance(payload, dict) or not {"names", "coordinate"} <= payload.keys():
        raise ValueError("a sharding is not what it should be")
    try:
        found = msgspec.convert(payload, Sharding)
    except ValueError as error:
        raise ValueError(f"a sharding is not what it should be: {error}") from error
    rank, sizes = len(found.mesh), (*found.shape, *found.mesh, *found.coordinate, *found.ranks)
    if (
        min(sizes, default=0) < 0
        or len(found.placements) != rank
        or len(found.ranks) not in (0, math.prod(found.mesh))
        or any(len(known) not in (0, rank) for known in (found.names, found.coordinate))
    ):
        raise ValueError("a sharding does not fit its mesh")
    return found


def location_from(payload: dict[str, Any]) -> Location:
    """Return the location of a block's payload, trusting nothing."""
    return _location(msgspec.convert(payload, _Place))


def _location(found: _Place) -> Location:
    if found.shard > MAX_SHARD_NUMBER or found.offset % ALIGNMENT:
        raise ValueError("a location is impossible")
    return Location(found.shard, found.offset, found.checksum)


def group_from(payload: dict[str, Any]) -> list[Entry]:
    """Return the tensors of a group's payload, in step 0 and at their places in a block, trusting nothing."""
    (rank,) = sizes_of(payload, "rank")
    tensors = payload.get("tensors")
    if not isinstance(tensors, list) or not 0 < len(tensors) <= MAX_GROUP_TENSORS:
        raise ValueError("a group has no tensors, or too many")
    if not all(isinstance(tensor, dict) for tensor in tensors):
        raise ValueError("a tensor of a group is not an object")
    found: list[Entry] = []
    written: dict[int, int] = {}
    end = 0
    for index, tensor in enumerate(tensors):
        original = tensor.get("same_as")
        if original is not None and (not is_size(original) or original not in written):
            raise ValueError("a tensor of a group has the bytes of none before it")
        start = aligned(end) if original is None else written[original]
        place = {"step": 0, "rank": rank, "shard": 0, "offset": start, "checksum": 0}
        found.append(entry_from({**tensor, **place}))
        if not found[-1].nbytes:
            raise ValueError("a tensor of a group is empty")
        if original is None:
            written[index] = start
            end = start + found[-1].nbytes
        elif found[original].nbytes != found[-1].nbytes:
            raise ValueError("a tensor of a group has the bytes of one of another size")
    return found


def sizes_of(payload: dict[str, Any], *keys: str) -> list[int]:
    """Return numbers of a payload."""
    numbers: list[int] = []
    for key in keys:
        number = payload.get(key)
        if not is_size(number):
            raise ValueError("a number is missing or negative")
        numbers.append(number)
    return numbers


def left_out_frame(item: LeftOut) -> bytes:
    """Return the index frame of `item`; a run without values makes one for every tensor it sees."""
    statistics = "null"
    light = item.statistics
    if light is not None:
        low, high = ("null" if value is None else repr(value) for value in (light.min, light.max))
        statistics = f'{{"min":{low},"max":{high},"norm":{light.norm!r},"num_nonfinite":{light.num_nonfinite}}}'
    same = _same_in_every_step(item.site, item.rank, item.reason, item.dtype, item.shape)
    return text_frame(f'{same},"step":{item.step},"statistics":{statistics}}}')


@functools.lru_cache(maxsize=1 << 14)
def _same_in_every_step(site: str, rank: int, reason: str, dtype: str | None, shape: tuple[int, ...] | None) -> str:
    known = {"kind": "left_out", "site": site, "rank": rank, "reason": reason, "dtype": dtype, "shape": shape}
    return json.dumps(known, separators=(",", ":"))[:-1]


class _LeftOut(msgspec.Struct):
    site: str
    step: Size
    rank: Size
    reason: str
    dtype: str | None = None
    shape: list[int] | None = None
    statistics: LightStatistics | None = None


def left_out_from(payload: dict[str, Any]) -> LeftOut:
    """Inverse of `left_out_frame`, which trusts nothing."""
    found = msgspec.convert(payload, _LeftOut)
    if found.statistics is not None and found.statistics.num_nonfinite < 0:
        raise ValueError("a count is negative")
    sizes = None if found.shape is None else shape_from(found.shape)
    return LeftOut(found.site, found.step, found.rank, found.reason, found.dtype, sizes, found.statistics)


def measured_frame(group: int, step: int, reason: str, table: LightTable) -> bytes:
    """Return the index frame of the tensors of a group whose values are not recorded.

    Numbers as text would take longer than it takes to compute them: `rows` is base64 of the little-endian bytes.
    """
    rows = base64.b64encode(table.rows.astype("<f8", copy=False).tobytes()).decode()
    counts = json.dumps(list(table.num_nonfinite.items())) if table.num_nonfinite else "[]"
    return text_frame(
        f'{{"kind":"measured","group":{group},"step":{step},"reason":{_text_of(reason)},"rows":"{rows}",'
        f'"num_nonfinite":{counts}}}'
    )


def commit_frame(step: int, num_tensors: int, num_left_out: int, stopped: str | None) -> bytes:
    """Return the index frame that completes a step; `stopped` is what ended it before it was through."""
    if stopped is None and num_left_out < LARGEST:
        return _fixed(COMMIT, 0, step, num_tensors, num_left_out, 0)
    return text_frame(
        f'{{"kind":"commit","step":{step},"num_tensors":{num_tensors},"num_left_out":{num_left_out},'
        f'"stopped":{_text_of(stopped)}}}'
    )


@functools.lru_cache(maxsize=64)
def _text_of(value: str | None) -> str:
    return json.dumps(value)


class _Measured(msgspec.Struct):
    step: Size
    reason: str
    rows: str
    num_nonfinite: list[tuple[Size, Size]]


def measured_from(payload: dict[str, Any], tensors: Sequence[Entry]) -> Measured:
    """Inverse of `measured_frame`, which trusts nothing but the numbers in its rows (`index.impossible_rows`)."""
    found = msgspec.convert(payload, _Measured)
    numbers, counts = base64.b64decode(found.rows, validate=True), dict(found.num_nonfinite)
    if len(numbers) != 3 * 8 * len(tensors) or max(counts, default=0) >= len(tensors):
        raise ValueError("statistics are not those of the group")
    return Measured(tensors, found.step, found.reason, numbers, counts)


def is_size(value: object) -> TypeGuard[int]:
    """Return whether `value` is a whole number that is not negative."""
    return type(value) is int and 0 <= value < 1 << 63


_TOKENS_PER_FRAME = 1 << 15


# Frames of one token each take 40 bytes, and are read a hundred times as fast.
MAX_FIXED_ROWS = 8


def token_frames(step: int, rows: Sequence[Sequence[int]]) -> Iterator[bytes]:
    """Yield the index frames of a step's token ids: one for each of a few rows that were given one, as in decoding."""
    if len(rows) <= MAX_FIXED_ROWS and all(
        len(ids) == 1 and type(ids[0]) is int and 0 <= ids[0] < 1 << 62 for ids in rows
    ):
        yield from (token_frame(row, step, ids[0]) for row, ids in enumerate(rows))
    else:
        yield from map(frame, _token_payloads(rows))


def _token_payloads(rows: Sequence[Sequence[int]]) -> Iterator[dict[str, Any]]:
    """Yield the payloads of frames with pieces of rows, each well below `MAX_FRAME_BYTES`."""
    pieces: list[tuple[int, list[int]]] = []
    room = _TOKENS_PER_FRAME
    for row, ids in enumerate(rows):
        left = list(ids)
        while left:
            pieces.append((row, left[:room]))
            left = left[room:]
            # One more, for the row's number and brackets.
            room -= len(pieces[-1][1]) + 1
            if room <= 0:
                yield {"kind": "tokens", "rows": pieces}
                pieces, room = [], _TOKENS_PER_FRAME
    if pieces:
        yield {"kind": "tokens", "rows": pieces}


def tokens_from(payload: dict[str, Any]) -> list[tuple[int, list[int]]]:
    """Inverse of one of `_token_payloads`, which trusts nothing."""
    pieces = payload.get("rows")
    if not isinstance(pieces, list):
        raise ValueError("token ids are not rows")
    for piece in pieces:
        if not isinstance(piece, list) or len(piece) != 2 or not is_size(piece[0]) or piece[0] >= MAX_ROWS:
            raise ValueError("token ids are not in a row")
        if not isinstance(piece[1], list) or not all(isinstance(token, int) for token in piece[1]):
            raise ValueError("a token id is not a number")
    return [(row, ids) for row, ids in pieces]


def append_tokens(rows: list[list[int]], pieces: Iterable[tuple[int, Sequence[int]]]) -> None:
    """Append each piece to its row of `rows`, which grows to hold it."""
    for row, ids in pieces:
        while len(rows) <= row:
            rows.append([])
        rows[row].extend(ids)
