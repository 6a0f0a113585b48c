"""Records of the steps whose tensors are in the ring: a reader of both can recover these steps.

A step that ends leaves a record of all that it had, behind its bytes; one that had much leaves several, each of a part.
Every record says by itself what its tensors are. A record counts once the ring's file points to it, and each points to
the one before it. Records lie apart from the tensors, in a ring of their own.

A record: its head; a row for each item; then the text of each row and the reason for which it was only measured, as
JSON. Positions are those of the ring.

Slots are given back before their step ends. `ring.log` then says where their bytes are, a frame for each: its bytes
(u32), CRC-32 of what follows that (u32), position in the ring (i64), kind (u8), and what the kind says: a place in a
shard, statistics as the index has them, or a record of the journal.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassengine.reading.files import open_regular, read_open
from glassengine.recording.layout import layout
from glassengine.recording.layout.layout import LeftOut, Location
from glassengine.recording.layout.records import left_out_frame, measured_frame
from glassengine.recording.ring.items import Alias, Copied, Note, RingBlock, RingTensor, Streamed
from glassengine.writing import crc32, crc32_of_small, write_all

if TYPE_CHECKING:
    from glassengine.recording.ring.ring import Ring


# Magic, CRC-32 of all that follows it, bytes in all, number of rows, step, own position, the last record before it.
HEAD = struct.Struct("<4sIIIqqQ")
# Kind, rank, bytes of the text, bytes of the reason, position, and what the kind wants besides.
ROW = struct.Struct("<BxxxIIIqq")
MAGIC = b"step"
BLOCK, STORED, ALIAS, STREAMED, PIECE, COPIED, LEFT_OUT, TOKENS, HELD, ENDED = range(10)
_CHECKED_FROM = 8  # behind magic and checksum

# So many items make a part of a step.
_PART_ITEMS = 1024
_PART_BYTES = 1 << 17
_PART_TOKENS = 1 << 12
_MOST_OF_RING = 4

JournalItem = RingTensor | Copied | Alias | RingBlock | Streamed | LeftOut
_Part = tuple[list[bytes], list[bytes]]
_PACK = ROW.pack


class Journal:
    """Notes what is queued, and writes it down when a step ends; used under the lock of its writer.

    Args:
        ring: Where records are written. Without a file nothing is.
        queue: Gets the records of parts, whose slots are to be given back.
        on_wait: Called again and again while the ring is full; may raise.
    """

    def __init__(self, ring: Ring, queue: deque[Any], on_wait: Callable[[], None]) -> None:
        self._ring = ring
        self._queue = queue
        self._on_wait = on_wait
        self._noted: list[JournalItem] = []
        # Of each step that goes on, how many rows there are.
        self._counts: dict[int, int] = {}
        # Those with something larger than a slot are unknown.
        self._lost: set[int] = set()

    def note(self, items: Iterable[JournalItem]) -> None:
        """Note what is about to be queued; what is noted twice, because the first time was interrupted, is there once.

        One call of a list: an interruption comes before or behind it.
        """
        self._noted.extend(items)

    @property
    def is_long(self) -> bool:
        """Whether `write_parts` should be called."""
        return len(self._noted) >= _PART_ITEMS

    def write_parts(self) -> None:
        """Write down what has come of steps that have not ended."""
        for step in dict.fromkeys(item.step for item in self._noted):
            for part in self._take(step):
                self._write_part(step, part)

    def hold(self, step: int, token_ids: Sequence[Sequence[int]]) -> None:
        """Write down what has come of a step whose forward has ended, and that goes on."""
        self._end(step, token_ids, (HELD, None))

    def end(self, step: int, token_ids: Sequence[Sequence[int]], stopped: str | None) -> tuple[int, int]:
        """Write down the end of a step, and return where its record begins and ends."""
        return self._end(step, token_ids, (ENDED, stopped))

    def _end(self, step: int, token_ids: Sequence[Sequence[int]], how: tuple[int, str | None]) -> tuple[int, int]:
        if self._ring.file is None:
            self._noted.clear()
            return 0, 0
        parts = self._take(step)
        rows, texts = parts.pop()
        num_tokens = 0
        for number, ids in enumerate(token_ids):
            try:
                data = array("q", ids)
            except (TypeError, OverflowError):  # no token ids; the thread reports it
                self._lost.add(step)
                break
            for start in range(0, len(data), _PART_TOKENS):
                piece = data[start : start + _PART_TOKENS].tobytes()
                num_tokens += len(piece) // data.itemsize
                if num_tokens > _PART_TOKENS:
                    parts.append((rows, texts))
                    rows, texts, num_tokens = [], [], 0
                rows.append(_PACK(TOKENS, 0, len(piece), 0, 0, number))
                texts.append(piece)
        for part in parts:
            self._write_part(step, part)
        if step in self._lost:
            return 0, 0
        kind, stopped = how
        text = b"" if stopped is None else json.dumps(stopped).encode()
        # With how many there were before it, a step of which a part is missing is not taken for a whole one.
        rows.append(_PACK(kind, 0, 0, len(text), 0, self._counts.get(step, 0) + len(rows)))
        texts.append(text)
        if kind == HELD:
            self._write_part(step, (rows, texts))
            return 0, 0
        place = self._write(step, (rows, texts))
        self._lost.discard(step)
        self._counts.pop(step, None)
        return place

    def _take(self, step: int) -> list[_Part]:
        """Return the rows and texts of what was noted of a step, in parts, and forget it."""
        noted = self._noted
        rest: list[JournalItem] = []
        rows: list[bytes] = []
        texts: list[bytes] = []
        parts = [(rows, texts)]
        size = 0
        for item in noted:
            if item.step != step:
                rest.append(item)
                continue
            if size > _PART_BYTES:
                rows, texts = [], []
                parts.append((rows, texts))
                size = 0
            text = _add(item, rows)
            texts.append(text)
            size += len(text)
        noted[:] = rest
        return parts

    def _write_part(self, step: int, part: _Part) -> None:
        start, end = self._write(step, part)
        if end > start:
            self._queue.append(Note(step, start, end))

    def _write(self, step: int, part: _Part) -> tuple[int, int]:
        rows, texts = part
        ring = self._ring
        file = ring.file
        if file is None or not rows:
            return 0, 0
        body = b"".join(rows + texts)
        size = HEAD.size + len(body)
        if size > ring.num_bytes // _MOST_OF_RING:
            self._lost.add(step)
            return 0, 0
        position = ring.reserve(size, self._on_wait)
        rest = HEAD.pack(MAGIC, 0, size, len(rows), step, position, file.last)[_CHECKED_FROM:]
        checksum = crc32_of_small(memoryview(body), crc32_of_small(memoryview(rest)))
        ring.put(position, MAGIC + checksum.to_bytes(4, "little") + rest)
        ring.put(position + HEAD.size, body)
        self._counts[step] = self._counts.get(step, 0) + len(rows)
        file.last = position + 1
        return position, position + size


def _add(item: JournalItem, rows: list[bytes]) -> bytes:
    """Add what is written of an item to `rows`, and return its text."""
    if isinstance(item, RingBlock):
        text = item.text()
        if item.reason is None:
            rows.append(_PACK(BLOCK, item.rank, len(text), 0, item.position, item.end))
            return text
        reason = _json(item.reason)
        rows.append(_PACK(BLOCK, item.rank, len(text), len(reason), item.position, item.end))
        return text + reason
    if isinstance(item, (RingTensor, Copied)):
        kind = STORED if isinstance(item, RingTensor) else COPIED
        text, reason = item.description.text, b"" if item.reason is None else _json(item.reason)
        rows.append(_PACK(kind, item.rank, len(text), len(reason), item.position, 0))
        return text + reason if reason else text
    if isinstance(item, Alias):
        text = item.seen.description.text
        rows.append(_PACK(ALIAS, item.rank, len(text), 0, item.original.position, item.original.seen.nbytes))
        return text
    if isinstance(item, LeftOut):
        text = left_out_frame(item)
        rows.append(_PACK(LEFT_OUT, item.rank, len(text), 0, 0, 0))
        return text
    text = item.description.text
    rows.append(_PACK(STREAMED, item.rank, len(text), 0, item.position, len(item.pieces)))
    rows += [_PACK(PIECE, 0, 0, 0, position, num_bytes) for position, num_bytes in item.pieces]
    return text


@functools.lru_cache(maxsize=64)
def _json(text: str) -> bytes:
    return json.dumps(text).encode()


EVICTED_HEAD = struct.Struct("<IIqBxxx")
PLACE = struct.Struct("<QqqI")
"""Shard, offset, bytes, and their CRC-32, or 0 for pieces of a tensor, which have none of their own."""
AT, MEASURED, RECORD = range(3)
# Emptied when no step is open, but not for less.
_MANY_BYTES = 1 << 20
_MAX_MOVED_BYTES = 1 << 30

_log = logging.getLogger(__name__)

Movable = RingTensor | RingBlock | Copied | Note


class EvictedLog:
    """Writes `ring.log`; runs in the thread that writes."""

    def __init__(self, directory: Path, ring: Ring, notes: Ring) -> None:
        self._path = directory / layout.MOVED
        self._ring = ring
        self._notes = notes
        self._file: int | None = None
        self._num_bytes = 0

    def note(self, items: Sequence[Movable], open_steps: Set[int]) -> None:
        """Note where those of some items are, now that they are on file, whose steps are open."""
        moved = [item for item in items if item.step in open_steps] if open_steps else []
        if moved:
            self._write([_frame(item.position, *self._entry(item)) for item in moved])
        elif not open_steps and self._num_bytes > _MANY_BYTES and self._file is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
                self._num_bytes = 0

    def note_piece(self, position: int, num_bytes: int, shard: int, offset: int) -> None:
        """Note where a piece of a tensor is."""
        self._write([_frame(position, AT, PLACE.pack(shard, offset, num_bytes, 0))])

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def remove(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self.close()
            self._path.unlink(missing_ok=True)

    def _entry(self, item: Movable) -> tuple[int, bytes]:
        if isinstance(item, Note):
            return RECORD, bytes(self._notes.bytes_at(item.position, item.end - item.position))
        if isinstance(item, RingBlock):
            if item.reason is not None:
                assert item.table is not None
                return MEASURED, _payload(measured_frame(0, item.step, item.reason, item.table))
            assert item.location is not None
            return AT, _place(item.location, item.end - item.position)
        description = item.description
        if item.reason is not None:
            left_out = LeftOut(
                description.site,
                item.step,
                item.rank,
                item.reason,
                description.dtype,
                description.shape,
                item.statistics,
            )
            return MEASURED, _payload(left_out_frame(left_out))
        assert item.location is not None
        return AT, _place(item.location, description.nbytes)

    def _write(self, frames: list[bytes]) -> None:
        file = self._ring.file
        if file is None:
            return
        try:
            if self._file is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
                self._file = os.open(self._path, flags, 0o600)
            write_all(self._file, frames)
        except OSError as error:
            # What is in the ring does not tell whole steps any more.
            file.stop()
            _log.warning("a killed process loses the last steps of %s: %s", self._path.parent, error.strerror)
        self._num_bytes += sum(map(len, frames))


def _frame(position: int, kind: int, said: bytes) -> bytes:
    rest = EVICTED_HEAD.pack(0, 0, position, kind)[_CHECKED_FROM:] + said
    return struct.pack("<II", EVICTED_HEAD.size + len(said), crc32(rest)) + rest


def _place(location: Location, num_bytes: int) -> bytes:
    return PLACE.pack(location.shard, location.offset, num_bytes, location.checksum)


def _payload(frame: bytes) -> bytes:
    """Return the JSON of an index frame."""
    return frame[8:]


def frames(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield position, kind and content of each frame up to the first incomplete one."""
    start = 0
    while len(data) - start >= EVICTED_HEAD.size:
        size, checksum, position, kind = EVICTED_HEAD.unpack_from(data, start)
        if (
            not EVICTED_HEAD.size <= size <= len(data) - start
            or crc32(data[start + _CHECKED_FROM : start + size]) != checksum
        ):
            return
        yield position, kind, data[start + EVICTED_HEAD.size : start + size]
        start += size


def read_evicted(directory: Path) -> list[tuple[int, int, bytes]]:
    """Return the frames of the `ring.log` of a recording; none where there is no such file."""
    path = directory / layout.MOVED
    if not os.path.lexists(path):
        return []
    with open_regular(path, inside=directory) as file:
        return list(frames(read_open(file, path, most=_MAX_MOVED_BYTES)))
