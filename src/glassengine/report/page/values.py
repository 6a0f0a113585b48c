"""What a page shows of single tensors that only their values tell: worst elements, distances in ulp, every axis.

Taken from the two records that were compared, of the worst tensors only, with bounds on their number and size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassengine.report.page.data import DataFolder, ListFiles
from glassengine.results import Pair
from glassengine.results.base import plain

if TYPE_CHECKING:
    from torch import Tensor

    from glassengine.recording.layout.layout import Entry
    from glassengine.recording.read.source import TensorSource

MOST_TENSORS = 200
_MOST_ELEMENTS = 1 << 26
_MOST_IN_ALL = 1 << 28
_PER_FILE = 16


class Values:
    """Reads both records, and writes what is shown of their tensors.

    Args:
        baseline: Recording, or anything else that compare reads.
        candidate: Likewise.

    Raises:
        UsageError: One does not exist.
        CorruptError: One is damaged.
    """

    def __init__(self, baseline: str | Path, candidate: str | Path) -> None:
        from glassengine.recording.read.source import open_source

        self._sides = open_source(baseline), open_source(candidate)
        self._entries = tuple(map(_by_place, self._sides))
        self.without: Counter[str] = Counter()

    def write(self, folder: DataFolder, rows: Iterable[tuple[int, Pair]]) -> tuple[int, ...]:
        """Write the values of some rows, and return those that have any; `without` counts why others have none.

        Raises:
            CorruptError: The bytes of a tensor are damaged.
        """
        found = ListFiles(folder, "values", _PER_FILE)
        shown: list[int] = []
        left = _MOST_IN_ALL
        for row, pair in rows:
            item = self._item(pair, left)
            if isinstance(item, str):
                self.without[item] += 1
                continue
            left -= math.prod(pair.shape or ())
            found.add(plain(item))
            shown.append(row)
        found.close()
        return tuple(shown)

    def _item(self, pair: Pair, left: int) -> dict[str, Any] | str:
        """Return what is shown of a pair, or why nothing is."""
        ours = self._entries[0].get((pair.step, pair.rank, pair.site))
        theirs = self._entries[1].get((pair.step, pair.rank, pair.candidate_site))
        if ours is None or theirs is None:
            return "the records given do not have the tensor"
        if math.prod(ours.shape) > min(left, _MOST_ELEMENTS):
            return "too large to be read for a report"
        x, y = self._sides[0].tensor(ours), self._sides[1].tensor(theirs)
        if x.shape != y.shape:
            return "the two sides have other shapes or layouts"
        return item_of(x, y)


def item_of(baseline: Tensor, candidate: Tensor) -> dict[str, Any]:
    """Return what is shown of two tensors of one shape, as values that `plain` makes JSON."""
    from glassengine.numerics.metrics.distances import error_histogram, tensor_values

    return {**vars(tensor_values(baseline, candidate)), "errors": error_histogram(baseline, candidate)}


def _by_place(source: TensorSource) -> dict[tuple[int, int, str], Entry]:
    return {(entry.step, entry.rank, entry.site): entry for entry in source.entries}
