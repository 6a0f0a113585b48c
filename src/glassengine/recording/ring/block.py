"""Small tensors of one step, copied contiguously into the ring."""

from __future__ import annotations

from torch import Tensor

from glassengine.recording.ring.items import Block, Seen
from glassengine.recording.ring.ring import Ring, require_memory

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
        self._known: list[Seen] = []
        self._same_as: list[tuple[int, int]] = []
        # By address, which tensor was last copied from there: its index, position, size and dtype name.
        self._places: dict[int, tuple[int, int, int, str]] = {}

    def has_room(self, seen: Seen) -> bool:
        """Return whether a tensor can be the next one; where there is room in the header, so is there in a group."""
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

    def finish(self) -> Block:
        """Return the block."""
        step, rank, _, reason = self.what
        descriptions = tuple(seen.description for seen in self._known)
        known, same_as = tuple(self._known), tuple(self._same_as)
        return Block(known, descriptions, same_as, step, rank, self._position, self._end, reason)
