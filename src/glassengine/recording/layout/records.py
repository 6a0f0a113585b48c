"""The records of `index.log`: their bytes, and what they say. Reading them trusts nothing.

A frame is: payload length (u32), CRC-32 of the payload (u32), JSON payload; little-endian.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import math
import struct
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, BinaryIO, TypeGuard

import msgspec

from glassengine.reading.arrays import shape_from
from glassengine.recording.layout import frames
from glassengine.recording.layout.entries import Measured
from glassengine.recording.layout.layout import (
    ALIGNMENT,
    MAX_FRAME_BYTES,
    MAX_GROUP_TENSORS,
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
from glassengine.writing.checksums import crc32

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


def read_frame(file: BinaryIO) -> dict[str, Any] | None:
    """Read the next frame; None at the end of the file.

    Raises:
        ValueError: The frame is cut, damaged or not a JSON object. At most `MAX_FRAME_BYTES` are read.
    """
    payload = read_payload(file)
    return None if payload is None else decoded(payload)


def read_payload(file: BinaryIO) -> bytes | None:
    """Read what the next frame holds; None at the end of the file.

    Raises:
        ValueError: The frame is cut or damaged. At most `MAX_FRAME_BYTES` are read.
    """
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
    """Return the object that the payload of a frame is.

    Raises:
        ValueError: It is none.
    """
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


def entry_from(payload: dict[str, Any]) -> Entry:
    """Return the entry of a tensor's payload, trusting nothing.

    Raises:
        ValueError: A field is missing, of the wrong kind, or contradicts another.
    """
    axes = payload.get("axes")
    site, node, dtype = payload.get("site"), payload.get("node"), payload.get("dtype")
    if not isinstance(site, str) or not (node is None or isinstance(node, str)):
        raise ValueError("a name is not text")
    if not isinstance(dtype, str) or dtype not in STORED:
        raise ValueError(f"unknown dtype {dtype!r}")
    shape = shape_from(payload.get("shape"))
    if not isinstance(axes, dict) or not all(is_size(axis) and axis < len(shape) for axis in axes.values()):
        raise ValueError("axes do not name dimensions")
    step, rank, nbytes = sizes_of(payload, "step", "rank", "nbytes")
    if nbytes != num_bytes(dtype, shape):
        raise ValueError(f"{nbytes} bytes do not hold {dtype}{list(shape)}")
    location, sharding = location_from(payload), sharding_from(payload.get("sharding"))
    return Entry(site, step, rank, dtype, shape, axes, node, nbytes, location, sharding)


def sharding_from(payload: object) -> Sharding | None:
    """Return how a tensor is spread over processes, trusting nothing.

    Raises:
        ValueError: A field is missing, of the wrong kind, or contradicts another.
    """
    if payload is None:
        return None
    if not isinstance(payload, dict):
        raise ValueError("a sharding is not an object")
    found: dict[str, tuple[Any, ...]] = {}
    for field in dataclasses.fields(Sharding):
        # Recordings of earlier versions do not say which ranks a mesh has.
        items = payload.get(field.name, [] if field.name == "ranks" else None)
        is_text = field.name in ("placements", "names")
        if not isinstance(items, list) or not all(
            isinstance(item, str) if is_text else is_size(item) for item in items
        ):
            raise ValueError("a sharding is not what it should be")
        found[field.name] = tuple(items)
    rank = len(found["mesh"])
    if (
        len(found["placements"]) != rank
        or len(found["ranks"]) not in (0, math.prod(found["mesh"]))
        or any(len(found[key]) not in (0, rank) for key in ("names", "coordinate"))
    ):
        raise ValueError("a sharding does not fit its mesh")
    return Sharding(**found)


def location_from(payload: dict[str, Any]) -> Location:
    """Return the location of a tensor's or block's payload, trusting nothing.

    Raises:
        ValueError: A number is missing or impossible.
    """
    shard, offset, checksum = sizes_of(payload, "shard", "offset", "checksum")
    if shard > MAX_SHARD_NUMBER or offset % ALIGNMENT:
        raise ValueError("a location is impossible")
    return Location(shard, offset, checksum)


def group_from(payload: dict[str, Any]) -> list[Entry]:
    """Return the tensors of a group's payload, in step 0 and at their places in a block, trusting nothing.

    Raises:
        ValueError: A field is missing, of the wrong kind, or contradicts another.
    """
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
    """Return numbers of a payload.

    Raises:
        ValueError: One of them is missing, negative, or larger than anything on a disk.
    """
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


def left_out_from(payload: dict[str, Any]) -> LeftOut:
    """Inverse of `left_out_frame`, which trusts nothing.

    Raises:
        ValueError: A field is missing or of the wrong kind.
    """
    site, reason, dtype = payload.get("site"), payload.get("reason"), payload.get("dtype")
    step, rank, shape, found = (payload.get(key) for key in ("step", "rank", "shape", "statistics"))
    if not isinstance(site, str) or not isinstance(reason, str) or not (dtype is None or isinstance(dtype, str)):
        raise ValueError("a name is not text")
    if not is_size(step) or not is_size(rank):
        raise ValueError("a number is missing or negative")
    statistics = None
    if found is not None:
        if not isinstance(found, dict):
            raise ValueError("statistics are not an object")
        statistics = _light_from(found)
    sizes = None if shape is None else shape_from(shape)
    return LeftOut(site, int(str(step)), int(str(rank)), reason, dtype, sizes, statistics)


def measured_frame(group: int, step: int, reason: str, table: LightTable) -> bytes:
    """Return the index frame of the tensors of a group whose values are not recorded.

    Numbers as text would take longer than it takes to compute them: `rows` is base64 of the little-endian bytes.

    Args:
        group: Its number.
        step: Step that had them.
        reason: Why the values are not recorded.
        table: Their statistics.
    """
    rows = base64.b64encode(table.rows.astype("<f8", copy=False).tobytes()).decode()
    counts = json.dumps(list(table.num_nonfinite.items())) if table.num_nonfinite else "[]"
    return text_frame(
        f'{{"kind":"measured","group":{group},"step":{step},"reason":{_text_of(reason)},"rows":"{rows}",'
        f'"num_nonfinite":{counts}}}'
    )


def commit_frame(step: int, num_tensors: int, num_left_out: int, stopped: str | None) -> bytes:
    """Return the index frame that completes a step; `stopped` is what ended it before it was through."""
    if stopped is None and num_left_out < frames.LARGEST:
        return frames.commit_frame(step, num_tensors, num_left_out)
    return text_frame(
        f'{{"kind":"commit","step":{step},"num_tensors":{num_tensors},"num_left_out":{num_left_out},'
        f'"stopped":{_text_of(stopped)}}}'
    )


@functools.lru_cache(maxsize=64)
def _text_of(value: str | None) -> str:
    return json.dumps(value)


def measured_from(payload: dict[str, Any], tensors: Sequence[Entry]) -> Measured:
    """Inverse of `measured_frame`, which trusts nothing but the numbers in its rows (`impossible.impossible_rows`).

    Args:
        payload: Of the frame.
        tensors: Those of its group.

    Raises:
        ValueError: A field is missing, of the wrong kind, or contradicts the description of the group.
    """
    (step,) = sizes_of(payload, "step")
    reason, rows, counts = (payload.get(key) for key in ("reason", "rows", "num_nonfinite"))
    if not isinstance(reason, str) or not isinstance(rows, str):
        raise ValueError("a name is not text")
    numbers = base64.b64decode(rows, validate=True)
    if len(numbers) != 3 * 8 * len(tensors):
        raise ValueError("statistics are not those of the group")
    if not isinstance(counts, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in counts):
        raise ValueError("counts are not numbers")
    num_nonfinite: dict[int, int] = {}
    for pair in counts:
        index, count = sizes_of({"index": pair[0], "count": pair[1]}, "index", "count")
        if index >= len(tensors):
            raise ValueError("statistics are not those of the group")
        num_nonfinite[index] = count
    return Measured(tensors, step, reason, numbers, num_nonfinite)


def _light_from(found: Mapping[str, object]) -> LightStatistics:
    low, high, norm = (found.get(key) for key in ("min", "max", "norm"))
    (num_nonfinite,) = sizes_of({"count": found.get("num_nonfinite")}, "count")
    if (
        not isinstance(low, (float, int, NoneType))
        or not isinstance(high, (float, int, NoneType))
        or not isinstance(norm, (float, int))
    ):
        raise ValueError("statistics are not numbers")
    return LightStatistics(low, high, float(norm), num_nonfinite)


def is_size(value: object) -> TypeGuard[int]:
    """Return whether `value` is a whole number that is not negative."""
    return type(value) is int and 0 <= value < 1 << 63
