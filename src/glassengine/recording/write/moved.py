"""Where to find what was in the ring of steps that have not ended: its slots are given back before their step ends.

`ring.log` has a frame for each: its bytes (u32), CRC-32 of what follows that (u32), position in the ring (i64), kind
(u8), and what the kind says: a place in a shard, statistics as the index has them, or a record of the journal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING

from glassengine.recording.layout import layout
from glassengine.recording.layout.layout import LeftOut, Location
from glassengine.recording.layout.records import left_out_frame, measured_frame
from glassengine.recording.ring.items import Block, Copied, Note, Stored
from glassengine.recording.write.shard import write_all
from glassengine.writing.checksums import crc32

if TYPE_CHECKING:
    from glassengine.recording.ring.ring import Ring

HEAD = struct.Struct("<IIqBxxx")
PLACE = struct.Struct("<QqqI")
"""Shard, offset, bytes, and their CRC-32, or 0 for pieces of a tensor, which have none of their own."""
AT, MEASURED, RECORD = range(3)
_CHECKED_FROM = 8
# Emptied when no step is open, but not for less.
_MANY_BYTES = 1 << 20

_log = logging.getLogger(__name__)

Movable = Stored | Block | Copied | Note


class MovedLog:
    """Writes `ring.log`; runs in the thread that writes.

    Args:
        directory: Of the recording.
        ring: Whose slots are given back.
        notes: Has the journal.
    """

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
            self._write([_frame(item.position, *self._told(item)) for item in moved])
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

    def _told(self, item: Movable) -> tuple[int, bytes]:
        if isinstance(item, Note):
            return RECORD, bytes(self._notes.bytes_at(item.position, item.end - item.position))
        if isinstance(item, Block):
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
    rest = HEAD.pack(0, 0, position, kind)[_CHECKED_FROM:] + said
    return struct.pack("<II", HEAD.size + len(said), crc32(rest)) + rest


def _place(location: Location, num_bytes: int) -> bytes:
    return PLACE.pack(location.shard, location.offset, num_bytes, location.checksum)


def _payload(frame: bytes) -> bytes:
    """Return the JSON of an index frame."""
    return frame[8:]


def frames(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield position, kind and content of each frame up to the first incomplete one."""
    start = 0
    while len(data) - start >= HEAD.size:
        size, checksum, position, kind = HEAD.unpack_from(data, start)
        if not HEAD.size <= size <= len(data) - start or crc32(data[start + _CHECKED_FROM : start + size]) != checksum:
            return
        yield position, kind, data[start + HEAD.size : start + size]
        start += size
