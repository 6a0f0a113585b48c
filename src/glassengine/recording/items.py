"""What a running model hands to the thread that writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from glassengine.recording.block import Block
from glassengine.recording.description import Description
from glassengine.recording.layout import LeftOut, LightStatistics, Location


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
