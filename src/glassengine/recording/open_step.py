"""A step of a recording between its first tensor and its commit record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from glassengine.recording.description import Description, Group
from glassengine.recording.layout import Location


@dataclass
class OpenStep:
    """What was written of a step that is not committed."""

    frames: list[bytes] = field(default_factory=list)
    names: set[tuple[str, int]] = field(default_factory=set)
    groups: list[Group] = field(default_factory=list)
    num_left_out: int = 0
    # Place and bytes of a tensor -> what is stored, and the tensor itself: its storage cannot be reused meanwhile.
    identities: dict[object, tuple[Description, Location, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class EndedStep:
    """A step whose records are to be written once its bytes are."""

    number: int
    frames: bytes
    num_tensors: int
    token_ids: Sequence[Sequence[int]]
    stopped: str | None
