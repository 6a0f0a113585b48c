"""What a page shows of single tensors that only their values tell: worst elements, distances in ulp, every axis.

Taken from the two records that were compared, of the worst tensors only, with bounds on their number and size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
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
_NUM_WORST = 12
_MOST_SLICES = 256
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
            left -= math.prod(item["shape"])
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
    from glassengine.numerics.metrics.distances import error_histogram, slice_maxima, ulp_distance
    from glassengine.recording.layout.values import dtype_name

    both_float = baseline.dtype == candidate.dtype and baseline.dtype.is_floating_point
    return {
        "shape": list(baseline.shape),
        "dtype": dtype_name(baseline.dtype),
        "candidate_dtype": dtype_name(candidate.dtype),
        "worst": worst_elements(baseline, candidate),
        "ulp": ulp_distance(baseline, candidate) if both_float else None,
        "errors": error_histogram(baseline, candidate),
        "axes": [
            {"axis": one.axis, "size": one.size, **_binned(one.maxima, one.step)}
            for one in slice_maxima(baseline, candidate)
        ],
    }


def worst_elements(baseline: Tensor, candidate: Tensor) -> list[list[Any]]:
    """Return (index, baseline, candidate) of the elements that differ most, a mismatch of NaN or infinity first."""
    import torch

    flat = [side.detach().reshape(-1) for side in (baseline, candidate)]
    if not flat[0].numel():
        return []
    wide = [side if side.is_complex() else side.to(torch.float64) for side in flat]
    same = (flat[0] == flat[1]) | (wide[0].isnan() & wide[1].isnan())
    error = (wide[1] - wide[0]).abs().to(torch.float64).nan_to_num(nan=math.inf).masked_fill(same, -1.0)
    number = min(_NUM_WORST, len(error))
    least = torch.topk(error, number).values[-1]
    # Of many that are as large, the first: `topk` takes any.
    above, equal = (torch.nonzero(mask).flatten() for mask in (error > least, error == least))
    places = torch.cat([above, equal[: number - len(above)]])
    places = places[torch.sort(error[places], descending=True, stable=True).indices]
    shape = tuple(baseline.shape)
    found = []
    for place in places.tolist():
        if error[place] >= 0:
            index = [int(one) for one in torch.unravel_index(torch.tensor(place), shape)] if shape else []
            found.append([index, *(_value(side[place]) for side in flat)])
    return found


def _value(element: Tensor) -> Any:
    value = element.item()
    return str(value) if isinstance(value, complex) else value


def _binned(maxima: tuple[float, ...], step: int) -> Mapping[str, Any]:
    """Return the maxima of at most `_MOST_SLICES` pieces of an axis."""
    more = max(1, -(-len(maxima) // _MOST_SLICES))
    return {"step": step * more, "maxima": [max(maxima[at : at + more]) for at in range(0, len(maxima), more)]}


def _by_place(source: TensorSource) -> dict[tuple[int, int, str], Entry]:
    return {(entry.step, entry.rank, entry.site): entry for entry in source.entries}
