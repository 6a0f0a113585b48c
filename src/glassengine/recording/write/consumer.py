"""The thread that brings a recording to disk: takes what is queued, writes it, and gives its room in the ring back."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator

from glassengine.recording.ring.flag import Flag
from glassengine.recording.ring.items import Block, Commit, Copied, Item, Note, Piece, Stored, Streamed
from glassengine.recording.ring.pinned import PinnedCopies
from glassengine.recording.ring.ring import Ring
from glassengine.recording.write.drain import Drain
from glassengine.recording.write.moved import Movable, MovedLog
from glassengine.recording.write.writer import RecordingWriter

_LOOK_S = 0.1
# Written at once; what a disk has no room for any more takes the steps of one such batch with it.
_WRITE_BYTES = 4 << 20

_log = logging.getLogger(__name__)


class _Cut(Exception):
    """A tensor whose copying was interrupted."""


class Consumer:
    """What the thread does; ends when it takes None from the queue.

    Args:
        writer: Gets what is taken.
        ring: Where the bytes of tensors of the CPU are.
        pinned: Where copies from accelerators are given back.
        notes: Has the journal.
        queue: Of what to write.
        wake: Wakes the thread.

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
        queue: deque[Item | Piece | Flag | None],
        wake: Flag,
    ) -> None:
        self.failure: Exception | None = None
        self.has_ended = False
        self.woken = 0.0
        self.keeps = False
        self.moved = MovedLog(writer.path, ring, notes)
        self._path = writer.path
        self._writer = writer
        self._ring = ring
        self._notes = notes
        self._pinned = pinned
        self._queue = queue
        self._wake = wake
        self._drain = Drain(writer, ring, pinned, queue)
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
                assert not isinstance(item, Piece), "pieces are taken by the tensor they belong to"
                if isinstance(item, Streamed) and num_bytes:
                    # Its pieces may wait for the room that is not given back yet, and it would wait for them.
                    self._flush()
                    num_bytes = 0
                try:
                    self._handle(item)
                except Exception as error:
                    self._fail(error)
                # A slot is given back when its bytes are in the file.
                if isinstance(item, (Stored, Block, Copied)):
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

    def _handle(self, item: Item) -> None:
        if isinstance(item, Streamed):
            self._store_pieces(item)
        elif self.failure is None:
            self._drain.put(item)
        elif isinstance(item, Copied):
            self._pinned.give_back(item.description.nbytes)

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
            if not isinstance(piece, Piece):
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
