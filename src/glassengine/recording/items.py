"""What a running model hands to the thread that writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from glassengine.recording.description import Description
from glassengine.recording.layout import LeftOut, LightStatistics, LightTable, Location
from glassengine.recording.seen import Seen


@dataclass(slots=True)
class Block:
    """Small tensors of one step that lie behind one another in the ring.

    With a `reason` they are only measured, and not written for that reason; `table` is what was found. `descriptions`
    are those of the `known` tensors, the same object in every step that goes alike. `same_as` has (index, index of an
    earlier one) of tensors that have the bytes of an earlier one. `template` is the block of an earlier step that this
    one repeats, if it does so wholly.
    """

    known: tuple[Seen, ...]
    descriptions: tuple[Description, ...]
    same_as: tuple[tuple[int, int], ...]
    step: int
    rank: int
    position: int
    end: int
    reason: str | None
    template: Block | None = None
    table: LightTable | None = None

    def again(self, step: int, position: int, most: int) -> Block:
        """Return the block of another step whose tensors, or the first `most`, are like these."""
        if most >= len(self.known):
            end = position + self.end - self.position
            return Block(self.known, self.descriptions, self.same_as, step, self.rank, position, end, self.reason, self)
        known = self.known[:most]
        same_as = tuple(pair for pair in self.same_as if pair[0] < most)
        equal = {index for index, _ in same_as}
        rooms = [seen for index, seen in enumerate(known) if index not in equal]
        end = position + sum(seen.room for seen in rooms[:-1]) + rooms[-1].nbytes
        descriptions = self.descriptions[:most]
        return Block(known, descriptions, same_as, step, self.rank, position, end, self.reason)

    def goes_like(self, other: Block) -> bool:
        """Return whether this block has the tensors, at the places, of another one that repeats the same one."""
        return self.template is not None and self.template is other.template


@dataclass(slots=True)
class Stored:
    """A tensor in the ring; `location` is where it has been written.

    With a `reason` it is only measured, and not written for that reason; `statistics` is what was found.
    """

    seen: Seen
    step: int
    rank: int
    position: int
    reason: str | None
    location: Location | None = None
    statistics: LightStatistics | None = None

    @property
    def description(self) -> Description:
        """What the tensor is."""
        return self.seen.description

    @property
    def end(self) -> int:
        """Where it ends in the ring."""
        return self.position + self.seen.nbytes


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

    seen: Seen
    step: int
    rank: int
    original: Stored

    @property
    def description(self) -> Description:
        """What the tensor is."""
        return self.seen.description


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
