"""What came one after another in a step, and comes so again in most of the later ones.

A step that begins like an earlier one expects the rest of it too, and has nothing to look up as long as that comes:
each tensor is copied to a place that is known already, or compared with the one that it was equal to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glassengine.recording.ring.items import Alias, Block, Stored
from glassengine.recording.ring.ring import MEMCMP, MEMMOVE, Ring
from glassengine.recording.ring.seen import Seen, Sequel

_MAX_TENSORS = 512
_STRIDED = torch.strided
_Item = Block | Stored | Alias


class Passage(Sequel):
    """Tensors of one step, in order, as a later step may bring them again.

    Args:
        items: What they were; the tensor that an alias is equal to is among them.

    Attributes:
        rank: Process that had them.
        nbytes: Size of the slot that they take.
        items: Each with the index of its first tensor and, for an alias, that of the item whose bytes it has, or -1.
        expected: Of each tensor its site, shape, dtype, size in bytes, where in the slot its bytes lie, and the index
            of the earlier tensor whose bytes those are, or -1.
        reasons: Of each the reason for which it is only measured, or None.
    """

    __slots__ = ("expected", "items", "nbytes", "rank", "reasons")

    def __init__(self, items: list[_Item]) -> None:
        self.rank = items[0].rank
        self.items: list[tuple[_Item, int, int]] = []
        self.expected: list[tuple[str, torch.Size, torch.dtype, int, int, int]] = []
        self.reasons: list[str | None] = []
        self.nbytes = 0
        numbers = {id(item): number for number, item in enumerate(items)}
        for item in items:
            first, equal = len(self.expected), -1
            if isinstance(item, Block):
                originals = dict(item.same_as)
                for index, seen in enumerate(item.known):
                    self._expect(seen, item.reason, first + originals[index] if index in originals else -1)
            elif isinstance(item, Alias):
                equal = numbers[id(item.original)]
                self._expect(item.seen, item.original.reason, self.items[equal][1])
            else:
                self._expect(item.seen, item.reason, -1)
            self.items.append((item, first, equal))

    def _expect(self, seen: Seen, reason: str | None, original: int) -> None:
        start = self.nbytes if original < 0 else self.expected[original][4]
        self.expected.append((seen.description.site, seen.size, seen.dtype, seen.nbytes, start, original))
        self.reasons.append(reason)
        self.nbytes += seen.room if original < 0 else 0


class Repetition:
    """A passage that comes again; used under the lock of its writer.

    Args:
        passage: What is expected.
        step: In which it comes.
        ring: Where the tensors are copied to.
        position: Of the slot that is reserved for them.
    """

    __slots__ = ("_address", "_addresses", "_expected", "_rank", "passage", "position", "step")

    def __init__(self, passage: Passage, step: int, ring: Ring, position: int) -> None:
        self.passage = passage
        self.step = step
        self.position = position
        self._expected = passage.expected
        self._rank = passage.rank
        self._address = ring.address_of(position)
        # Of the tensors that came as expected.
        self._addresses: list[int] = []

    def take(self, site: str, step: int, tensor: Tensor, rank: int) -> bool:
        """Take the tensor if it is the one that is expected next.

        What is interrupted in here leaves the repetition as it was.
        """
        addresses = self._addresses
        if len(addresses) == len(self._expected):
            return False
        expected, size, dtype, nbytes, start, original = self._expected[len(addresses)]
        if (
            expected == site
            and step == self.step
            and size == tensor.shape
            and dtype is tensor.dtype
            and rank == self._rank
            # Attributes only: methods of torch that compute let go of the interpreter lock.
            and tensor.is_cpu
            and tensor.layout is _STRIDED
            and tensor.is_contiguous()
        ):
            address = tensor.data_ptr()
            if original < 0:
                if address:
                    MEMMOVE(self._address + start, address, nbytes)
                    addresses.append(address)
                    return True
            elif addresses[original] == address and not MEMCMP(self._address + start, address, nbytes):
                addresses.append(address)
                return True
        return False

    def has_reason(self, reason: str | None) -> bool:
        """Return whether the next tensor is expected for `reason`."""
        reasons = self.passage.reasons
        return len(self._addresses) == len(reasons) or reasons[len(self._addresses)] == reason

    @property
    def is_over(self) -> bool:
        """Whether all has come."""
        return len(self._addresses) == len(self._expected)

    def end(self) -> tuple[int, list[_Item], list[int]]:
        """Return where the used part of the slot ends, what came, and the address of the first tensor of each item."""
        came, end = len(self._addresses), self.position
        items: list[_Item] = []
        addresses = []
        for item, first, equal in self.passage.items:
            if first >= came:
                break
            position = self.position + self._expected[first][4]
            if isinstance(item, Alias):
                original = items[equal]
                assert isinstance(original, Stored)
                items.append(Alias(item.seen, self.step, self._rank, original))
            elif isinstance(item, Stored):
                items.append(Stored(item.seen, self.step, self._rank, position, item.reason))
                end = position + item.seen.nbytes
            else:
                block = item.again(self.step, position, came - first)
                items.append(block)
                end = block.end
            addresses.append(self._addresses[first])
        return end, items, addresses


class Lesson:
    """Collects what comes one after another, to expect it the next time.

    Args:
        most_bytes: Size of the slot that a passage may take.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._items: list[_Item] = []
        self._stored: set[int] = set()
        self._what: tuple[int, int, bool] | None = None
        self._num_tensors = self._num_bytes = 0

    def add(self, item: _Item, is_new: bool) -> None:
        """Add what came next; `is_new` if nothing like it was seen before.

        What is new is learned apart: what grows from step to step, as caches do, would end the passage of the rest.
        """
        what = (item.step, item.rank, is_new)
        known = item.known if isinstance(item, Block) else (item.seen,)
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
        if isinstance(item, Stored):
            self._stored.add(id(item))
        self._num_tensors += len(known)
        self._num_bytes += num_bytes

    def end(self) -> None:
        """Remember what was collected, and start again."""
        items, self._items = self._items, []
        self._stored, self._what = set(), None
        self._num_tensors = self._num_bytes = 0
        if items:
            learn(items)


def learn(items: list[_Item]) -> None:
    """Remember with the first tensor of `items` what followed it, if anything did."""
    first = items[0]
    seen = first.known[0] if isinstance(first, Block) else first.seen
    passage = Passage(items)
    seen.sequel = passage if len(passage.expected) > 1 else None
