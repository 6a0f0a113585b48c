"""Recovers the steps that had ended when the process of a recording was killed, and that only its ring holds.

They become a recording of their own in `recovered/`, once; or, where nothing can be written, in a directory that lives
as long as its reader. The ring of a process that still runs is left alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import weakref
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from glassengine.errors import GlassError, UsageError
from glassengine.reading.files import open_regular
from glassengine.recording.layout import layout
from glassengine.recording.layout.description import Description
from glassengine.recording.layout.index import IndexContents, read_index
from glassengine.recording.layout.layout import Entry, LeftOut, LightStatistics, Location, aligned
from glassengine.recording.layout.records import (
    append_tokens,
    decoded,
    entry_from,
    group_from,
    left_out_from,
    measured_from,
)
from glassengine.recording.layout.shard_files import ShardFiles, Shards
from glassengine.recording.ring import journal
from glassengine.recording.ring.file import LeftRing
from glassengine.writing import crc32, hold, remove_tree

if TYPE_CHECKING:
    from glassengine.recording.write.writer import RecordingWriter


_PARTIAL = f"{layout.RECOVERED}.part"

# Of no shard that the index names, also not of one that is gone.
_FIRST_SHARD = (layout.MAX_SHARD_NUMBER + 1) // 2

_Frame = tuple[int, int, bytes]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recovered:
    """Where recovered steps are.

    Attributes:
        path: A recording whose shards have numbers of their own; one in a temporary directory goes with this.
    """

    path: Path

    def added_to(self, contents: IndexContents, shards: Shards) -> IndexContents:
        """Return what an index says together with the recovered steps that it has not."""
        with open_regular(self.path / layout.INDEX, inside=self.path) as file:
            found = read_index(file, shards.data_bytes)
        known = set(contents.steps)
        tokens = [list(row) for row in contents.token_ids]
        append_tokens(tokens, enumerate(found.token_ids))
        return IndexContents(
            contents.steps + [step for step in found.steps if step not in known],
            contents.entries.with_steps_of(found.entries),
            contents.left_out.with_steps_of(found.left_out),
            {**found.stopped, **contents.stopped},
            tokens,
            contents.damage,
        )


def recovered(directory: Path) -> Recovered | None:
    """Return the steps of a recording that are not in its index, recovering them from its ring now if need be.

    To be called before the index is read: what the writer brings to it meanwhile leaves the ring.
    """
    there = directory / layout.RECOVERED
    try:
        if not os.path.lexists(directory / layout.RING):
            return Recovered(there) if (there / layout.MANIFEST).is_file() else None
        with open_regular(directory / layout.RING, inside=directory) as file:
            ring = LeftRing.read(file)
            if ring is None or ring.is_stopped:
                return Recovered(there) if (there / layout.MANIFEST).is_file() else None
            with _index(directory) as is_held:
                if not _has_ended(ring, is_held=is_held, directory=directory):
                    return None
                return _recover(directory, ring, may_write=is_held is False)
    except (GlassError, OSError, ValueError) as error:
        # The rest of the recording can be read.
        _log.warning("steps that only the ring of %s holds cannot be recovered: %s", directory, error)
        return None


@contextlib.contextmanager
def _index(directory: Path) -> Iterator[bool]:
    """Lock the index of a recording; yield whether another process has."""
    with open_regular(directory / layout.INDEX, inside=directory) as index:
        try:
            hold(index.fileno())
        except BlockingIOError:
            yield True
        else:
            yield False


def num_left(directory: Path) -> int | None:
    """Return how many steps only the ring of a recording holds; None where that cannot be read now."""
    if not (directory / layout.INDEX).exists():
        return 0
    try:
        with open_regular(directory / layout.RING, inside=directory) as file:
            ring = LeftRing.read(file)
            return 0 if ring is None else len(_missing(directory, ring, ShardFiles(directory))[0])
    except (GlassError, OSError, ValueError) as error:
        _log.warning("steps in the ring of %s cannot be read: %s", directory, error)
        return None


def with_left(error: Exception, num_steps: int | None) -> Exception:
    """Return an error that says, too, how many steps are in the ring, as `num_left` has it."""
    if num_steps == 0 or not isinstance(error, UsageError):
        return error
    said = f"in {layout.RING}: {num_steps or 'possibly some'} more, recovered when the recording is opened"
    hint = said if error.hint is None else f"{error.hint}; {said}"
    return UsageError(error.what, got=error.got, expected=error.expected, hint=hint)


def _has_ended(ring: LeftRing, *, is_held: bool, directory: Path) -> bool:
    if ring.is_left and ring.owner.is_of_this_machine():
        return True
    ended = ring.owner.has_ended()
    if ended is not None:
        return ended
    if not ring.owner.is_of_this_machine():
        _log.warning(
            "%s was not closed, and the machine that wrote it was started again since, or is another one: the last "
            "steps, in its ring only, may be incomplete",
            directory,
        )
        return False
    return not is_held  # in another container, say


def _recover(directory: Path, ring: LeftRing, *, may_write: bool) -> Recovered | None:
    there = directory / layout.RECOVERED
    is_there = (there / layout.MANIFEST).is_file()
    if not is_there and not (may_write and _recover_into(there, directory, ring)):
        # Until there is room: the ring stays.
        kept = Recovered(Path(tempfile.mkdtemp(prefix="glassengine-")))
        weakref.finalize(kept, remove_tree, kept.path)
        return kept if _replay(directory, ring, kept.path) else None
    if may_write:
        for name in (layout.RING, layout.MOVED):
            (directory / name).unlink(missing_ok=True)
    return Recovered(there) if (there / layout.MANIFEST).is_file() else None


def _recover_into(there: Path, directory: Path, ring: LeftRing) -> bool:
    """Write the steps that only the ring holds, if any, into a directory; return whether that went well."""
    partial = directory / _PARTIAL
    try:
        remove_tree(partial)  # of one that was killed in its turn
        partial.mkdir()
        if _replay(directory, ring, partial):
            partial.rename(there)
    except (GlassError, OSError) as error:
        _log.warning("recovered steps of %s cannot be kept: %s", directory, error)
        return False
    finally:
        remove_tree(partial)
    return True


def _missing(directory: Path, ring: LeftRing, shards: ShardFiles) -> tuple[list[JournaledStep], list[_Frame]]:
    """Return the steps that are not in the index, and what `ring.log` says."""
    with open_regular(directory / layout.INDEX, inside=directory) as index:
        known = set(read_index(index, shards.data_bytes).steps)
    frames = journal.read_evicted(directory)
    return [step for step in Journaled(ring, frames).steps() if step.number not in known], frames


def _replay(directory: Path, ring: LeftRing, target: Path) -> int:
    """Write the steps that are not in the index into a new recording, and return how many."""
    from glassengine.recording.write.writer import RecordingWriter

    shards = ShardFiles(directory)
    steps, frames = _missing(directory, ring, shards)
    count = 0
    first = max(_FIRST_SHARD, max(shards.data_bytes, default=-1) + 1)
    with RecordingWriter(target, metadata={}, first_shard=first) as writer:
        replay = JournalReplay(writer, ring, frames, shards)
        for step in steps:
            try:
                replay.put(step)
            except (GlassError, ValueError, KeyError, TypeError) as error:
                if writer.failure is not None or isinstance(error.__cause__, OSError):
                    raise  # it may be there the next time
                _log.warning("step %d of %s cannot be recovered: %s", step.number, directory, error)
            else:
                count += 1
    _log.info("recovered %d steps of %s", count, directory)
    return count


_CHECKED_FROM = 8


@dataclass(frozen=True)
class JournalRow:
    """One item of a step; `journal` has the meanings."""

    kind: int
    rank: int
    text: bytes
    reason: str | None
    position: int
    extra: int


@dataclass
class JournaledStep:
    """A step that had ended, or whose forward had."""

    number: int
    rows: list[JournalRow] = field(default_factory=list)
    stopped: str | None = None


@dataclass(frozen=True)
class _Record:
    step: int
    position: int
    before: int
    rows: list[JournalRow]


class Journaled:
    """The steps in a ring."""

    def __init__(self, ring: LeftRing, frames: Sequence[tuple[int, int, bytes]]) -> None:
        records: dict[int, _Record] = {}
        for _, kind, said in frames:
            if kind == journal.RECORD:
                record = _record(said)
                records[record.position] = record
        at = ring.last
        while at > ring.tails[1]:
            position = at - 1
            try:
                size = journal.HEAD.unpack(ring.bytes_at(position, journal.HEAD.size, 1))[2]
                record = _record(ring.bytes_at(position, size, 1))
            except ValueError:
                break
            if record.position != position or record.before >= at:
                break
            records[position] = record
            at = record.before
        self._records = [records[position] for position in sorted(records)]

    def steps(self) -> Iterator[JournaledStep]:
        """Yield the steps in the order in which they ended; first those that ended."""
        ended: dict[int, JournaledStep] = {}
        held: dict[int, JournaledStep] = {}
        rows: dict[int, list[JournalRow]] = {}
        # At the end of a step they are repeated.
        tokens: dict[int, list[JournalRow]] = {}
        held_tokens: dict[int, list[JournalRow]] = {}
        counts: Counter[int] = Counter()
        for record in self._records:
            mine = rows.setdefault(record.step, [])
            for row in record.rows:
                counts[record.step] += 1
                if row.kind in (journal.HELD, journal.ENDED) and row.extra != counts[record.step] - 1:
                    _log.warning("step %d cannot be recovered: a part of it is missing", record.step)
                elif row.kind == journal.TOKENS:
                    tokens.setdefault(record.step, []).append(row)
                elif row.kind == journal.HELD:
                    found = held_tokens[record.step] = tokens.pop(record.step, held_tokens.get(record.step, []))
                    held[record.step] = JournaledStep(record.step, mine + found, "the end of its process")
                elif row.kind == journal.ENDED:
                    found = tokens.pop(record.step, [])
                    ended[record.step] = JournaledStep(record.step, mine + found, row.reason)
                else:
                    mine.append(row)
        yield from ended.values()
        for number, step in held.items():
            if number not in ended:
                yield step


def _record(data: bytes) -> _Record:
    """Return a record."""
    if len(data) < journal.HEAD.size:
        raise ValueError("a record is cut")
    magic, checksum, size, count, step, position, before = journal.HEAD.unpack_from(data)
    if magic != journal.MAGIC or size != len(data) or crc32(data[_CHECKED_FROM:]) != checksum:
        raise ValueError("a record is damaged")
    at = journal.HEAD.size + count * journal.ROW.size
    if at > size or step < 0:
        raise ValueError("a record is impossible")
    rows = []
    for number in range(count):
        kind, rank, text_bytes, reason_bytes, place, extra = journal.ROW.unpack_from(
            data, journal.HEAD.size + number * journal.ROW.size
        )
        text, reason = data[at : at + text_bytes], data[at + text_bytes :][:reason_bytes]
        at += text_bytes + reason_bytes
        rows.append(JournalRow(kind, rank, text, _text_of(reason), place, extra))
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


_NOWHERE = {"step": 0, "rank": 0, "shard": 0, "offset": 0, "checksum": 0}
_Original = tuple[Description, Location | None, str | None, LightStatistics | None]


class JournalReplay:
    """Brings the items of steps to a writer."""

    def __init__(
        self, writer: RecordingWriter, ring: LeftRing, frames: Sequence[tuple[int, int, bytes]], shards: ShardFiles
    ) -> None:
        from glassengine.recording.layout import tensors  # torch, which reading does without

        self._tensors = tensors
        self._writer = writer
        self._ring = ring
        self._shards = shards
        self._places = {position: said for position, kind, said in frames if kind == journal.AT}
        self._measured = {position: said for position, kind, said in frames if kind == journal.MEASURED}
        # Nothing appears twice: a file that says otherwise must not fill the disk.
        self._room = ring.num_bytes[0] + sum(shards.data_bytes.values())
        self._descriptions: dict[bytes, Description] = {}
        self._groups: dict[bytes, tuple[tuple[Description, ...], tuple[tuple[int, int], ...], list[Entry]]] = {}

    def put(self, step: JournaledStep) -> None:
        """Write a step."""
        originals: dict[tuple[int, int], _Original] = {}
        tokens: dict[int, list[int]] = {}
        rows = iter(_once(step.rows))
        for row in rows:
            if row.kind == journal.BLOCK:
                self._put_block(row, step.number)
            elif row.kind in (journal.STORED, journal.COPIED):
                self._put_stored(row, step.number, originals)
            elif row.kind == journal.ALIAS:
                self._put_alias(row, step.number, originals)
            elif row.kind == journal.STREAMED:
                description = self._description(row.text)
                pieces = [next(rows) for _ in range(min(row.extra, len(step.rows)))]
                if sum(piece.extra for piece in pieces) != description.nbytes:
                    raise ValueError(f"a piece of {description.site!r} is missing")
                data = (memoryview(self._bytes(one.position, one.extra, is_piece=True)) for one in pieces)
                self._writer.store(description, step.number, row.rank, data, None)
            elif row.kind == journal.LEFT_OUT:
                self._leave_out(left_out_from(decoded(row.text[8:])), step.number)
            elif row.kind == journal.TOKENS:
                tokens.setdefault(row.extra, []).extend(array("q", row.text))
            else:
                raise ValueError(f"an item of unknown kind {row.kind}")
        ids = [tokens.get(number, []) for number in range(max(tokens, default=-1) + 1)] if len(tokens) < 1 << 20 else []
        self._writer.commit(step.number, token_ids=ids, stopped=step.stopped)

    def _put_block(self, row: JournalRow, step: int) -> None:
        descriptions, same_as, entries = self._group(row.text)
        group = self._writer.group(descriptions, row.rank, same_as)
        if row.extra - row.position != group.nbytes:
            raise ValueError("a block has not the bytes of its tensors")
        if row.reason is None:
            data = self._bytes(row.position, group.nbytes)
            self._writer.store_block(group, step, memoryview(data), crc32(data))
        elif row.position < self._ring.tails[0]:
            found = measured_from(decoded(self._measured[row.position]), entries)
            for index in range(len(found)):
                self._leave_out(found.item(index), step)
        elif any(description.dtype not in self._tensors.MEASURED for description in descriptions):
            raise ValueError("a block of what is not measured")
        else:
            data = self._bytes(row.position, aligned(group.nbytes))
            (table,) = self._tensors.light_of_blocks(memoryview(data), 1, group.kinds, group.columns)
            self._writer.leave_out_block(group, step, row.reason, table)

    def _put_stored(self, row: JournalRow, step: int, originals: dict[tuple[int, int], _Original]) -> None:
        description = self._description(row.text)
        location = statistics = None
        if row.kind == journal.COPIED and row.position >= self._ring.tails[0]:
            raise ValueError(f"{description.site!r} was still on its way from a device")
        if row.reason is None:
            data = self._bytes(row.position, description.nbytes)
            location = self._writer.store(description, step, row.rank, [memoryview(data)], crc32(data))
            self._writer.flush()
        elif row.position < self._ring.tails[0]:
            item = left_out_from(decoded(self._measured[row.position]))
            statistics = item.statistics
            self._leave_out(item, step)
        elif description.dtype not in self._tensors.MEASURED:
            raise ValueError("a tensor of a kind that is not measured")
        else:
            statistics = self._tensors.light_of_bytes(
                memoryview(self._bytes(row.position, description.nbytes)), description.dtype
            )
            self._leave_out(_left_out(description, step, row, row.reason, statistics), step)
        originals[row.position, description.nbytes] = (description, location, row.reason, statistics)

    def _put_alias(self, row: JournalRow, step: int, originals: dict[tuple[int, int], _Original]) -> None:
        description = self._description(row.text)
        original, location, reason, statistics = originals[row.position, row.extra]
        if description.nbytes != original.nbytes:
            raise ValueError("a tensor has the bytes of one of another size")
        if reason is not None:
            self._leave_out(_left_out(description, step, row, reason, statistics), step)
        elif location is not None:
            self._writer.alias(description, step, row.rank, original, location)

    def _leave_out(self, item: LeftOut, step: int) -> None:
        if item.step != step:
            raise ValueError("a tensor of another step")
        self._writer.leave_out(item)

    def _bytes(self, position: int, num_bytes: int, *, is_piece: bool = False) -> bytes | bytearray:
        """Return bytes from the ring, or from where they have been moved to."""
        if not num_bytes:
            return b""
        self._room -= num_bytes
        if self._room < 0:
            raise ValueError("more bytes than there can be")
        if position >= self._ring.tails[0]:
            return self._ring.bytes_at(position, num_bytes)
        said = self._places[position]
        shard, offset, size, checksum = journal.PLACE.unpack(said)
        if size != num_bytes or offset < 0 or shard not in self._shards.data_bytes:
            raise ValueError("bytes that are not on file")
        data = bytes(self._shards.read(shard, offset, size))
        if not is_piece and crc32(data) != checksum:
            raise ValueError("bytes that are damaged")
        return data

    def _description(self, text: bytes) -> Description:
        found = self._descriptions.get(text)
        if found is None:
            entry = entry_from({**decoded(text), **_NOWHERE})
            found = self._descriptions[text] = _described(entry)
        return found

    def _group(self, text: bytes) -> tuple[tuple[Description, ...], tuple[tuple[int, int], ...], list[Entry]]:
        found = self._groups.get(text)
        if found is None:
            payload = decoded(text)
            entries = group_from(payload)
            descriptions = tuple(map(_described, entries))
            same_as = tuple(
                (index, tensor["same_as"])
                for index, tensor in enumerate(payload["tensors"])
                if tensor.get("same_as") is not None
            )
            found = self._groups[text] = (descriptions, same_as, entries)
        return found


def _described(entry: Entry) -> Description:
    return Description(entry.site, entry.dtype, entry.shape, entry.axes, entry.node, entry.sharding)


def _left_out(
    description: Description, step: int, row: JournalRow, reason: str, statistics: LightStatistics | None
) -> LeftOut:
    return LeftOut(description.site, step, row.rank, reason, description.dtype, description.shape, statistics)


def _once(rows: Sequence[JournalRow]) -> list[JournalRow]:
    """Return the rows without those that were written again, because the first time was interrupted."""
    last: dict[object, JournalRow] = {}
    for number, row in enumerate(rows):
        key: object = number
        if row.kind in (journal.BLOCK, journal.STORED):
            key = (row.kind, row.position, row.text if row.kind == journal.STORED else None)
        elif row.kind in (journal.ALIAS, journal.LEFT_OUT):
            key = (row.kind, row.text)
        last[key] = row
    return list(last.values())
