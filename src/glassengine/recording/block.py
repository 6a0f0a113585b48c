"""Small tensors of one step, copied behind one another into the ring.

Most steps bring the tensors of the step before in the same order. A block that begins like an earlier one therefore
expects the rest of it too, and has nothing to look up as long as that comes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glassengine.recording.description import Description
from glassengine.recording.layout import LightTable
from glassengine.recording.ring import MEMCMP, MEMMOVE, Ring, require_memory
from glassengine.recording.seen import Seen

_HEADER_BYTES = 1 << 16
_NOWHERE = (0, 0, 0, "")
_STRIDED = torch.strided


class Repeat:
    """The tensors of a block, in order, as a later block may expect them.

    Attributes:
        known: What they are.
        descriptions: Theirs.
        same_as: As in `Block`.
        what: Rank, and the reason for which they are only measured, or None.
        nbytes: Size of the block.
        items: Of each its site, shape, dtype, size in bytes, where its bytes lie in the block, and the index of the
            earlier tensor whose bytes those are, or -1.
    """

    __slots__ = ("descriptions", "items", "known", "nbytes", "same_as", "what")

    def __init__(self, block: Block) -> None:
        self.known = tuple(block.known)
        self.descriptions = tuple(seen.description for seen in self.known)
        self.same_as = tuple(block.same_as)
        self.what = (block.what[1], block.what[3])
        self.nbytes = block.end - block.position
        originals = dict(self.same_as)
        starts: list[int] = []
        self.items: list[tuple[str, torch.Size, torch.dtype, int, int, int]] = []
        start = 0
        for index, seen in enumerate(self.known):
            original = originals.get(index, -1)
            starts.append(start if original < 0 else starts[original])
            start += seen.room if original < 0 else 0
            self.items.append((seen.description.site, seen.size, seen.dtype, seen.nbytes, starts[-1], original))


class Block:
    """Tensors that lie behind one another in the ring; used under the lock of its writer.

    What is interrupted in here leaves the block as it was: attributes are set last, and nothing is called in between.

    Args:
        what: What the tensors have in common: step, rank, whether they were seen for the first time (what differs from
            step to step is kept apart from what does not, so that the descriptions of blocks repeat), and the reason
            for which they are only measured and not written, or None.
        ring: Where they are copied to.
        position: Of the slot that is reserved for them.
        limit: Where it ends.
        repeat: What is expected, if anything is.

    Attributes:
        known: The tensors.
        same_as: (index, index of an earlier one) of tensors that have the bytes of an earlier one.
        table: The statistics of those that are only measured, once the thread has them.
    """

    __slots__ = (
        "_address",
        "_addresses",
        "_header_room",
        "_items",
        "_next",
        "_places",
        "_rank",
        "_reason",
        "_repeat",
        "_ring",
        "_step",
        "end",
        "known",
        "limit",
        "position",
        "same_as",
        "table",
        "what",
    )

    def __init__(
        self, what: tuple[int, int, bool, str | None], ring: Ring, position: int, limit: int, repeat: Repeat | None
    ) -> None:
        self.what = what
        self.position = self.end = self._next = position
        self.limit = limit
        self.known: list[Seen] = []
        self.same_as: list[tuple[int, int]] = []
        self.table: LightTable | None = None
        self._step, self._rank, _, self._reason = what
        self._header_room = _HEADER_BYTES
        self._ring = ring
        self._address = ring.address_of(position)
        # By address, which tensor was last copied from there: its index, position, size and dtype name.
        self._places: dict[int, tuple[int, int, int, str]] = {}
        self._repeat = repeat if repeat is not None and repeat.what == (self._rank, self._reason) else None
        self._items = [] if self._repeat is None else self._repeat.items
        # Of the tensors that came as expected.
        self._addresses: list[int] = []

    @classmethod
    def of_one(cls, seen: Seen, what: tuple[int, int, bool, str | None], ring: Ring, position: int) -> Block:
        """Return the block of a tensor whose bytes are in the ring already."""
        block = cls(what, ring, position, position + seen.room, None)
        block.known.append(seen)
        block.end = position + seen.nbytes
        return block

    @property
    def descriptions(self) -> tuple[Description, ...]:
        """Descriptions of the tensors; the same object in every step that goes alike."""
        if self._repeat is not None:
            return self._repeat.descriptions
        return tuple(seen.description for seen in self.known)

    def goes_like(self, other: Block) -> bool:
        """Return whether this finished block has the tensors, at the places, of another one that expected them too."""
        return self._repeat is not None and self._repeat is other._repeat

    def has_room(self, seen: Seen) -> bool:
        """Return whether a tensor that is not expected can be the next one.

        Where there is room in the header, so is there in a group.
        """
        repeat = self._repeat
        if repeat is not None:
            if len(self._addresses) == len(repeat.items):
                return False
            self._expect_nothing(repeat)
        return self._next + seen.room <= self.limit and self._header_room > 0

    def put(self, seen: Seen, tensor: Tensor) -> None:
        """Append a contiguous tensor of the CPU.

        Raises:
            UsageError: Its storage was freed, or never made.
        """
        address, nbytes, dtype = tensor.data_ptr(), seen.nbytes, seen.description.dtype
        room = self._header_room - seen.description.most_header_bytes
        # What one module returns another one is given: found by its address, proved by its bytes. Those of another
        # dtype have other statistics.
        index, copied, size, kind = self._places.get(address, _NOWHERE)
        is_same = size == nbytes and (kind == dtype or self._reason is None)
        if is_same and self._ring.has(copied, address, nbytes):
            room -= self.known[index].description.most_header_bytes
            self.same_as += ((len(self.known), index),)
            self.known += (seen,)
            self._header_room = room
            return
        if not address:
            require_memory(tensor)
        position = self._next
        self._ring.copy(position, address, nbytes)
        self._places[address] = (len(self.known), position, nbytes, dtype)
        self.known += (seen,)
        self._header_room = room
        self.end = position + nbytes
        self._next = position + seen.room

    def put_again(self, site: str, step: int, tensor: Tensor, rank: int) -> bool:
        """Append the tensor if it is the one that is expected next."""
        addresses = self._addresses
        if len(addresses) == len(self._items):
            return False
        expected, size, dtype, nbytes, start, original = self._items[len(addresses)]
        if (
            expected == site
            and step == self._step
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

    def finish(self) -> None:
        """Append no more."""
        repeat = self._repeat
        if repeat is not None and len(self._addresses) == len(repeat.items):
            self.known, self.same_as = list(repeat.known), list(repeat.same_as)
            self.end = self.position + repeat.nbytes
        elif repeat is not None:
            self._expect_nothing(repeat)
        elif self.known and not self.what[2]:
            self.known[0].repeat = Repeat(self)

    def _expect_nothing(self, repeat: Repeat) -> None:
        """Become what a block would be that had been filled without expecting anything."""
        count, end, after = len(self._addresses), self.position, self.position
        places, room = {}, _HEADER_BYTES
        for index, (address, seen, item) in enumerate(zip(self._addresses, repeat.known, repeat.items, strict=False)):
            _, _, _, nbytes, start, original = item
            room -= seen.description.most_header_bytes
            if original < 0:
                places[address] = (index, self.position + start, nbytes, seen.description.dtype)
                end, after = self.position + start + nbytes, self.position + start + seen.room
            else:
                room -= repeat.known[original].description.most_header_bytes
        known, same_as = list(repeat.known[:count]), [pair for pair in repeat.same_as if pair[0] < count]
        self._repeat, self._items, self._addresses = None, [], []
        self.known, self.same_as, self._places, self._header_room = known, same_as, places, room
        self.end, self._next = end, after
