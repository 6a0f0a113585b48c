"""The thread that brings a recording to disk: takes what is queued, writes it, and gives its room in the ring back."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator

from glassengine.recording.layout.description import Group
from glassengine.recording.layout.layout import LeftOut, LightStatistics, aligned
from glassengine.recording.layout.tensors import light_of_blocks, light_of_bytes
from glassengine.recording.ring.items import (
    Alias,
    Commit,
    Copied,
    Item,
    Note,
    RingBlock,
    RingPiece,
    RingTensor,
    Streamed,
)
from glassengine.recording.ring.journal import EvictedLog, Movable
from glassengine.recording.ring.ring import Flag, PinnedCopies, Ring
from glassengine.recording.write.writer import RecordingWriter
from glassengine.writing import crc32, crc32_of_small

_LOOK_S = 0.1
# Written at once; what a disk has no room for any more takes the steps of one such batch with it.
_WRITE_BYTES = 4 << 20

# Small enough for a cache that the passes share.
_MEASURED_BYTES = 4 << 20
_SMALL_BYTES = 1 << 19

_log = logging.getLogger(__name__)


class _Cut(Exception):
    """A tensor whose copying was interrupted."""


class Consumer:
    """What the thread does; ends when it takes None from the queue.

    Attributes:
        failure: What stopped the writing, if anything did; the queue is emptied all the same.
        has_ended: Whether a step has ended since the thread looked.
        woken: When it looked last.
        moved: Notes what leaves the ring before its step has ended.
        keeps: Whether what could not be written stays in the ring, from which it can be recovered.
    """

    def __init__(
        self,
        writer: RecordingWriter,
        ring: Ring,
        pinned: PinnedCopies,
        notes: Ring,
        queue: deque[Item | RingPiece | Flag | None],
        wake: Flag,
    ) -> None:
        self.failure: Exception | None = None
        self.has_ended = False
        self.woken = 0.0
        self.keeps = False
        self.moved = EvictedLog(writer.path, ring, notes)
        self._path = writer.path
        self._writer = writer
        self._ring = ring
        self._notes = notes
        self._pinned = pinned
        self._queue = queue
        self._wake = wake
        # What was handled, and is not on file yet.
        self._unflushed: list[Movable] = []
        # Where the last of what was handled ends in the ring, and in that of the journal.
        self._end = self._notes_end = 0

    def work(self) -> None:
        """Write what is queued until there is None."""
        while True:
            if not self._wake.wait(_LOOK_S) and not self.has_ended:
                continue  # nothing that is not in an ended step would be kept: leave the model alone
            self.has_ended = False
            self.woken = time.monotonic()
            num_bytes = 0
            while self._queue:
                item = self._queue.popleft()
                if item is None:
                    self._flush()
                    return
                if isinstance(item, Flag):
                    self._flush()
                    item.set()
                    continue
                assert not isinstance(item, RingPiece), "pieces are taken by the tensor they belong to"
                if isinstance(item, Streamed) and num_bytes:
                    # Its pieces may wait for the room that is not given back yet, and it would wait for them.
                    self._flush()
                    num_bytes = 0
                try:
                    if isinstance(item, Streamed):
                        self._store_pieces(item)
                    elif self.failure is None:
                        self._put(item)
                    elif isinstance(item, Copied):
                        self._pinned.give_back(item.description.nbytes)
                except Exception as error:
                    self._fail(error)
                # A slot is given back when its bytes are in the file.
                if isinstance(item, (RingTensor, RingBlock, Copied)):
                    self._unflushed.append(item)
                    self._end = item.end
                    num_bytes += item.end - item.position
                    if num_bytes > _WRITE_BYTES:
                        self._flush()
                        num_bytes = 0
                elif isinstance(item, (Note, Commit)):
                    self._notes_end = max(self._notes_end, item.end)
                    if isinstance(item, Note):
                        self._unflushed.append(item)
            self._flush()

    def _store_pieces(self, item: Streamed) -> None:
        pieces = self._pieces()
        try:
            if self.failure is None:
                self._writer.store(item.description, item.step, item.rank, pieces, None)
        except _Cut:
            pass
        finally:
            for _ in pieces:
                pass

    def _pieces(self) -> Iterator[memoryview]:
        """Yield the pieces that follow in the queue; each is on disk, or dropped, when the next is asked for."""
        while True:
            while not self._queue:
                self._wake.wait()
            piece = self._queue.popleft()
            if not isinstance(piece, RingPiece):
                self._queue.appendleft(piece)  # a signal ends the process in the midst of it
                raise _Cut
            if not piece.num_bytes:
                if piece.cut:
                    raise _Cut
                return
            yield self._ring.bytes_at(piece.position, piece.num_bytes)
            if self.failure is None:
                shard, size = self._writer.place
                self.moved.note_piece(piece.position, piece.num_bytes, shard, size - piece.num_bytes)
                self._ring.release(piece.position + piece.num_bytes)
            elif not self.keeps:
                self._ring.release(piece.position + piece.num_bytes)

    def _flush(self) -> None:
        """Write what waits and give back its slots."""
        try:
            self._writer.flush()
        except Exception as error:
            self._fail(error)
        unflushed, self._unflushed = self._unflushed, []
        if self.failure is None:
            self.moved.note(unflushed, self._writer.open_steps)
        if self.keeps:
            return
        self._ring.release(self._end)
        self._notes.release(self._notes_end)

    def _fail(self, error: Exception) -> None:
        if self.failure is None:
            # Before the failure is seen: what a full disk has no room for is in the ring still.
            self.keeps = self._writer.failure is not None and self._ring.file is not None
            self.failure = error
            if not self.keeps:
                self._stop_ring()
            _log.warning("recording into %s has stopped, the model goes on: %s", self._path, error)

    def let_go(self) -> None:
        """Give all of the ring back after a failure: the model waits for room, and comes before what is in it."""
        if self.keeps:
            self.keeps = False
            self._stop_ring()
            self._ring.release_all()
            self._notes.release_all()

    def _stop_ring(self) -> None:
        if self._ring.file is not None:
            # What was given back without having been written is not to be recovered.
            self._ring.file.stop()

    def _put(self, item: RingTensor | RingBlock | Alias | Copied | LeftOut | Note | Commit) -> None:
        """Store or measure a tensor, several, or end a step; bytes in the ring must not change until the flush."""
        if isinstance(item, RingBlock):
            self._put_block(item)
        elif isinstance(item, RingTensor):
            self._put_stored(item)
        elif isinstance(item, Alias):
            self._put_alias(item)
        elif isinstance(item, Commit):
            self._writer.end_step(item.step, token_ids=item.token_ids, stopped=item.stopped)
        elif isinstance(item, LeftOut):
            self._writer.leave_out(item)
        elif isinstance(item, Copied):
            self._put_copied(item)

    def _put_block(self, item: RingBlock) -> None:
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

    def _measure(self, item: RingBlock, group: Group) -> None:
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
            if not isinstance(other, RingBlock) or other.position != behind or not other.goes_like(item):
                break
            if len(alike) >= most:
                break
            alike.append(other)
        data = self._ring.bytes_at(item.position, len(alike) * size)
        for block, table in zip(alike, light_of_blocks(data, len(alike), group.kinds, group.columns), strict=True):
            block.table = table

    def _put_stored(self, item: RingTensor) -> None:
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

    def _leave_out(self, item: RingTensor | Alias | Copied, reason: str, statistics: LightStatistics | None) -> None:
        site, dtype, shape = item.description.site, item.description.dtype, item.description.shape
        self._writer.leave_out(LeftOut(site, item.step, item.rank, reason, dtype, shape, statistics))
