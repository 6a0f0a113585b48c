"""How recordings and dumps appear in notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from glassengine.recording.layout.layout import Entry, LeftOut
from glassengine.results import Summary
from glassengine.results.notebook import MAX_ROWS, card, needed

_STATISTICS = ("min", "mean", "median", "max", "std", "num_nan", "num_inf")


class _Tensors(Protocol):
    """What a recording and a dump have in common."""

    path: Path
    incomplete_because: str | None
    steps: list[int]

    @property
    def entries(self) -> Sequence[Entry]:
        """The tensors."""

    @property
    def left_out(self) -> Sequence[LeftOut]:
        """Those without values."""

    def summary(self, entry: Entry) -> Summary:
        """Return the statistics of one tensor."""


class Shown:
    """A card, and a data frame of the tensors, for what has these."""

    def _repr_html_(self: _Tensors) -> str:
        """Return what a notebook shows: the path, the steps, and the first tensors."""
        first = [self.entries[place] for place in range(min(MAX_ROWS, len(self.entries)))]
        steps = f"{len(self.steps):,}" + (f", {self.steps[0]} to {self.steps[-1]}" if self.steps else "")
        facts = {
            "path": self.path,
            "steps": steps,
            "tensors": f"{len(self.entries):,}, without values {len(self.left_out):,}",
            "incomplete": self.incomplete_because,
        }
        rows = [{"step": entry.step, "site": entry.site, "tensor": entry.describe()} for entry in first]
        return card(type(self).__name__, facts, rows, more=len(self.entries) - len(rows))

    def to_pandas(self: _Tensors, *, statistics: bool = False) -> Any:
        """Return a data frame with a row for each tensor.

        Args:
            statistics: Whether to add least, mean, median, largest value and so on, for which all values are read.

        Raises:
            UsageError: pandas is not installed (extra `notebook`).
            CorruptError: Values are damaged.
        """
        frame = needed("pandas").DataFrame
        rows = []
        for entry in self.entries:
            row: dict[str, Any] = {"step": entry.step, "rank": entry.rank, "site": entry.site, "dtype": entry.dtype}
            row |= {"shape": tuple(entry.shape), "nbytes": entry.nbytes}
            if statistics:
                found = self.summary(entry)
                row |= {name: getattr(found, name) for name in _STATISTICS}
            rows.append(row)
        return frame(rows, columns=None if rows else ["step", "rank", "site", "dtype", "shape", "nbytes"])
