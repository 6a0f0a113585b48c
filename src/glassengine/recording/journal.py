"""What of the steps is in the ring, written into a ring of its own: whoever finds both later can tell the steps.

A step that ends leaves a record of all that it had, behind its bytes; one that had much leaves several, each of a part.
Every record says by itself what its tensors are. A record counts once the ring's file points to it, and each points to
the one before it.
It lies apart from the tensors, which are measured together where they lie behind one another.

A record: its head; a row for each item; then the text of each row and the reason for which it was only measured, as
JSON. Positions are those of the ring.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from glassengine.checksums import crc32_of_small
from glassengine.recording.items import Alias, Block, Copied, Note, Stored, Streamed
from glassengine.recording.layout import LeftOut
from glassengine.recording.records import left_out_frame
from glassengine.recording.ring import Ring

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
_PART_TOKENS = 1 << 14

JournalItem = Stored | Copied | Alias | Block | Streamed | LeftOut
_Row = tuple[bytes, bytes]


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
        # Those that something larger than a slot belongs to cannot be told.
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
            for rows in self._take(step):
                self._write_part(step, rows)

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
        *parts, last = self._take(step)
        for number, ids in enumerate(token_ids):
            data = array("q", ids)
            for start in range(0, len(data), _PART_TOKENS):
                piece = data[start : start + _PART_TOKENS].tobytes()
                parts.append([(ROW.pack(TOKENS, 0, len(piece), 0, 0, number), piece)])
        for rows in parts:
            self._write_part(step, rows)
        if step in self._lost:
            return 0, 0
        kind, stopped = how
        text = b"" if stopped is None else json.dumps(stopped).encode()
        last.append((ROW.pack(kind, 0, len(text), 0, 0, 0), text))
        if kind == HELD:
            self._write_part(step, last)
            return 0, 0
        self._lost.discard(step)
        return self._write(step, last)

    def _take(self, step: int) -> list[list[_Row]]:
        """Return the rows of what was noted of a step, in parts, and forget it."""
        noted = self._noted
        mine = [item for item in noted if item.step == step]
        parts: list[list[_Row]] = [[]]
        size = 0
        for item in mine:
            for row in _rows(item):
                if size > _PART_BYTES:
                    parts.append([])
                    size = 0
                parts[-1].append(row)
                size += ROW.size + len(row[1])
        if len(mine) == len(noted):
            noted.clear()
        else:
            noted[:] = [item for item in noted if item.step != step]
        return parts

    def _write_part(self, step: int, rows: list[_Row]) -> None:
        start, end = self._write(step, rows)
        if end > start:
            self._queue.append(Note(step, start, end))

    def _write(self, step: int, rows: list[_Row]) -> tuple[int, int]:
        ring = self._ring
        file = ring.file
        if file is None or not rows:
            return 0, 0
        body = b"".join([row for row, _ in rows] + [text for _, text in rows])
        size = HEAD.size + len(body)
        if size > ring.num_bytes // 8:
            self._lost.add(step)
            return 0, 0
        position = ring.reserve(size, self._on_wait)
        rest = HEAD.pack(MAGIC, 0, size, len(rows), step, position, file.last)[_CHECKED_FROM:] + body
        ring.put(position, MAGIC + crc32_of_small(memoryview(rest)).to_bytes(4, "little") + rest)
        file.last = position + 1
        return position, position + size


def _rows(item: JournalItem) -> list[_Row]:
    """Return what is written of an item."""
    if isinstance(item, Stored):
        text, reason = item.seen.description.text, _reason(item.reason)
        row = ROW.pack(STORED, item.rank, len(text), len(reason), item.position, 0)
        return [(row, text + reason if reason else text)]
    if isinstance(item, Block):
        text, reason = item.text(), _reason(item.reason)
        row = ROW.pack(BLOCK, item.rank, len(text), len(reason), item.position, item.end)
        return [(row, text + reason if reason else text)]
    if isinstance(item, Alias):
        text = item.seen.description.text
        return [(ROW.pack(ALIAS, item.rank, len(text), 0, item.original.position, item.original.seen.nbytes), text)]
    if isinstance(item, LeftOut):
        text = left_out_frame(item)
        return [(ROW.pack(LEFT_OUT, item.rank, len(text), 0, 0, 0), text)]
    if isinstance(item, Copied):
        text, reason = item.description.text, _reason(item.reason)
        return [(ROW.pack(COPIED, item.rank, len(text), len(reason), item.position, 0), text + reason)]
    text = item.description.text
    rows = [(ROW.pack(STREAMED, item.rank, len(text), 0, item.position, len(item.pieces)), text)]
    return rows + [(ROW.pack(PIECE, 0, 0, 0, position, num_bytes), b"") for position, num_bytes in item.pieces]


def _reason(reason: str | None) -> bytes:
    return b"" if reason is None else json.dumps(reason).encode()
