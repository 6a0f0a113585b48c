"""Sources that are another one seen differently: what is known of that is known of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassengine.recording.layout.layout import Entry
from glassengine.recording.read.source import TensorSource
from glassengine.results import Skipped

if TYPE_CHECKING:
    from torch import Tensor


class OfSource:
    """What such a source has from the other one; see `TensorSource`.

    Args:
        source: The other one.
    """

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._source.path

    @property
    def metadata(self) -> dict[str, Any]:
        """That of the source."""
        return self._source.metadata

    @property
    def complete(self) -> bool:
        """Whether the source is."""
        return self._source.complete

    @property
    def skipped(self) -> Sequence[Skipped]:
        """What the source has skipped."""
        return self._source.skipped


class OfRank(OfSource):
    """What one of several processes has.

    Args:
        source: Of all.
        rank: Of the process.
    """

    def __init__(self, source: TensorSource, rank: int) -> None:
        super().__init__(source)
        self.entries: tuple[Entry, ...] = tuple(entry for entry in source.entries if entry.rank == rank)

    def tensor(self, entry: Entry) -> Tensor:
        """Return one of `entries`."""
        return self._source.tensor(entry)
