"""Reads the journal that was left in a ring; what the bytes do not prove is not used."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from glassengine.recording.layout.records import decoded
from glassengine.recording.ring.file import LeftRing
from glassengine.recording.ring.journal import ENDED, HEAD, HELD, MAGIC, ROW, TOKENS
from glassengine.recording.write import moved
from glassengine.writing.checksums import crc32

_CHECKED_FROM = 8

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One item of a step; `journal` has the meanings."""

    kind: int
    rank: int
    text: bytes
    reason: str | None
    position: int
    extra: int


@dataclass
class JournaledStep:
    """A step that had ended, or whose forward had.

    Attributes:
        number: Of the step.
        rows: What it had.
        stopped: What ended it before it was through, if anything did.
    """

    number: int
    rows: list[Row] = field(default_factory=list)
    stopped: str | None = None


@dataclass(frozen=True)
class _Record:
    step: int
    position: int
    before: int
    rows: list[Row]


class Journaled:
    """The steps in a ring.

    Args:
        ring: The ring.
        frames: Of `ring.log`: position, kind, and content.
    """

    def __init__(self, ring: LeftRing, frames: Sequence[tuple[int, int, bytes]]) -> None:
        found: dict[int, _Record] = {}
        for _, kind, said in frames:
            if kind == moved.RECORD:
                record = _record(said)
                found[record.position] = record
        at = ring.last
        while at > ring.tails[1]:
            position = at - 1
            try:
                size = HEAD.unpack(ring.bytes_at(position, HEAD.size, 1))[2]
                record = _record(ring.bytes_at(position, size, 1))
            except ValueError:
                break
            if record.position != position or record.before >= at:
                break
            found[position] = record
            at = record.before
        self._records = [found[position] for position in sorted(found)]

    def steps(self) -> Iterator[JournaledStep]:
        """Yield the steps in the order in which they ended; first those that ended."""
        ended: dict[int, JournaledStep] = {}
        held: dict[int, JournaledStep] = {}
        rows: dict[int, list[Row]] = {}
        # At the end of a step they are repeated.
        tokens: dict[int, list[Row]] = {}
        held_tokens: dict[int, list[Row]] = {}
        counts: Counter[int] = Counter()
        for record in self._records:
            mine = rows.setdefault(record.step, [])
            for row in record.rows:
                counts[record.step] += 1
                if row.kind in (HELD, ENDED) and row.extra != counts[record.step] - 1:
                    _log.warning("step %d cannot be recovered: a part of it is missing", record.step)
                elif row.kind == TOKENS:
                    tokens.setdefault(record.step, []).append(row)
                elif row.kind == HELD:
                    found = held_tokens[record.step] = tokens.pop(record.step, held_tokens.get(record.step, []))
                    held[record.step] = JournaledStep(record.step, mine + found, "the end of its process")
                elif row.kind == ENDED:
                    found = tokens.pop(record.step, [])
                    ended[record.step] = JournaledStep(record.step, mine + found, row.reason)
                else:
                    mine.append(row)
        yield from ended.values()
        for number, step in held.items():
            if number not in ended:
                yield step


def _record(data: bytes) -> _Record:
    """Return a record.

    Raises:
        ValueError: It is none.
    """
    if len(data) < HEAD.size:
        raise ValueError("a record is cut")
    magic, checksum, size, count, step, position, before = HEAD.unpack_from(data)
    if magic != MAGIC or size != len(data) or crc32(data[_CHECKED_FROM:]) != checksum:
        raise ValueError("a record is damaged")
    at = HEAD.size + count * ROW.size
    if at > size or step < 0:
        raise ValueError("a record is impossible")
    rows = []
    for number in range(count):
        kind, rank, text_bytes, reason_bytes, place, extra = ROW.unpack_from(data, HEAD.size + number * ROW.size)
        text, reason = data[at : at + text_bytes], data[at + text_bytes :][:reason_bytes]
        at += text_bytes + reason_bytes
        rows.append(Row(kind, rank, text, _text_of(reason), place, extra))
    if at != size:
        raise ValueError("a record is impossible")
    return _Record(step, position, before, rows)


def _text_of(reason: bytes) -> str | None:
    """Return the description of a row; None if there is none."""
    if not reason:
        return None
    found = decoded(b'{"text":' + reason + b"}")["text"]
    if not isinstance(found, str):
        raise ValueError("a reason is not text")
    return found
