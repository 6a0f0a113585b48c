"""A record of a server beside one of rows: [tokens, ...] of a forward for [1, tokens, ...], throughout.

Servers concatenate the tokens of what they run at once, and have no dimension for rows. Of one request both have the
same elements in the same order. One tensor that lacks a dimension is a mistake; a record that always does is flat.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from glassengine.recording.layout.layout import Entry
from glassengine.recording.read.source import TensorSource

if TYPE_CHECKING:
    from torch import Tensor

_LEAST, _SHARE = 4, 0.9


class InRows:
    """A flat record with a dimension for the one row.

    Args:
        source: The record.
        flat: Its tensors that get one.
    """

    def __init__(self, source: TensorSource, flat: Sequence[Entry]) -> None:
        self.path, self.complete = source.path, source.complete
        self.metadata: dict[str, Any] = source.metadata
        self.skipped = source.skipped
        self._source = source
        self._places = {dataclasses.replace(one, shape=(1, *one.shape), location=None): one for one in flat}
        taken = {one.place: made for made, one in self._places.items()}
        self.entries: Sequence[Entry] = tuple(taken.get(one.place, one) for one in source.entries)

    @property
    def arrangements(self) -> Mapping[str, int]:
        """What was done -> to how many tensors."""
        made, one = next(iter(self._places.items()))
        return {f"flat {list(one.shape)} for {list(made.shape)}": len(self._places)}

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`."""
        own = self._places.get(entry)
        return self._source.tensor(entry) if own is None else self._source.tensor(own)[None]


def in_rows(left: TensorSource, right: TensorSource) -> tuple[TensorSource, TensorSource]:
    """Return both sides of a comparison, a flat one beside one of a single row with a dimension for that."""
    flat = _flat(left, right)
    if flat:
        return left, InRows(right, flat)
    flat = _flat(right, left)
    return (InRows(left, flat), right) if flat else (left, right)


def _flat(rows: TensorSource, other: TensorSource) -> list[Entry]:
    """Return the tensors of `other` that lack the dimension of a row, where it is flat throughout; else none."""
    known = {one.place: one.shape for one in rows.entries}
    pairs = [(known[one.place], one) for one in other.entries if one.place in known]
    hidden = [(shape, one) for shape, one in pairs if len(shape) == 3 and shape[0] == 1]
    found = {one.site for shape, one in hidden if shape[1:] == one.shape}
    if len(found) < _LEAST or len(found) < _SHARE * len({one.site for _, one in hidden}):
        return []
    return [one for shape, one in pairs if shape == (1, *one.shape)]
