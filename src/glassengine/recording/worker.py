"""Records while a model runs: a copy into a ring is all the model waits for, a thread does the rest.

Pipeline: `write` copies the values into the ring; the thread computes the checksum, writes, and gives the slot back;
`commit` is queued behind the tensors of its step. When the ring is full `write` waits, so memory is bounded whatever
the model does. What goes wrong on disk never reaches the model: the thread stops writing, goes on emptying the ring,
and `close` raises.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from glassengine import blocks
from glassengine.errors import GlassError
from glassengine.recording.drain import Drain
from glassengine.recording.flag import Flag
from glassengine.recording.items import Block, Commit, Copied, Item, Piece, Stored, Streamed
from glassengine.recording.layout import LeftOut, Sharding
from glassengine.recording.pinned import PinnedCopies
from glassengine.recording.producer import Producer
from glassengine.recording.ring import Ring, lies_flat, pieces_of, require_memory
from glassengine.recording.seen import MIN_SHARED_BYTES, Seen, SeenTensors
from glassengine.recording.writer import RecordingWriter

RING_BYTES = 256 << 20

# A tensor larger than this part of the ring passes through it in pieces.
_PIECES_OF_RING = 4
# The thread is woken by the end of a step, but not this soon again, and when half of the ring is in use: woken for
# every tensor it would fight with the model for the interpreter. It looks by itself as well, for the last steps.
_PERIOD_S = 0.02
_LOOK_S = 0.1
# Written at once; what a disk has no room for any more takes the steps of one such batch with it.
_WRITE_BYTES = 4 << 20

_log = logging.getLogger(__name__)


class _Cut(Exception):
    """A tensor whose copying was interrupted."""


class BackgroundWriter:
    """Writes a recording from a thread of its own; every method may be called from any thread.

    Args:
        path: Directory of the recording.
        metadata: As for `RecordingWriter`; may change until `close`.
        overwrite: Replace a recording that exists.
        ring_bytes: Memory between the model and the disk, at least 512 KiB.

    Raises:
        UsageError: The directory cannot be written, or exists and `overwrite` is false, or holds other files.
    """

    def __init__(
        self, path: str | Path, *, metadata: Mapping[str, Any], overwrite: bool = False, ring_bytes: int = RING_BYTES
    ) -> None:
        assert ring_bytes >= 2 * _PIECES_OF_RING * MIN_SHARED_BYTES, "a block would not hold a small tensor"
        # Takes longest, and is interrupted most: nothing is on disk yet.
        self._ring = Ring(ring_bytes)
        self._ring.warm()
        self._writer = RecordingWriter(path, metadata=metadata, overwrite=overwrite)
        self._pinned = PinnedCopies(ring_bytes)
        self._seen = SeenTensors()
        self._most_bytes = ring_bytes // _PIECES_OF_RING
        self._lock = threading.Lock()
        self._queue: deque[Item | Piece | Flag | None] = deque()
        self._drain = Drain(self._writer, self._ring, self._pinned, self._queue)
        self._wake = Flag()
        self._producer = Producer(self._ring, self._queue, self._most_bytes // 2, self._wake, self._on_wait)
        self._woken = 0.0
        # Whether a step has ended since the thread looked.
        self._has_ended = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="glassengine-recording", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._queue.append(None)  # it may have begun
            self._wake.set()
            self._writer.close("it never began")
            raise

    @property
    def path(self) -> Path:
        """Directory of the recording."""
        return self._writer.path

    @property
    def metadata(self) -> dict[str, Any]:
        """Facts about the recording; stored by `close`."""
        return self._writer.metadata

    @property
    def failure(self) -> Exception | None:
        """What stopped the writing, if anything did."""
        return self._failure

    def again(self, site: str, step: int, tensor: Tensor, rank: int) -> bool:
        """Take the tensor as in an earlier step, written or measured, if the one before it was followed by it there."""
        with self._lock:
            repetition = self._producer.repetition
            return repetition is not None and repetition.take(site, step, tensor, rank)

    def write(
        self,
        site: str,
        step: int,
        tensor: Tensor,
        *,
        rank: int = 0,
        axes: Mapping[str, int] | None = None,
        node: str | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        """Take the values of `tensor` as they are now; the arguments are those of `RecordingWriter.write`.

        Raises:
            UsageError: The tensor or its name cannot be recorded.
        """
        seen, is_new = self._seen.look(site, tensor, axes, node, sharding)
        if self._failure is None:
            self._take(seen, step, tensor, rank, is_new, None)

    def measure(self, site: str, step: int, tensor: Tensor, *, rank: int, reason: str) -> bool:
        """Take note of a tensor whose values are not recorded, for `reason`; the thread adds light statistics.

        Returns whether it does: not of rare dtypes, nor of what would have to pass through the ring in pieces.

        Raises:
            UsageError: The tensor or its name cannot be recorded.
        """
        seen, _ = self._seen.look(site, tensor)
        if not seen.is_measured or not 0 < seen.nbytes <= self._most_bytes:
            return False
        if self._failure is None:
            self._take(seen, step, tensor, rank, False, reason)
        return True

    def _take(self, seen: Seen, step: int, tensor: Tensor, rank: int, is_new: bool, reason: str | None) -> None:
        description, nbytes, ring = seen.description, seen.nbytes, self._ring
        if seen.is_simple and nbytes <= self._most_bytes and lies_flat(tensor):
            with self._lock:
                self._producer.put(seen, tensor, (step, rank, is_new, reason))
            return
        require_memory(tensor)
        if nbytes and not tensor.is_cpu and self._pinned.takes(tensor):
            data, ready = self._pinned.take(tensor, nbytes, self._on_wait_unlocked)
            with self._lock:
                self._producer.publish()
                self._queue.append(Copied(description, step, rank, data, ready, reason))
            return
        with self._lock:
            self._producer.publish()
            if nbytes > self._most_bytes:
                self._stream(Streamed(description, step, rank), tensor)
                return
            position = ring.reserve(nbytes, self._on_wait)
            ring.fill_from(position, tensor, nbytes)
            if seen.is_small:
                known, end = (seen,), position + nbytes
                self._queue.append(Block(known, (description,), (), step, rank, position, end, reason))
            else:
                self._queue.append(Stored(seen, step, rank, position, reason))
        self._producer.wake_if_half_full()

    def leave_out(self, item: LeftOut) -> None:
        """Note a tensor whose values are not recorded."""
        self._queue.append(item)

    def commit(self, step: int, *, token_ids: Sequence[Sequence[int]] = (), stopped: str | None = None) -> None:
        """Complete `step` once all that was written before is on disk; see `RecordingWriter.commit`."""
        with self._lock:
            self._producer.end_step()
            self._queue.append(Commit(step, token_ids, stopped))
            self._has_ended = True
        if time.monotonic() - self._woken > _PERIOD_S:
            self._wake.set()

    def wait(self) -> None:
        """Wait until all that was given so far is in the file, or has failed to get there."""
        done = Flag()
        with self._lock:
            self._producer.publish()
            self._queue.append(done)
        self._wake.set()
        while not done.wait(0.5) and self._thread.is_alive():
            pass

    def close(self, reason: str | None = None) -> None:
        """Write what is left and seal the recording.

        Args:
            reason: Why it is incomplete, if it is.

        Raises:
            GlassError: Something could not be written; the message says what is safe.
        """
        with self._lock:
            self._producer.publish()
            self._queue.append(None)
        self._wake.set()
        self._thread.join()
        self._ring.give_back()
        if self._failure is None and self._queue:
            self._failure = self._died()
        if self._failure is not None:
            stopped = f"stopped by {type(self._failure).__name__}"
            reason = self._failure.got if isinstance(self._failure, GlassError) else stopped
        self._writer.close(reason)
        if self._failure is not None:
            raise self._failure

    def _stream(self, item: Streamed, tensor: Tensor) -> None:
        most = self._most_bytes // blocks.BLOCK_ELEMENTS * blocks.BLOCK_ELEMENTS
        self._queue.append(item)
        last = Piece(0, 0, cut=True)
        try:
            for piece in pieces_of(tensor, most // tensor.element_size()):
                nbytes = piece.numel() * piece.element_size()
                position = self._ring.reserve(nbytes, self._on_wait)
                self._ring.fill_from(position, piece, nbytes)
                self._queue.append(Piece(position, nbytes))
                self._wake.set()
            last.cut = False
        finally:
            self._queue.append(last)
            self._wake.set()

    def _on_wait_unlocked(self) -> None:
        with self._lock:
            self._on_wait()

    def _on_wait(self) -> None:
        self._producer.end_block()
        self._wake.set()
        if not self._thread.is_alive():
            raise self._died()

    def _died(self) -> GlassError:
        return GlassError("the recording cannot go on", got="its thread has ended")

    # What follows runs in the thread.

    def _work(self) -> None:
        while True:
            if not self._wake.wait(_LOOK_S) and not self._has_ended:
                continue  # nothing that is not in an ended step would be kept: leave the model alone
            self._has_ended = False
            self._woken = time.monotonic()
            end = num_bytes = 0
            while self._queue:
                item = self._queue.popleft()
                if item is None:
                    self._flush(end)
                    return
                if isinstance(item, Flag):
                    self._flush(end)
                    item.set()
                    continue
                assert not isinstance(item, Piece), "pieces are taken by the tensor they belong to"
                if isinstance(item, Streamed) and num_bytes:
                    # Its pieces may wait for the room that is not given back yet, and it would wait for them.
                    self._flush(end)
                    num_bytes = 0
                try:
                    self._handle(item)
                except Exception as error:
                    self._fail(error)
                # A slot is given back when its bytes are in the file.
                if isinstance(item, (Stored, Block)):
                    start, end = item.position, item.end
                    num_bytes += end - start
                    if num_bytes > _WRITE_BYTES:
                        self._flush(end)
                        num_bytes = 0
            self._flush(end)

    def _handle(self, item: Item) -> None:
        if isinstance(item, Streamed):
            self._store_pieces(item)
        elif self._failure is None:
            self._drain.put(item)
        elif isinstance(item, Copied):
            self._pinned.give_back(item.description.nbytes)

    def _store_pieces(self, item: Streamed) -> None:
        pieces = self._pieces()
        try:
            if self._failure is None:
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
            assert isinstance(piece, Piece)
            if not piece.num_bytes:
                if piece.cut:
                    raise _Cut
                return
            yield self._ring.bytes_at(piece.position, piece.num_bytes)
            self._ring.release(piece.position + piece.num_bytes)

    def _flush(self, end: int) -> None:
        """Write what waits and give back the slots up to position `end`."""
        try:
            self._writer.flush()
        except Exception as error:
            self._fail(error)
        self._ring.release(end)

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
            _log.warning("recording into %s has stopped, the model goes on: %s", self.path, error)
