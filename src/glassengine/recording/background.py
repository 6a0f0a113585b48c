"""Records while a model runs: a copy into a ring is all the model waits for, a thread does the rest.

Pipeline: `write` copies the values into the ring; the thread computes the checksum, writes, and gives the slot back;
`commit` is queued behind the tensors of its step. When the ring is full `write` waits, so memory is always
bounded. What goes wrong on disk never reaches the model: the thread stops writing, goes on emptying the ring,
and `close` raises.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Unpack

from torch import Tensor

from glassengine import blocks
from glassengine.errors import GlassError
from glassengine.recording.layout import layout
from glassengine.recording.layout.description import Facts
from glassengine.recording.layout.layout import LeftOut
from glassengine.recording.recovery import num_left, with_left
from glassengine.recording.ring.file import ring_file
from glassengine.recording.ring.items import (
    Commit,
    Copied,
    EarlierTensor,
    Item,
    RingBlock,
    RingPiece,
    RingTensor,
    Streamed,
)
from glassengine.recording.ring.journal import Journal
from glassengine.recording.ring.producer import MIN_SHARED_BYTES, Producer, SeenTensors
from glassengine.recording.ring.ring import Flag, PinnedCopies, Ring, lies_flat, pieces_of, require_memory
from glassengine.recording.write.consumer import Consumer
from glassengine.recording.write.writer import new_writer

RING_BYTES = 256 << 20

# A tensor larger than this part of the ring passes through it in pieces.
_PIECES_OF_RING = 4
# The thread is woken by the end of a step, but not this soon again, and when half of the ring is in use: woken for
# every tensor it would fight with the model for the interpreter. It looks by itself as well, for the last steps.
_PERIOD_S = 0.02
# What is noted of the steps takes so much less than their tensors do.
_JOURNALS_OF_RING = 8
# A signal that ends the process waits so long for a thread that copies.
_END_S = 5.0
# Mapped before anything is recorded. Of a file, more of it would take longer than it saves.
_WARM_BYTES = 4 << 20

_log = logging.getLogger(__name__)


class BackgroundWriter:
    """Writes a recording from a thread of its own; every method may be called from any thread.

    Args:
        path: Directory of the recording.
        metadata: As for `RecordingWriter`; may change until `close`.
        overwrite: Replace an existing recording.
        ring_bytes: Memory between the model and the disk, at least 512 KiB.
        durable: Keep that memory in a file, and note there what it has of each step that ends.
        spool_bytes: What may wait on this machine where the recording goes to a store; 4 GiB where None.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        metadata: Mapping[str, Any],
        overwrite: bool = False,
        ring_bytes: int = RING_BYTES,
        durable: bool = True,
        spool_bytes: int | None = None,
    ) -> None:
        assert ring_bytes >= 2 * _PIECES_OF_RING * MIN_SHARED_BYTES, "a block would not hold a small tensor"
        self._writer = new_writer(path, metadata=metadata, overwrite=overwrite, spool_bytes=spool_bytes)
        try:
            # Takes longest, and is interrupted most: nothing is on disk yet.
            sizes = ring_bytes, ring_bytes // _JOURNALS_OF_RING
            file = ring_file(self._writer.path, sizes) if durable else None
            self._ring, self._notes = (Ring(size, file, part) for part, size in enumerate(sizes))
            self._ring.warm(_WARM_BYTES)
        except BaseException:
            self._writer.close("it never began")
            (self._writer.path / layout.RING).unlink(missing_ok=True)
            self._writer.deliver(0)
            raise
        self._pinned = PinnedCopies(ring_bytes)
        self._seen = SeenTensors()
        self._most_bytes = ring_bytes // _PIECES_OF_RING
        # A handler of a signal may write what is left, and may run while its thread writes.
        self._lock = threading.RLock()
        self._queue: deque[Item | RingPiece | Flag | None] = deque()
        self._wake = Flag()
        self._consumer = Consumer(self._writer, self._ring, self._pinned, self._notes, self._queue, self._wake)
        self._journal = Journal(self._notes, self._queue, self._on_wait)
        self._producer = Producer(
            self._lock, self._ring, self._queue, self._journal, self._most_bytes // 2, self._wake, self._on_wait
        )
        self.take_repeat = self._producer.take_repeat
        self._thread = threading.Thread(target=self._consumer.work, name="glassengine-recording", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._queue.append(None)  # it may have begun
            self._wake.set()
            self._remove_ring()
            self._writer.close("it never began")
            self._writer.deliver(0)
            raise
        self.was_forked = False
        # Steps whose forward has ended and that go on, and what they were given.
        self._held: dict[int, Sequence[Sequence[int]]] = {}
        end_with_process(self)

    @property
    def path(self) -> Path:
        """Where the recording is to be read."""
        return self._writer.target

    @property
    def is_behind(self) -> bool:
        """Whether a store takes less than is recorded."""
        return self._writer.is_behind

    @property
    def metadata(self) -> dict[str, Any]:
        """Facts about the recording; stored by `close`."""
        return self._writer.metadata

    @property
    def failure(self) -> Exception | None:
        """What stopped the writing, if anything did."""
        return self._consumer.failure

    def write(self, site: str, step: int, tensor: Tensor, *, rank: int = 0, **facts: Unpack[Facts]) -> None:
        """Take the values of `tensor` as they are now; the arguments are those of `RecordingWriter.write`."""
        seen, is_new = self._seen.look(site, tensor, **facts)
        if self._consumer.failure is None:
            self._take(seen, step, tensor, rank, is_new, None)

    def measure(self, site: str, step: int, tensor: Tensor, *, rank: int, reason: str) -> bool:
        """Take note of a tensor whose values are not recorded, for `reason`; the thread adds light statistics.

        Returns whether it does: not of rare dtypes, nor of what would have to pass through the ring in pieces.
        """
        seen, _ = self._seen.look(site, tensor)
        if not seen.is_measured or not 0 < seen.nbytes <= self._most_bytes:
            return False
        if self._consumer.failure is None:
            self._take(seen, step, tensor, rank, False, reason)
        return True

    def _take(
        self, seen: EarlierTensor, step: int, tensor: Tensor, rank: int, is_new: bool, reason: str | None
    ) -> None:
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
                copied = Copied(description, step, rank, data, ready, reason, ring.reserve(1, self._on_wait))
                self._journal.note((copied,))
                self._queue.append(copied)
            return
        with self._lock:
            self._producer.publish()
            if nbytes > self._most_bytes:
                self._stream(Streamed(description, step, rank), tensor)
                return
            position = ring.reserve(nbytes, self._on_wait)
            ring.fill_from(position, tensor, nbytes)
            item: RingBlock | RingTensor = RingTensor(seen, step, rank, position, reason)
            if seen.is_small:
                item = RingBlock((seen,), (description,), (), step, rank, position, position + nbytes, reason)
            self._journal.note((item,))
            self._queue.append(item)
        self._producer.wake_if_half_full()

    def leave_out(self, item: LeftOut) -> None:
        """Note a tensor whose values are not recorded."""
        if self._consumer.failure is not None:
            return
        with self._lock:
            self._journal.note((item,))
            self._queue.append(item)

    def hold(self, step: int, *, token_ids: Sequence[Sequence[int]] = ()) -> None:
        """Note that the forward of `step` has ended, and that the step goes on: it survives the process as stopped."""
        self._held[step] = token_ids or self._held.get(step, ())
        if self._ring.file is not None and self._consumer.failure is None:
            with self._lock:
                self._producer.publish()
                self._journal.hold(step, token_ids)

    def commit(self, step: int, *, token_ids: Sequence[Sequence[int]] = (), stopped: str | None = None) -> None:
        """Complete `step` once all that was written before is on disk; see `RecordingWriter.commit`."""
        with self._lock:
            self._held.pop(step, None)
            self._producer.end_step()
            place = (0, 0) if self._consumer.failure is not None else self._journal.end(step, token_ids, stopped)
            self._queue.append(Commit(step, token_ids, stopped, *place))
            self._consumer.has_ended = True
        if time.monotonic() - self._consumer.woken > _PERIOD_S:
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

    def close(self, reason: str | None = None, *, patience_s: float | None = None) -> None:
        """Write what is left and seal the recording; one that goes to a store is there then.

        Args:
            reason: Why it is incomplete, if it is.
            patience_s: How long a store may not answer; ten minutes where None.
        """
        if self.was_forked:
            return
        stop_ending_with_process(self)
        if patience_s is not None:
            self._writer.hurry(patience_s)
        with self._lock:
            self._producer.publish()
            self._queue.append(None)
        self._wake.set()
        self._thread.join()
        if self._consumer.failure is None and self._queue:
            self._consumer.failure = self._died()
        if self._consumer.failure is not None:
            stopped = f"stopped by {type(self._consumer.failure).__name__}"
            reason = self._consumer.failure.got if isinstance(self._consumer.failure, GlassError) else stopped
        try:
            self._writer.close(reason)
        finally:
            left = self._leave_steps() if self._consumer.keeps else 0
            self._remove_ring(is_left=left != 0)
            if (problem := self._writer.deliver(patience_s)) is not None:
                _log.warning("%s", problem)
        if self._consumer.failure is not None:
            raise with_left(self._consumer.failure, left)
        if problem is not None:
            raise problem

    def end(self, reason: str) -> None:
        """Close the recording, if that can be done now: a signal ends the process.

        It may have interrupted this writer, which does not go on from there; another thread may be at work in it.
        """
        if self._lock.acquire(timeout=_END_S):
            for step, token_ids in sorted(self._held.items()):
                self.commit(step, token_ids=token_ids, stopped=reason.removeprefix("stopped by "))
            self.close(reason, patience_s=_END_S)

    def leave_to_parent(self) -> None:
        """Forget the files: this process was forked from the one that records."""
        self.was_forked = True
        self._consumer.failure = GlassError("a process that was forked does not record")
        self._producer.repetition = None
        self._ring.leave_file()
        self._notes.leave_file()
        self._consumer.moved.close()
        self._writer.abandon()

    def _leave_steps(self) -> int | None:
        """Leave the steps that only the ring has to the next opening of the recording; return how many, if known."""
        assert self._ring.file is not None
        self._ring.file.leave()
        return num_left(self._writer.path)

    def _remove_ring(self, *, is_left: bool = False) -> None:
        self._ring.give_back()
        self._notes.give_back()
        if is_left:
            self._consumer.moved.close()
            return
        try:
            if self._ring.file is not None:
                self._ring.file.remove()
            self._consumer.moved.remove()
        except OSError as error:
            _log.warning("a file of %s cannot be removed: %s", self.path, error)

    def _stream(self, item: Streamed, tensor: Tensor) -> None:
        most = self._most_bytes // blocks.BLOCK_ELEMENTS * blocks.BLOCK_ELEMENTS
        self._queue.append(item)
        last = RingPiece(0, 0, cut=True)
        try:
            for piece in pieces_of(tensor, most // tensor.element_size()):
                nbytes = piece.numel() * piece.element_size()
                position = self._ring.reserve(nbytes, self._on_wait)
                self._ring.fill_from(position, piece, nbytes)
                item.pieces.append((position, nbytes))
                self._queue.append(RingPiece(position, nbytes))
                self._wake.set()
            last.cut = False
            self._journal.note((item,))
        finally:
            self._queue.append(last)
            self._wake.set()

    def _on_wait_unlocked(self) -> None:
        with self._lock:
            self._on_wait()

    def _on_wait(self) -> None:
        self._producer.end_block()
        self._wake.set()
        if self._consumer.failure is not None:
            self._consumer.let_go()
        if not self._thread.is_alive():
            raise self._died()

    def _died(self) -> GlassError:
        return GlassError("the recording cannot continue", got="its thread has ended")


class _Writer(Protocol):
    def leave_to_parent(self) -> None:
        """Forget the files: this process was forked from the one that records."""

    def end(self, reason: str) -> None:
        """Bring what was recorded to disk: the process ends."""


_writers: weakref.WeakSet[_Writer] = weakref.WeakSet()


def end_with_process(writer: _Writer) -> None:
    """Look after a writer until it is `forgotten`."""
    _writers.add(writer)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)


def stop_ending_with_process(writer: _Writer) -> None:
    """Look after a writer no more."""
    _writers.discard(writer)
    # If another handler has been put in front, ours stays behind it and does nothing.
    if (
        not _writers
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is _terminated
    ):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminated(number: int, _frame: object) -> None:
    """End the recordings, and then the process as the signal would have."""
    signal.signal(number, signal.SIG_DFL)
    for writer in list(_writers):
        try:
            writer.end(f"stopped by {signal.Signals(number).name}")
        except Exception as error:
            _log.warning("not everything was recorded: %s", error)
    os.kill(os.getpid(), number)


def _forked() -> None:
    for writer in list(_writers):
        _writers.discard(writer)
        writer.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
