"""Writes steps of a journal into a recording, as the thread of the process that is gone would have."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from glassengine.recording.layout.description import Description
from glassengine.recording.layout.layout import Entry, LeftOut, LightStatistics, Location, aligned
from glassengine.recording.layout.records import decoded, entry_from, group_from, left_out_from, measured_from
from glassengine.recording.layout.shard_files import ShardFiles
from glassengine.recording.layout.statistics import MEASURED, light_of_blocks, light_of_bytes
from glassengine.recording.rescue.journaled import JournaledStep, Row
from glassengine.recording.ring import journal
from glassengine.recording.ring.file import LeftRing
from glassengine.recording.write import moved
from glassengine.recording.write.writer import RecordingWriter
from glassengine.writing.checksums import crc32

_NOWHERE = {"step": 0, "rank": 0, "shard": 0, "offset": 0, "checksum": 0}
_Original = tuple[Description, Location | None, str | None, LightStatistics | None]


class Replay:
    """Brings the items of steps to a writer.

    Args:
        writer: Gets them.
        ring: Has the bytes that were not given back.
        frames: Of `ring.log`, which say where the others are.
        shards: Where those are.
    """

    def __init__(
        self, writer: RecordingWriter, ring: LeftRing, frames: Sequence[tuple[int, int, bytes]], shards: ShardFiles
    ) -> None:
        self._writer = writer
        self._ring = ring
        self._shards = shards
        self._places = {position: said for position, kind, said in frames if kind == moved.AT}
        self._measured = {position: said for position, kind, said in frames if kind == moved.MEASURED}
        # Nothing appears twice: a file that says otherwise must not fill the disk.
        self._room = ring.num_bytes[0] + sum(shards.data_bytes.values())
        self._descriptions: dict[bytes, Description] = {}
        self._groups: dict[bytes, tuple[tuple[Description, ...], tuple[tuple[int, int], ...], list[Entry]]] = {}

    def put(self, step: JournaledStep) -> None:
        """Write a step.

        Raises:
            ValueError: Something of it is not there, or is not what it should be.
            CorruptError: The same.
        """
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
                self._writer.store(description, step.number, row.rank, self._pieces(pieces), None)
            elif row.kind == journal.LEFT_OUT:
                self._leave_out(left_out_from(decoded(row.text[8:])), step.number)
            elif row.kind == journal.TOKENS:
                tokens.setdefault(row.extra, []).extend(array("q", row.text))
            else:
                raise ValueError(f"an item of unknown kind {row.kind}")
        ids = [tokens.get(number, []) for number in range(max(tokens, default=-1) + 1)] if len(tokens) < 1 << 20 else []
        self._writer.commit(step.number, token_ids=ids, stopped=step.stopped)

    def _put_block(self, row: Row, step: int) -> None:
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
        elif any(description.dtype not in MEASURED for description in descriptions):
            raise ValueError("a block of what is not measured")
        else:
            data = self._bytes(row.position, aligned(group.nbytes))
            (table,) = light_of_blocks(memoryview(data), 1, group.kinds, group.columns)
            self._writer.leave_out_block(group, step, row.reason, table)

    def _put_stored(self, row: Row, step: int, originals: dict[tuple[int, int], _Original]) -> None:
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
        elif description.dtype not in MEASURED:
            raise ValueError("a tensor of a kind that is not measured")
        else:
            statistics = light_of_bytes(memoryview(self._bytes(row.position, description.nbytes)), description.dtype)
            self._leave_out(_left_out(description, step, row, row.reason, statistics), step)
        originals[row.position, description.nbytes] = (description, location, row.reason, statistics)

    def _put_alias(self, row: Row, step: int, originals: dict[tuple[int, int], _Original]) -> None:
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

    def _pieces(self, rows: Sequence[Row]) -> Iterator[memoryview]:
        for row in rows:
            yield memoryview(self._bytes(row.position, row.extra, is_piece=True))

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
        shard, offset, size, checksum = moved.PLACE.unpack(said)
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
            found = Description(entry.site, entry.dtype, entry.shape, entry.axes, entry.node, entry.sharding)
            self._descriptions[text] = found
        return found

    def _group(self, text: bytes) -> tuple[tuple[Description, ...], tuple[tuple[int, int], ...], list[Entry]]:
        found = self._groups.get(text)
        if found is None:
            payload = decoded(text)
            entries = group_from(payload)
            descriptions = tuple(
                Description(entry.site, entry.dtype, entry.shape, entry.axes, entry.node, entry.sharding)
                for entry in entries
            )
            same_as = tuple(
                (index, tensor["same_as"])
                for index, tensor in enumerate(payload["tensors"])
                if tensor.get("same_as") is not None
            )
            found = self._groups[text] = (descriptions, same_as, entries)
        return found


def _left_out(
    description: Description, step: int, row: Row, reason: str, statistics: LightStatistics | None
) -> LeftOut:
    return LeftOut(description.site, step, row.rank, reason, description.dtype, description.shape, statistics)


def _once(rows: Sequence[Row]) -> list[Row]:
    """Return the rows without those that were written again, because the first time was interrupted."""
    last: dict[object, Row] = {}
    for number, row in enumerate(rows):
        key: object = number
        if row.kind in (journal.BLOCK, journal.STORED):
            key = (row.kind, row.position, row.text if row.kind == journal.STORED else None)
        elif row.kind in (journal.ALIAS, journal.LEFT_OUT):
            key = (row.kind, row.text)
        last[key] = row
    return list(last.values())
