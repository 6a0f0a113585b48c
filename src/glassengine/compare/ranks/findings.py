"""What is found of the tensors of a run of several processes while they are put together.

Of a step it depends on the step alone, and on what is put together before: who begins with nothing and goes the same
way finds the same.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from glassengine.compare.matching.source_wrapper import SourceWrapper, Told
from glassengine.compare.ranks.assembly import HOW, ROWS
from glassengine.recording.layout.layout import Entry
from glassengine.recording.read.source import TensorSource

if TYPE_CHECKING:
    from torch import Tensor

    from glassengine.compare.ranks.assembly import Assembly
    from glassengine.compare.ranks.spread import DataLayout

_Key = tuple[int, str]


class Findings(SourceWrapper):
    """How tensors are put together, by step and site.

    Args:
        source: Of several ranks.
    """

    is_assembled = True

    def __init__(self, source: TensorSource) -> None:
        super().__init__(source)
        self._begin()

    def _begin(self) -> None:
        self._expected: dict[_Key, tuple[TensorSource, Entry]] = {}
        self._arranged: dict[_Key, str] = {}
        self._ways: dict[_Key, Assembly] = {}
        self._rejected: set[_Key] = set()
        self._layouts: dict[int, DataLayout | None] = {}
        self._factors: dict[int, float] = {}
        self._styles: Counter[str] = Counter()
        self._told: dict[_Key, tuple[bool, bool]] = {}

    @property
    def arrangements(self) -> Mapping[str, int]:
        """How the tensors that were read were put together -> how many, most frequent first."""
        raise NotImplementedError

    @property
    def changes(self) -> Mapping[str, Any]:
        """That of the source, and how the tensors that were read were put together."""
        return {**super().changes, "arrangements": self.arrangements}

    def expect(self, entry: Entry, source: TensorSource, counterpart: Entry) -> None:
        """Note that the whole of `entry` is judged against `counterpart`, of `source`."""
        raise NotImplementedError

    def why_not(self, entry: Entry) -> str | None:
        """Return why the whole of `entry` cannot be assembled from its parts; None if it can."""
        raise NotImplementedError

    def reject(self, entry: Entry) -> None:
        """Note that shares of a sum or mean were never added up: each part is to be the whole."""
        raise NotImplementedError

    def errors_of_expected(self, entry: Entry) -> dict[int, float] | None:
        """Return how far what each rank has is from its place in the counterpart; None where that is not known."""
        raise NotImplementedError

    def assembly(self, entry: Entry) -> tuple[Assembly, Tensor | None]:
        """Return the parts of a tensor in their places."""
        raise NotImplementedError

    def fresh(self) -> Self:
        """Return the same, with nothing found yet."""
        found = copy.copy(self)
        found._begin()
        return found

    def told(self) -> list[Told]:
        """Return what was found of each tensor that was read."""
        return [Told(*key, how, *self._standing(key)) for key, how in self._arranged.items()]

    def note(self, told: Iterable[Told]) -> None:
        """Take over what a `fresh` one has `told`."""
        for one in told:
            key = one.step, one.site
            self._arranged[key], self._told[key] = one.how, (one.is_open, one.is_same)

    def standing(self, entry: Entry) -> tuple[bool, bool]:
        """Return whether a tensor is shares that are not added up yet, and whether all ranks have the same."""
        key = (entry.step, entry.site)
        if key in self._told:
            return self._told[key]
        if key not in self._ways:
            self.assembly(entry)
        return self._standing(key)

    def is_of_rows(self, entry: Entry) -> bool:
        """Whether each row of a tensor is in the rank whose share of a table has it."""
        self.standing(entry)
        return self._arranged.get((entry.step, entry.site)) == HOW[ROWS]

    def _standing(self, key: _Key) -> tuple[bool, bool]:
        way = self._ways[key]
        places = Counter(way.way.cells)
        return way.is_open, not way.differ and places.total() > 1 and max(places.values()) > 1
