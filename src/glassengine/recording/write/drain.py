"""Brings what a model left in the ring to the writer; runs in the thread that writes."""

from __future__ import annotations

from collections.abc import Sequence

from glassengine.recording.layout.description import Group
from glassengine.recording.layout.layout import LeftOut, LightStatistics, aligned
from glassengine.recording.layout.statistics import light_of_blocks, light_of_bytes
from glassengine.recording.ring.items import Alias, Block, Commit, Copied, Note, Stored
from glassengine.recording.ring.pinned import PinnedCopies
from glassengine.recording.ring.ring import Ring
from glassengine.recording.write.writer import RecordingWriter
from glassengine.writing.checksums import crc32, crc32_of_small

# Small enough for a cache that the passes share.
_MEASURED_BYTES = 4 << 20
_SMALL_BYTES = 1 << 19


class Drain:
    """Stores items one by one; bytes in the ring must not change until the writer is flushed.

    Args:
        writer: Gets them.
        ring: Where the bytes of tensors of the CPU are.
        pinned: Where copies from accelerators are given back.
        queue: What comes after the item in hand; only looked at.
    """

    def __init__(self, writer: RecordingWriter, ring: Ring, pinned: PinnedCopies, queue: Sequence[object]) -> None:
        self._writer = writer
        self._ring = ring
        self._pinned = pinned
        self._queue = queue

    def put(self, item: Stored | Block | Alias | Copied | LeftOut | Note | Commit) -> None:
        """Store or measure a tensor, several, or end a step.

        Raises:
            UsageError: As `RecordingWriter` does.
        """
        if isinstance(item, Block):
            self._put_block(item)
        elif isinstance(item, Stored):
            self._put_stored(item)
        elif isinstance(item, Alias):
            self._put_alias(item)
        elif isinstance(item, Commit):
            self._writer.end_step(item.step, token_ids=item.token_ids, stopped=item.stopped)
        elif isinstance(item, LeftOut):
            self._writer.leave_out(item)
        elif isinstance(item, Copied):
            self._put_copied(item)

    def _put_block(self, item: Block) -> None:
        step, reason = item.step, item.reason
        group = self._writer.group(item.descriptions, item.rank, item.same_as)
        if reason is None:
            data = self._ring.bytes_at(item.position, item.end - item.position)
            checksum = crc32_of_small(data) if len(data) <= _SMALL_BYTES else crc32(data)
            item.location = self._writer.store_block(group, step, data, checksum)
        else:
            if item.table is None:
                self._measure(item, group)
            assert item.table is not None
            self._writer.leave_out_block(group, step, reason, item.table)

    def _measure(self, item: Block, group: Group) -> None:
        """Measure the tensors of a block, and with them those of the blocks behind it that go like it.

        Every pass over an array lets go of the interpreter lock, and the model waits while it is handed over: fewer
        and longer passes cost it less.
        """
        size = aligned(item.end - item.position)
        # Slots never wrap around the end of the ring, but the next one may begin at its beginning.
        most = min(_MEASURED_BYTES, self._ring.num_bytes - item.position % self._ring.num_bytes) // size
        alike = [item]
        for place in range(len(self._queue)):
            other = self._queue[place]
            if isinstance(other, (Commit, Note)):
                continue
            behind = alike[-1].position + size
            if not isinstance(other, Block) or other.position != behind or not other.goes_like(item):
                break
            if len(alike) >= most:
                break
            alike.append(other)
        data = self._ring.bytes_at(item.position, len(alike) * size)
        for block, table in zip(alike, light_of_blocks(data, len(alike), group.kinds, group.columns), strict=True):
            block.table = table

    def _put_stored(self, item: Stored) -> None:
        description = item.description
        data = self._ring.bytes_at(item.position, description.nbytes)
        if item.reason is None:
            item.location = self._writer.store(description, item.step, item.rank, [data], crc32(data))
        else:
            item.statistics = light_of_bytes(data, description.dtype)
            self._leave_out(item, item.reason, item.statistics)

    def _put_alias(self, item: Alias) -> None:
        original = item.original
        if original.reason is not None:
            self._leave_out(item, original.reason, original.statistics)
        else:
            assert original.location is not None
            self._writer.alias(item.description, item.step, item.rank, original.description, original.location)

    def _put_copied(self, item: Copied) -> None:
        description = item.description
        try:
            item.ready.synchronize()
            data = memoryview(item.data.numpy())  # type: ignore[arg-type]  # a buffer at run time
            if item.reason is None:
                item.location = self._writer.store(description, item.step, item.rank, [data], None)
            else:
                item.statistics = light_of_bytes(data, description.dtype)
                self._leave_out(item, item.reason, item.statistics)
        finally:
            self._pinned.give_back(description.nbytes)

    def _leave_out(self, item: Stored | Alias | Copied, reason: str, statistics: LightStatistics | None) -> None:
        site, dtype, shape = item.description.site, item.description.dtype, item.description.shape
        self._writer.leave_out(LeftOut(site, item.step, item.rank, reason, dtype, shape, statistics))
