"""A step of a recording between its first tensor and its commit record."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from glassengine.errors import UsageError
from glassengine.recording.layout.description import Description, Group
from glassengine.recording.layout.layout import Location

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class OpenStep:
    """What was written of a step that is not committed."""

    frames: list[bytes] = field(default_factory=list)
    names: Set[tuple[str, int]] = frozenset()
    groups: list[Group] = field(default_factory=list)
    num_left_out: int = 0
    # Place and bytes of a tensor -> what is stored, and the tensor itself: its storage cannot be reused meanwhile.
    identities: dict[object, tuple[Description, Location, Tensor]] = field(default_factory=dict)
    # Whether `names` is not shared: those of a group that is all of a step stay the group's.
    _owns_names: bool = False

    def is_new(self, names: Set[tuple[str, int]]) -> bool:
        """Return whether the step has none of these (site, rank)."""
        return not self.names or self.names.isdisjoint(names)

    def add(self, group: Group) -> None:
        """Note that the tensors of a group were written."""
        self.groups.append(group)
        if self.names:
            self._own().update(group.names)
        else:
            self.names = group.names

    def add_name(self, site: str, rank: int) -> None:
        """Note that a tensor was written."""
        self._own().add((site, rank))

    def _own(self) -> set[tuple[str, int]]:
        if not self._owns_names:
            self.names, self._owns_names = set(self.names), True
        assert isinstance(self.names, set)
        return self.names


class Steps:
    """The steps of a recording: those that are open, and which were committed."""

    def __init__(self) -> None:
        self.open: dict[int, OpenStep] = {}
        self.committed: set[int] = set()

    def opened(self, site: str, step: int) -> OpenStep:
        """Return a step for a tensor of `site`; it is opened if it is not.

        Raises:
            UsageError: There can be no such step, or it is committed.
        """
        what = f"the tensor {site[:200]!r} cannot be recorded"
        if step < 0:
            raise UsageError(what, got=f"step {step}", expected="numbers from 0 on")
        if step in self.committed:
            raise UsageError(what, got=f"step {step}, which is committed", expected="a step that is still open")
        return self.open.setdefault(step, OpenStep())

    def begun(self, site: str, step: int, rank: int) -> OpenStep:
        """Return a step that has no tensor of `site` yet.

        Raises:
            UsageError: It has one, or as `opened`.
        """
        opened = self.open.get(step) or self.opened(site, step)
        if (site, rank) in opened.names:
            what = f"the tensor {site[:200]!r} cannot be recorded"
            raise UsageError(what, got=f"the same site twice in step {step}", hint="give the second call its own name")
        return opened

    def end(self, step: int) -> OpenStep:
        """Return what was written of a step that is about to be committed.

        Raises:
            UsageError: It is already.
        """
        if step in self.committed:
            raise UsageError("a step is committed twice", got=f"step {step}")
        return self.open.pop(step, None) or OpenStep()
