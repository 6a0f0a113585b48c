"""What a running model hands to the thread that writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from glassengine.recording.description import Description
from glassengine.recording.layout import LeftOut, LightStatistics, Location
from glassengine.recording.seen import Seen

_BLOCK_HEADER_BYTES = 1 << 16


@dataclass(slots=True)
class Stored:
    """A tensor in the ring; `location` is where it has been written.

    With a `reason` it is only measured, and not written for that reason; `statistics` is what was found.
    """

    description: Description
    step: int
    rank: int
    position: int
    reason: str | None
    location: Location | None = None
    statistics: LightStatistics | None = None

    @property
    def end(self) -> int:
        """Where it ends in the ring."""
        return self.position + self.description.nbytes


@dataclass(slots=True)
class Copied:
    """A tensor of an accelerator; its bytes may be read after `ready.synchronize()`. `reason` as in `Stored`."""

    description: Description
    step: int
    rank: int
    data: Tensor
    ready: Any
    reason: str | None


@dataclass(slots=True)
class Alias:
    """A tensor that has the bytes, and the reason, of another one of its step."""

    description: Description
    step: int
    rank: int
    original: Stored


@dataclass(slots=True)
class Block:
    """Small tensors of one step that lie behind one another in the ring.

    `what` they have in common: step, rank, whether they were seen for the first time (what differs from step to step is
    kept apart from what does not, so that the descriptions of blocks repeat), and the reason for which they are only
    measured and not written, or None. `next` is where the next tensor will lie, `limit` where the slot that was
    reserved ends. `same_as` has (index, index of an earlier one) of tensors that have the bytes of an earlier one;
    `places` has, by address, which tensor was last copied from there: its index, position, size and dtype name.
    """

    what: tuple[int, int, bool, str | None]
    position: int
    end: int
    next: int
    limit: int
    descriptions: list[Description] = field(default_factory=list)
    same_as: list[tuple[int, int]] = field(default_factory=list)
    places: dict[int, tuple[int, int, int, str]] = field(default_factory=dict)
    header_room: int = _BLOCK_HEADER_BYTES

    def has_room(self, seen: Seen) -> bool:
        """Return whether the tensor can be the next one; where there is room in the header, so is there in a group."""
        return self.next + seen.room <= self.limit and self.header_room > 0

    def add(self, seen: Seen) -> None:
        """Append the tensor whose bytes are at `next`."""
        self.descriptions.append(seen.description)
        self.header_room -= seen.description.most_header_bytes
        self.end = self.next + seen.nbytes
        self.next += seen.room

    def add_same(self, seen: Seen, original: int) -> None:
        """Append a tensor that has the bytes of an earlier one, by its index."""
        self.same_as.append((len(self.descriptions), original))
        self.descriptions.append(seen.description)
        self.header_room -= seen.description.most_header_bytes + self.descriptions[original].most_header_bytes


@dataclass(slots=True)
class Streamed:
    """A tensor larger than a slot; its `Piece`s follow, the last one without bytes."""

    description: Description
    step: int
    rank: int


@dataclass(slots=True)
class Piece:
    """Bytes of a streamed tensor; without bytes its end, `cut` when copying it was interrupted."""

    position: int
    num_bytes: int
    cut: bool = False


@dataclass(slots=True)
class Commit:
    """The end of a step."""

    step: int
    token_ids: Sequence[Sequence[int]]
    stopped: str | None


Item = Stored | Copied | Alias | Block | Streamed | LeftOut | Commit
