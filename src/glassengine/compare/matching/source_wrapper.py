"""Sources as a comparison sees them: each answers for itself what a comparison asks of a side.

`OpenedSource` passes questions on to what was opened. Others are a source seen differently: by other names, with
another dimension, of one rank, put together of several.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from glassengine.blocks.arrays import ArrayValues, values_of
from glassengine.recording.layout.layout import Entry
from glassengine.recording.layout.noise_floor import NoiseFloor
from glassengine.recording.read.source import TensorSource
from glassengine.results import Skipped

if TYPE_CHECKING:
    from torch import Tensor


class Remark(NamedTuple):
    """How a tensor was put together, whether of shares not added up yet, and whether all ranks have the same."""

    step: int
    site: str
    how: str
    is_open: bool
    is_same: bool


class SourceWrapper:
    """A source, unchanged; see `TensorSource`.

    Args:
        source: The source.
    """

    is_assembled = False
    """Whether its tensors are put together from parts of several ranks."""
    is_printed = False
    """Whether its tensors are statistics that were printed."""

    def __init__(self, source: TensorSource) -> None:
        self._source: Any = source
        self.entries: Sequence[Entry] = source.entries

    @property
    def path(self) -> Path:
        """Where it is."""
        path: Path = self._source.path
        return path

    @property
    def metadata(self) -> dict[str, Any]:
        """That of the source."""
        metadata: dict[str, Any] = self._source.metadata
        return metadata

    @property
    def complete(self) -> bool:
        """Whether the source is."""
        return bool(self._source.complete)

    @property
    def is_thread_safe(self) -> bool:
        """Whether several threads may read tensors at once."""
        return bool(getattr(self._source, "is_thread_safe", False))

    @property
    def skipped(self) -> Sequence[Skipped]:
        """What the source has skipped."""
        found: Sequence[Skipped] = self._source.skipped
        return found

    @property
    def changes(self) -> Mapping[str, Any]:
        """What was done to the source, for the environment of a result."""
        changes: Mapping[str, Any] = getattr(self._source, "changes", {})
        return changes

    def tensor(self, entry: Entry) -> Tensor:
        """Return one of `entries`."""
        found: Tensor = self._source.tensor(entry)
        return found

    def values(self, entry: Entry) -> ArrayValues:
        """Return the values of one of `entries`, without torch where the source can."""
        return values_of(self.tensor(entry))

    def can_be_cut(self, entry: Entry) -> bool:
        """Whether rows of one of `entries` can be read without the others."""
        return False

    def rows(self, entry: Entry, first: int, end: int) -> tuple[ArrayValues, int]:
        """Return some rows of an entry that `can_be_cut`, and the CRC-32 of their bytes."""
        raise NotImplementedError

    def noise_floor(self) -> NoiseFloor | None:
        """Return what rounding alone does to its tensors, where that was measured."""
        return None

    def printed(self) -> Printed | None:
        """Return the statistics that are all that the source has; None where it has values."""
        return None

    def expect(self, entry: Entry, source: TensorSource, counterpart: Entry) -> None:
        """Note that the whole of `entry` is judged against `counterpart`, of `source`."""

    def why_not(self, entry: Entry) -> str | None:
        """Return why one of `entries` cannot be judged; None if it can."""
        return None

    def reject(self, entry: Entry) -> None:
        """Note that the parts of a tensor do not add up to it: each is to be the whole."""

    def fresh(self) -> Self:
        """Return the same source, with nothing found out about its parts."""
        return self

    def remarks(self) -> Sequence[Remark]:
        """Return what was found out about the parts of each tensor that was read."""
        return ()

    def note(self, remarks: Iterable[Remark]) -> None:
        """Take over what a `fresh` source remarked."""


class OpenedSource(SourceWrapper):
    """A source as it was opened, whose kind may be of another package: it answers what it can."""

    def values(self, entry: Entry) -> ArrayValues:
        """Return the values of one of `entries`."""
        found: ArrayValues = (
            self._source.read_values(entry) if hasattr(self._source, "read_values") else super().values(entry)
        )
        return found

    def can_be_cut(self, entry: Entry) -> bool:
        """Whether rows of one of `entries` can be read: of a recording, unless a block holds it with others."""
        return hasattr(self._source, "read_rows") and entry.location is not None and entry.location.block is None

    def rows(self, entry: Entry, first: int, end: int) -> tuple[ArrayValues, int]:
        """Return some rows."""
        found: tuple[ArrayValues, int] = self._source.read_rows(entry, first, end)
        return found

    def noise_floor(self) -> NoiseFloor | None:
        """Return that of the recording."""
        found: NoiseFloor | None = self._source.noise_floor() if hasattr(self._source, "noise_floor") else None
        return found

    def printed(self) -> Printed | None:
        """Return the statistics that are all that the source has; None where it has values."""
        found = self._source.statistics() if hasattr(self._source, "statistics") else None
        return None if found is None else Printed(found)


class Printed(SourceWrapper):
    """Statistics that were printed in place of values."""

    is_printed = True


class OfRank(SourceWrapper):
    """One of several processes.

    Args:
        source: Of all.
        rank: Of the process.
    """

    def __init__(self, source: TensorSource, rank: int) -> None:
        super().__init__(source)
        self.entries = tuple(entry for entry in source.entries if entry.rank == rank)
