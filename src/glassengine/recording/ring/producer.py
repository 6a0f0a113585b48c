"""The model's side of a recording: tensors are copied into the ring, and queued for the thread that writes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

from glassengine.recording.ring.block import OpenBlock
from glassengine.recording.ring.flag import Flag
from glassengine.recording.ring.items import Alias, Item, Passage, Piece, Seen, Stored
from glassengine.recording.ring.journal import Journal
from glassengine.recording.ring.repetition import Lesson, Repetition, learn
from glassengine.recording.ring.ring import Ring, require_memory

_BLOCK_BYTES = 1 << 20


class Producer:
    """Takes what lies on the CPU as its values; used under the lock of its writer.

    Args:
        ring: Where tensors are copied to.
        queue: Gets them.
        journal: Notes what the queue gets.
        most_bytes: Of the slot that is reserved for what comes as it did before.
        wake: Wakes the thread.
        on_wait: Called again and again while the ring is full; may raise.

    Attributes:
        repetition: What is expected to come as it did before, if anything is.
    """

    def __init__(
        self,
        ring: Ring,
        queue: deque[Item | Piece | Flag | None],
        journal: Journal,
        most_bytes: int,
        wake: Flag,
        on_wait: Callable[[], None],
    ) -> None:
        # Of these two one at most.
        self.repetition: Repetition | None = None
        self._block: OpenBlock | None = None
        self._ring = ring
        self._queue = queue
        self._journal = journal
        self._block_bytes = min(_BLOCK_BYTES, most_bytes)
        self._lesson = Lesson(most_bytes)
        self._wake = wake
        self._on_wait = on_wait
        # Address and size of large tensors -> what was last stored from there.
        self._recent: dict[tuple[int, int], Stored] = {}

    def put(self, seen: Seen, tensor: Tensor, what: tuple[int, int, bool, str | None]) -> None:
        """Take a contiguous tensor of the CPU.

        Args:
            seen: What is known of it.
            tensor: The tensor.
            what: Step, rank, whether nothing like it was seen before, and the reason for which it is only measured.

        Raises:
            UsageError: Its storage was freed, or never made.
        """
        step, rank, _, reason = what
        site = seen.description.site
        repetition = self.repetition
        if repetition is not None:
            if seen.sharding is None and repetition.has_reason(reason) and repetition.take(site, step, tensor, rank):
                return
            self._end_repetition(is_other=repetition.step == step and repetition.passage.rank == rank)
        passage = seen.sequel
        if isinstance(passage, Passage) and passage.rank == rank and passage.reasons[0] == reason:
            self.publish()
            position = self._ring.reserve(passage.nbytes, self._on_wait)
            self.wake_if_half_full()
            repetition = self.repetition = Repetition(passage, step, self._ring, position)
            if repetition.take(site, step, tensor, rank):
                return
            self._end_repetition(is_other=False)
        if seen.is_small:
            self._put_small(seen, tensor, what)
        else:
            self._put_large(seen, tensor, what)

    def _put_small(self, seen: Seen, tensor: Tensor, what: tuple[int, int, bool, str | None]) -> None:
        block = self._block
        if block is None or block.what != what or not block.has_room(seen):
            self.end_block()
            position = self._ring.reserve(self._block_bytes, self._on_wait)
            self.wake_if_half_full()
            block = self._block = OpenBlock(what, self._ring, position, position + self._block_bytes)
        block.put(seen, tensor)

    def _put_large(self, seen: Seen, tensor: Tensor, what: tuple[int, int, bool, str | None]) -> None:
        step, rank, is_new, reason = what
        nbytes, dtype, ring = seen.nbytes, seen.description.dtype, self._ring
        address = tensor.data_ptr()
        if not address:
            require_memory(tensor)
        self.end_block()
        # What one module returns another one is given: found by its address, proved by its bytes.
        original = self._recent.get((address, nbytes))
        if (
            original is not None
            and original.step == step
            and original.reason == reason
            and (reason is None or original.description.dtype == dtype)
            and ring.holds(original.position, address, nbytes)
        ):
            item: Alias | Stored = Alias(seen, step, rank, original)
        else:
            position = ring.reserve(nbytes, self._on_wait)
            ring.copy(position, address, nbytes)
            item = self._recent[address, nbytes] = Stored(seen, step, rank, position, reason)
        self._journal.note((item,))
        self._queue.append(item)
        self._lesson.add(item, is_new)
        self.wake_if_half_full()
        if self._journal.is_long:
            self._journal.write_parts()

    def wake_if_half_full(self) -> None:
        """Wake the thread where it should not wait for the end of the step."""
        if 2 * self._ring.in_use > self._ring.num_bytes:
            self._wake.set()

    def publish(self) -> None:
        """Hand to the thread what is held back; what comes next is not learned with it."""
        self.end_block()
        if self.repetition is not None:
            self._end_repetition(is_other=False)
        self._lesson.end()

    def end_step(self) -> None:
        """Hand to the thread what is held back: the step is through."""
        self.publish()
        self._recent.clear()

    def end_block(self) -> None:
        """Hand over the small tensors that have come."""
        block = self._block
        if block is None:
            return
        item = block.finish()
        items = [item] if item.known else []
        self._journal.note(items)
        # An interruption comes before these two or behind them, so that nothing is lost and nothing comes twice.
        self._block = None
        self._queue.extend(items)
        self._ring.shorten(block.limit, item.end)
        if items:
            self._lesson.add(item, block.what[2])

    def _end_repetition(self, *, is_other: bool) -> None:
        """Hand over what has come; `is_other` if something else came next, which is to be expected from now on."""
        repetition = self.repetition
        assert repetition is not None
        end, items, addresses = repetition.end()
        self._journal.note(items)
        self.repetition = None  # as in `end_block`
        self._queue.extend(items)
        self._ring.shorten(repetition.position + repetition.passage.nbytes, end)
        for item, address in zip(items, addresses, strict=True):
            if isinstance(item, Stored):
                self._recent[address, item.seen.nbytes] = item
        # Nothing came where the first copy was interrupted.
        if items and is_other and not repetition.is_over:
            learn(items)
