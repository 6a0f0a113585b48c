"""The model's side of a recording: tensors are copied into the ring, and queued for the thread that writes them.

Most tensors of a step are like those of an earlier one, and need no second look. A step that begins like an earlier one
expects the rest of it too, and has nothing to look up as long as that comes: each tensor is copied to a place that is
known already, or compared with the one that it was equal to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Unpack

import torch
from torch import Tensor

from glassengine.recording.layout.description import Facts
from glassengine.recording.layout.layout import Sharding, aligned
from glassengine.recording.layout.tensors import MEASURED, describe
from glassengine.recording.ring.items import (
    Alias,
    EarlierTensor,
    Item,
    Passage,
    Repeated,
    RingBlock,
    RingPiece,
    RingTensor,
)
from glassengine.recording.ring.journal import Journal
from glassengine.recording.ring.ring import MEMCMP, MEMMOVE, Flag, Ring, require_memory

_BLOCK_BYTES = 1 << 20


class Producer:
    """Takes what lies on the CPU as its values; used under the lock of its writer.

    Args:
        lock: That of the writer, which `take_repeat` takes itself.

    Attributes:
        repetition: What is expected to come as it did before, if anything is.
    """

    def __init__(
        self,
        lock: AbstractContextManager[bool],
        ring: Ring,
        queue: deque[Item | RingPiece | Flag | None],
        journal: Journal,
        most_bytes: int,
        wake: Flag,
        on_wait: Callable[[], None],
    ) -> None:
        # Of these two one at most.
        self.repetition: Repetition | None = None
        self._block: OpenBlock | None = None
        self._lock = lock
        self._ring = ring
        self._queue = queue
        self._journal = journal
        self._block_bytes = min(_BLOCK_BYTES, most_bytes)
        self._template = StepTemplate(most_bytes)
        self._wake = wake
        self._on_wait = on_wait
        # Address and size of large tensors -> what was last stored from there.
        self._recent: dict[tuple[int, int], RingTensor] = {}

    def take_repeat(self, site: str, step: int, tensor: Tensor, rank: int) -> bool:
        """Take the tensor as in an earlier step, written or measured, if it is the one that is expected next.

        What is interrupted in here leaves the repetition as it was. Runs for nearly all tensors: one call does it all.
        """
        with self._lock:
            repetition = self.repetition
            if repetition is None:
                return False
            addresses, expected_next = repetition.addresses, repetition.expected
            if len(addresses) == len(expected_next):
                return False
            expected, size, dtype, nbytes, start, original = expected_next[len(addresses)]
            if (
                expected == site
                and step == repetition.step
                and size == tensor.shape
                and dtype is tensor.dtype
                and rank == repetition.passage.rank
                # Attributes only: methods of torch that compute let go of the interpreter lock.
                and tensor.is_cpu
                and tensor.layout is _STRIDED
                and tensor.is_contiguous()
            ):
                address = tensor.data_ptr()
                if original < 0:
                    if address:
                        MEMMOVE(repetition.address + start, address, nbytes)
                        addresses.append(address)
                        return True
                elif addresses[original] == address and not MEMCMP(repetition.address + start, address, nbytes):
                    addresses.append(address)
                    return True
            return False

    def put(self, seen: EarlierTensor, tensor: Tensor, what: tuple[int, int, bool, str | None]) -> None:
        """Take a contiguous tensor of the CPU.

        Args:
            seen: What is known of it.
            tensor: The tensor.
            what: Step, rank, whether nothing like it was seen before, and the reason for which it is only measured.
        """
        step, rank, _, reason = what
        site = seen.description.site
        repetition = self.repetition
        if repetition is not None:
            if seen.sharding is None and repetition.has_reason(reason) and self.take_repeat(site, step, tensor, rank):
                return
            self._end_repetition(is_other=repetition.step == step and repetition.passage.rank == rank)
        passage = seen.sequel
        if isinstance(passage, Passage) and passage.rank == rank and passage.reasons[0] == reason:
            self.publish()
            position = self._ring.reserve(passage.nbytes, self._on_wait)
            self.wake_if_half_full()
            repetition = self.repetition = Repetition(passage, step, self._ring, position)
            if self.take_repeat(site, step, tensor, rank):
                return
            self._end_repetition(is_other=False)
        if seen.is_small:
            self._put_small(seen, tensor, what)
        else:
            self._put_large(seen, tensor, what)

    def _put_small(self, seen: EarlierTensor, tensor: Tensor, what: tuple[int, int, bool, str | None]) -> None:
        block = self._block
        if block is None or block.what != what or not block.has_room(seen):
            self.end_block()
            position = self._ring.reserve(self._block_bytes, self._on_wait)
            self.wake_if_half_full()
            block = self._block = OpenBlock(what, self._ring, position, position + self._block_bytes)
        block.put(seen, tensor)

    def _put_large(self, seen: EarlierTensor, tensor: Tensor, what: tuple[int, int, bool, str | None]) -> None:
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
            item: Alias | RingTensor = Alias(seen, step, rank, original)
        else:
            position = ring.reserve(nbytes, self._on_wait)
            ring.copy(position, address, nbytes)
            item = self._recent[address, nbytes] = RingTensor(seen, step, rank, position, reason)
        self._journal.note((item,))
        self._queue.append(item)
        self._template.add(item, is_new)
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
        self._template.end()

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
            self._template.add(item, block.what[2])

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
            if isinstance(item, RingTensor):
                self._recent[address, item.seen.nbytes] = item
        # Nothing came where the first copy was interrupted.
        if items and is_other and not repetition.is_over:
            record_template(items)


_HEADER_BYTES = 1 << 16
_NOWHERE = (0, 0, 0, "")


class OpenBlock:
    """A block that is being filled; used under the lock of its writer.

    What is interrupted in here leaves the block as it was: attributes are set last, and nothing is called in between.

    Args:
        what: What the tensors have in common: step, rank, whether they were seen for the first time (what differs from
            step to step is kept apart from what does not, so that the descriptions of blocks repeat), and the reason
            for which they are only measured and not written, or None.
        ring: Where they are copied to.
        position: Of the slot that is reserved for them.
        limit: Where it ends.
    """

    def __init__(self, what: tuple[int, int, bool, str | None], ring: Ring, position: int, limit: int) -> None:
        self.what = what
        self.limit = limit
        self._position = self._end = self._next = position
        self._ring = ring
        self._header_room = _HEADER_BYTES
        self._known: list[EarlierTensor] = []
        self._same_as: list[tuple[int, int]] = []
        # By address, which tensor was last copied from there: its index, position, size and dtype name.
        self._places: dict[int, tuple[int, int, int, str]] = {}

    def has_room(self, seen: EarlierTensor) -> bool:
        """Return whether a tensor can be the next one; where there is room in the header, so is there in a group."""
        return self._next + seen.room <= self.limit and self._header_room > 0

    def put(self, seen: EarlierTensor, tensor: Tensor) -> None:
        """Append a contiguous tensor of the CPU."""
        address, nbytes, dtype = tensor.data_ptr(), seen.nbytes, seen.description.dtype
        room = self._header_room - seen.description.most_header_bytes
        # What one module returns another one is given: found by its address, proved by its bytes. Those of another
        # dtype have other statistics.
        index, copied, size, kind = self._places.get(address, _NOWHERE)
        is_same = size == nbytes and (kind == dtype or self.what[3] is None)
        if is_same and self._ring.has(copied, address, nbytes):
            room -= self._known[index].description.most_header_bytes
            self._same_as += ((len(self._known), index),)
            self._known += (seen,)
            self._header_room = room
            return
        if not address:
            require_memory(tensor)
        position = self._next
        self._ring.copy(position, address, nbytes)
        self._places[address] = (len(self._known), position, nbytes, dtype)
        self._known += (seen,)
        self._header_room = room
        self._end = position + nbytes
        self._next = position + seen.room

    def finish(self) -> RingBlock:
        """Return the block."""
        step, rank, _, reason = self.what
        descriptions = tuple(seen.description for seen in self._known)
        known, same_as = tuple(self._known), tuple(self._same_as)
        return RingBlock(known, descriptions, same_as, step, rank, self._position, self._end, reason)


# Smaller tensors are written in blocks, and stored again rather than searched for.
MIN_SHARED_BYTES = 1 << 16
_MAX_SEEN = 1 << 14
_MAX_TENSORS = 512
_STRIDED = torch.strided


class SeenTensors:
    """The descriptions of tensors, by site, dtype, shape and sharding; of a limited number of them."""

    def __init__(self) -> None:
        self.all: dict[tuple[str, torch.dtype, torch.Size, Sharding | None], EarlierTensor] = {}
        # Of each site the last one.
        self.last: dict[str, EarlierTensor] = {}

    def look(self, site: str, tensor: Tensor, **facts: Unpack[Facts]) -> tuple[EarlierTensor, bool]:
        """Return what is known of such a tensor, and whether nothing was."""
        seen, sharding = self.last.get(site), facts.get("sharding")
        strided = tensor.layout is torch.strided
        if (
            seen is not None
            and seen.size == tensor.shape
            and seen.dtype is tensor.dtype
            and strided
            and seen.sharding == sharding
        ):
            return seen, False
        key = (site, tensor.dtype, tensor.shape, sharding)
        seen = self.all.get(key)
        is_new = seen is None
        if seen is None or not strided:
            description = describe(site, tensor, **facts)
            if len(self.all) >= _MAX_SEEN:
                self.all.clear()  # a cache that grows has another shape in every step
                self.last.clear()
            nbytes = description.nbytes
            seen = self.all[key] = EarlierTensor(
                description,
                tensor.dtype,
                tensor.shape,
                nbytes,
                room=aligned(nbytes),
                is_small=0 < nbytes < MIN_SHARED_BYTES,
                # A single element may be one that is to be negated when it is read.
                is_simple=not tensor.dtype.is_complex and nbytes > tensor.itemsize,
                is_measured=description.dtype in MEASURED,
                sharding=sharding,
            )
        self.last[site] = seen
        return seen, is_new


class Repetition:
    """A passage that comes again; used under the lock of its writer."""

    __slots__ = ("address", "addresses", "expected", "passage", "position", "step")

    def __init__(self, passage: Passage, step: int, ring: Ring, position: int) -> None:
        self.passage = passage
        self.step = step
        self.position = position
        self.expected = passage.expected
        self.address = ring.address_of(position)
        # Of the tensors that came as expected.
        self.addresses: list[int] = []

    def has_reason(self, reason: str | None) -> bool:
        """Return whether the next tensor is expected for `reason`."""
        reasons = self.passage.reasons
        return len(self.addresses) == len(reasons) or reasons[len(self.addresses)] == reason

    @property
    def is_over(self) -> bool:
        """Whether all has come."""
        return len(self.addresses) == len(self.expected)

    def end(self) -> tuple[int, list[Repeated], list[int]]:
        """Return where the used part of the slot ends, what came, and the address of the first tensor of each item."""
        came, end = len(self.addresses), self.position
        items: list[Repeated] = []
        addresses = []
        for item, first, equal in self.passage.items:
            if first >= came:
                break
            position = self.position + self.expected[first][4]
            if isinstance(item, Alias):
                original = items[equal]
                assert isinstance(original, RingTensor)
                items.append(Alias(item.seen, self.step, self.passage.rank, original))
            elif isinstance(item, RingTensor):
                items.append(RingTensor(item.seen, self.step, self.passage.rank, position, item.reason))
                end = position + item.seen.nbytes
            else:
                block = item.block_of_step(self.step, position, came - first)
                items.append(block)
                end = block.end
            addresses.append(self.addresses[first])
        return end, items, addresses


class StepTemplate:
    """Collects what comes one after another, to expect it the next time."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._items: list[Repeated] = []
        self._stored: set[int] = set()
        self._what: tuple[int, int, bool] | None = None
        self._num_tensors = self._num_bytes = 0

    def add(self, item: Repeated, is_new: bool) -> None:
        """Add what came next; `is_new` if nothing like it was seen before.

        What is new is learned apart: what grows from step to step, as caches do, would end the passage of the rest.
        """
        what = (item.step, item.rank, is_new)
        known = item.known if isinstance(item, RingBlock) else (item.seen,)
        num_bytes = 0 if isinstance(item, Alias) else item.end - item.position
        if (
            what != self._what
            or self._num_tensors + len(known) > _MAX_TENSORS
            or self._num_bytes + num_bytes > self._most_bytes
        ):
            self.end()
        is_outside = isinstance(item, Alias) and id(item.original) not in self._stored
        if is_outside or any(seen.sharding is not None for seen in known):
            self.end()
            return
        self._what = what
        self._items.append(item)
        if isinstance(item, RingTensor):
            self._stored.add(id(item))
        self._num_tensors += len(known)
        self._num_bytes += num_bytes

    def end(self) -> None:
        """Remember what was collected, and start again."""
        items, self._items = self._items, []
        self._stored, self._what = set(), None
        self._num_tensors = self._num_bytes = 0
        if items:
            record_template(items)


def record_template(items: list[Repeated]) -> None:
    """Remember with the first tensor of `items` what followed it, if anything did."""
    first = items[0]
    seen = first.known[0] if isinstance(first, RingBlock) else first.seen
    passage = Passage(items)
    seen.sequel = passage if len(passage.expected) > 1 else None
