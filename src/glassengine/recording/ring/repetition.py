"""What earlier steps had, and what came one after another in them: most of it comes again.

Most tensors of a step are like those of an earlier one, and need no second look. A step that begins like an earlier one
expects the rest of it too, and has nothing to look up as long as that comes: each tensor is copied to a place that is
known already, or compared with the one that it was equal to.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from glassengine.recording.layout.description import Facts
from glassengine.recording.layout.layout import Sharding, aligned
from glassengine.recording.layout.statistics import MEASURED
from glassengine.recording.layout.values import describe
from glassengine.recording.ring.items import Alias, Block, Passage, Repeated, Seen, Stored
from glassengine.recording.ring.ring import MEMCMP, MEMMOVE, Ring

# Smaller tensors are written in blocks, and stored again rather than searched for.
MIN_SHARED_BYTES = 1 << 16
_MAX_SEEN = 1 << 14
_MAX_TENSORS = 512
_STRIDED = torch.strided


class SeenTensors:
    """The descriptions of tensors, by site, dtype, shape and sharding; of a limited number of them."""

    def __init__(self) -> None:
        self.all: dict[tuple[str, torch.dtype, torch.Size, Sharding | None], Seen] = {}
        # Of each site the last one.
        self.last: dict[str, Seen] = {}

    def look(self, site: str, tensor: Tensor, **facts: Unpack[Facts]) -> tuple[Seen, bool]:
        """Return what is known of such a tensor, and whether nothing was.

        Raises:
            UsageError: The tensor or its name cannot be recorded.
        """
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
            seen = self.all[key] = Seen(
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

    def end(self) -> tuple[int, list[Repeated], list[int]]:
        """Return where the used part of the slot ends, what came, and the address of the first tensor of each item."""
        came, end = len(self._addresses), self.position
        items: list[Repeated] = []
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
        self._items: list[Repeated] = []
        self._stored: set[int] = set()
        self._what: tuple[int, int, bool] | None = None
        self._num_tensors = self._num_bytes = 0

    def add(self, item: Repeated, is_new: bool) -> None:
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


def learn(items: list[Repeated]) -> None:
    """Remember with the first tensor of `items` what followed it, if anything did."""
    first = items[0]
    seen = first.known[0] if isinstance(first, Block) else first.seen
    passage = Passage(items)
    seen.sequel = passage if len(passage.expected) > 1 else None
