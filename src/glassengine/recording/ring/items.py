"""Items that a running model hands to the thread that writes, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from glassengine.recording.layout.description import Description, group_text
from glassengine.recording.layout.layout import LeftOut, LightStatistics, LightTable, Location, Sharding

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(slots=True)
class EarlierTensor:
    """A tensor of an earlier step: what is like it has the same description.

    `nbytes` are those of its values, `room` what they take in the ring. `is_small` says that such tensors are written
    in blocks, `is_simple` that their bytes are the values if they are contiguous and on the CPU, and
    `is_measured` that the thread knows to compute light statistics of them. `sequel` is what followed it, if that is
    known.
    """

    description: Description
    dtype: torch.dtype
    size: torch.Size
    nbytes: int
    room: int
    is_small: bool
    is_simple: bool
    is_measured: bool
    sharding: Sharding | None
    sequel: Passage | None = None


@dataclass(slots=True)
class RingBlock:
    """Small tensors of one step that are contiguous in the ring.

    With a `reason` they are only measured, and not written for that reason; `table` is what was found. `descriptions`
    are those of the `known` tensors, the same object in every step that goes alike. `same_as` has (index, index of an
    earlier one) of tensors that have the bytes of an earlier one. `template` is the block of an earlier step that this
    one repeats, if it does so wholly. `location` is where it has been written.
    """

    known: tuple[EarlierTensor, ...]
    descriptions: tuple[Description, ...]
    same_as: tuple[tuple[int, int], ...]
    step: int
    rank: int
    position: int
    end: int
    reason: str | None
    template: RingBlock | None = None
    table: LightTable | None = None
    location: Location | None = None
    _text: bytes | None = None

    def text(self) -> bytes:
        """Return what the tensors are, as the index says it of a group; made once for all blocks that repeat one."""
        if self._text is None:
            first = self.template
            if first is not None:
                self._text = first.text()
            else:
                self._text = group_text(0, self.descriptions, self.rank, dict(self.same_as)).encode()
        return self._text

    def block_of_step(self, step: int, position: int, most: int) -> RingBlock:
        """Return the block of another step whose tensors, or the first `most`, are like these."""
        if most >= len(self.known):
            end = position + self.end - self.position
            return RingBlock(
                self.known, self.descriptions, self.same_as, step, self.rank, position, end, self.reason, self
            )
        known = self.known[:most]
        same_as = tuple(pair for pair in self.same_as if pair[0] < most)
        equal = {index for index, _ in same_as}
        rooms = [seen for index, seen in enumerate(known) if index not in equal]
        end = position + sum(seen.room for seen in rooms[:-1]) + rooms[-1].nbytes
        descriptions = self.descriptions[:most]
        return RingBlock(known, descriptions, same_as, step, self.rank, position, end, self.reason)

    def goes_like(self, other: RingBlock) -> bool:
        """Return whether this block has the tensors, at the places, of another one that repeats the same one."""
        return self.template is not None and self.template is other.template


@dataclass(slots=True)
class RingTensor:
    """A tensor in the ring; `location` is where it has been written.

    With a `reason` it is only measured, and not written for that reason; `statistics` is what was found.
    """

    seen: EarlierTensor
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
    """A tensor of an accelerator; its bytes may be read after `ready.synchronize()`. `reason` as in `RingTensor`.

    `position` is one of the ring that stands for it; its bytes are not there. `location` and `statistics` as in
    `RingTensor`.
    """

    description: Description
    step: int
    rank: int
    data: Tensor
    ready: Any
    reason: str | None
    position: int = 0
    location: Location | None = None
    statistics: LightStatistics | None = None

    @property
    def end(self) -> int:
        """Where the next slot of the ring may begin."""
        return self.position + 1


@dataclass(slots=True)
class Alias:
    """A tensor that has the bytes, and the reason, of another one of its step."""

    seen: EarlierTensor
    step: int
    rank: int
    original: RingTensor

    @property
    def description(self) -> Description:
        """What the tensor is."""
        return self.seen.description


@dataclass(slots=True)
class Streamed:
    """A tensor larger than a slot; its `RingPiece`s follow, the last one without bytes.

    `position` is where its first piece may begin, and `pieces` has position and size of those that have come.
    """

    description: Description
    step: int
    rank: int
    position: int = 0
    pieces: list[tuple[int, int]] = field(default_factory=list)
    location: Location | None = None


@dataclass(slots=True)
class RingPiece:
    """Bytes of a streamed tensor; without bytes its end, `cut` when copying it was interrupted."""

    position: int
    num_bytes: int
    cut: bool = False


@dataclass(slots=True)
class Note:
    """What the journal has written of a part of a step, from `position` to `end` in the ring."""

    step: int
    position: int
    end: int


@dataclass(slots=True)
class Commit:
    """The end of a step; what the journal has written of it lies from `position` to `end` in the ring."""

    step: int
    token_ids: Sequence[Sequence[int]]
    stopped: str | None
    position: int = 0
    end: int = 0


Item = RingTensor | Copied | Alias | RingBlock | Streamed | LeftOut | Note | Commit


Repeated = RingBlock | RingTensor | Alias


class Passage:
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

    def __init__(self, items: list[Repeated]) -> None:
        self.rank = items[0].rank
        self.items: list[tuple[Repeated, int, int]] = []
        self.expected: list[tuple[str, torch.Size, torch.dtype, int, int, int]] = []
        self.reasons: list[str | None] = []
        self.nbytes = 0
        numbers = {id(item): number for number, item in enumerate(items)}
        for item in items:
            first, equal = len(self.expected), -1
            if isinstance(item, RingBlock):
                originals = dict(item.same_as)
                for index, seen in enumerate(item.known):
                    self._expect(seen, item.reason, first + originals[index] if index in originals else -1)
            elif isinstance(item, Alias):
                equal = numbers[id(item.original)]
                self._expect(item.seen, item.original.reason, self.items[equal][1])
            else:
                self._expect(item.seen, item.reason, -1)
            self.items.append((item, first, equal))

    def _expect(self, seen: EarlierTensor, reason: str | None, original: int) -> None:
        start = self.nbytes if original < 0 else self.expected[original][4]
        self.expected.append((seen.description.site, seen.size, seen.dtype, seen.nbytes, start, original))
        self.reasons.append(reason)
        self.nbytes += seen.room if original < 0 else 0
