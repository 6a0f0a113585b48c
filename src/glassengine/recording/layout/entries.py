"""The tensors of a recording as sequences that make an entry when it is asked for.

A million steps have millions of tensors, and few of them are looked at: what differs between steps is kept in columns,
28 bytes for each block, and what does not, once for each group.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from glassengine.recording.layout.layout import (
    ADDED,
    ADDED_AXIS,
    AddedRows,
    Entry,
    LeftOut,
    LightStatistics,
    Location,
    num_bytes,
)
from glassengine.results.base import Item, Lazy

Array = np.typing.NDArray[Any]
_AT_ONCE = 1 << 12
_FEW_BLOCKS = 64
_MOST_KEPT = 1 << 16
"""Entries, of half a kilobyte each, that are kept once all of them were asked for: who compares asks several times."""


@dataclass(frozen=True)
class Described:
    """Tensors that are contiguous wherever they are written."""

    tensors: tuple[Entry, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[Entry]) -> Described:
        """Return the group of `tensors`, each of which has a place."""
        return cls(tuple(tensors), max(t.location.offset + t.nbytes for t in tensors if t.location is not None))

    @functools.cached_property
    def places(self) -> dict[tuple[str, int], int]:
        """(site, rank) -> index."""
        return {(tensor.site, tensor.rank): index for index, tensor in enumerate(self.tensors)}

    @functools.cached_property
    def parts(self) -> list[tuple[dict[str, Any], int]]:
        """What is the same of each tensor in every step, and where in a block it is."""
        return [
            (dict(vars(tensor)), 0 if tensor.location is None else tensor.location.offset) for tensor in self.tensors
        ]

    def named(self) -> Described:
        """Return the group with the rows that a step adds under the name of the tensor that they are added to."""
        if not any(ADDED_AXIS in tensor.axes for tensor in self.tensors):
            return self
        return Described(tuple(map(_named, self.tensors)), self.nbytes)

    def only(self, keep: Callable[[str], bool]) -> Described:
        """Return the group of the tensors whose site is to be kept; the block stays as large as it is."""
        return Described(tuple(tensor for tensor in self.tensors if keep(tensor.site)), self.nbytes)

    def of_rank(self, rank: int) -> Described:
        """Return the same group in another rank."""
        return Described(tuple(replace(tensor, rank=rank) for tensor in self.tensors), self.nbytes)


def _named(tensor: Entry) -> Entry:
    axes = dict(tensor.axes)
    axis = axes.pop(ADDED_AXIS, None)
    if axis is None or not tensor.site.endswith(ADDED):
        return tensor
    added = AddedRows(axis, tensor.shape, tensor.rank)
    return replace(tensor, site=tensor.site.removesuffix(ADDED), axes=axes, added=added)


@dataclass(frozen=True)
class Columns:
    """Blocks: the index of the group of each, and where in which step and shard it is. Ascending by step."""

    group: Array
    step: Array
    shard: Array
    offset: Array
    checksum: Array

    def at(self, which: Array | slice) -> Columns:
        """Return some of the blocks: by a mask or by their numbers."""
        return Columns(*(getattr(self, field.name)[which] for field in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[Columns]) -> Columns:
        """Return the blocks of all of `parts`."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


class Entries(Lazy[Entry]):
    """The tensors of a recording, ascending by step."""

    def __init__(self, groups: Sequence[Described], columns: Columns) -> None:
        self._groups = groups
        self._columns = columns
        sizes = np.array([len(group.tensors) for group in groups], dtype=np.int64)
        counts = sizes[columns.group] if len(groups) else np.empty(0, dtype=np.int64)
        self._first = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        self._kept: tuple[Entry, ...] | None = None
        self._named: tuple[int, dict[tuple[str, int], Entry]] | None = None
        self._rows: dict[tuple[str, int], tuple[Array, Array]] = {}

    def __len__(self) -> int:
        """Return the number of tensors."""
        return int(self._first[-1])

    def __iter__(self) -> Iterator[Entry]:
        """Yield every tensor."""
        if len(self) > _MOST_KEPT:
            return self._of_blocks(0, len(self._first) - 1)
        if self._kept is None:
            self._kept = tuple(self._of_blocks(0, len(self._first) - 1))
        return iter(self._kept)

    def of_step(self, step: int) -> list[Entry]:
        """Return the tensors of one step."""
        return list(self._of_blocks(*self._blocks_of(step)))

    def find(self, site: str, step: int, rank: int) -> Entry | None:
        """Return the tensor of one name in one step."""
        first, end = self._blocks_of(step)
        if end - first > _FEW_BLOCKS:
            return self._by_name(step).get((site, rank))
        for block in range(first, end):
            index = self._groups[self._columns.group[block]].places.get((site, rank))
            if index is not None:
                return self._item(int(self._first[block]) + index)
        return None

    def steps_of(self, site: str, rank: int) -> list[int]:
        """Return the steps that have a tensor of this name."""
        having = [number for number, group in enumerate(self._groups) if (site, rank) in group.places]
        found: list[int] = self._columns.step[np.isin(self._columns.group, having)].tolist()
        return found

    def sites(self, step: int | None = None) -> list[str]:
        """Return the names in recorded order, of one step or of all."""
        first, end = (0, len(self._first) - 1) if step is None else self._blocks_of(step)
        numbers, places = np.unique(self._columns.group[first:end], return_index=True)
        ordered = numbers[np.argsort(places)].tolist()
        return list(dict.fromkeys(tensor.site for number in ordered for tensor in self._groups[number].tensors))

    def filtered(self, keep: Callable[[str], bool]) -> Entries:
        """Return the tensors of some names; each name is looked at once."""
        known = functools.cache(keep)
        groups = [group.only(known) for group in self._groups]
        empty = [number for number, group in enumerate(groups) if not group.tensors]
        return Entries(groups, self._columns.at(~np.isin(self._columns.group, empty)) if empty else self._columns)

    def with_steps_of(self, other: Entries) -> Entries:
        """Return these tensors and those of steps that only another part of the same recording has."""
        columns = replace(other._columns, group=other._columns.group + len(self._groups))
        joined = Columns.joined([self._columns, columns.at(~np.isin(columns.step, self._columns.step))])
        return Entries([*self._groups, *other._groups], joined.at(np.argsort(joined.step, kind="stable")))

    @classmethod
    def of_ranks(cls, parts: Mapping[int, Entries]) -> Entries:
        """Return the tensors of several recordings, each of a rank of its own, ascending by step and rank."""
        groups: list[Described] = []
        columns: list[Columns] = []
        ranks: list[Array] = []
        for rank, part in parts.items():
            columns.append(replace(part._columns, group=part._columns.group + len(groups)))
            groups += [group.of_rank(rank) for group in part._groups]
            ranks.append(np.full(len(part._columns.step), rank, dtype=np.int64))
        joined = Columns.joined(columns)
        return cls(groups, joined.at(np.lexsort((np.concatenate(ranks), joined.step))))

    def _by_name(self, step: int) -> dict[tuple[str, int], Entry]:
        """Return the tensors of a step of many blocks; those of the last one are kept."""
        found = self._named  # another thread may be at another step
        if found is None or found[0] != step:
            self._named = found = step, {(entry.site, entry.rank): entry for entry in self.of_step(step)}
        return found[1]

    def _blocks_of(self, step: int) -> tuple[int, int]:
        steps = self._columns.step
        return int(np.searchsorted(steps, step)), int(np.searchsorted(steps, step, "right"))

    def _item(self, place: int) -> Entry:
        block = int(np.searchsorted(self._first, place, "right")) - 1
        index = place - int(self._first[block])
        return next(self._of_blocks(block, block + 1, slice(index, index + 1)))

    def _of_blocks(self, first: int, end: int, which: slice = slice(None)) -> Iterator[Entry]:
        columns = self._columns
        for start in range(first, end, _AT_ONCE):
            some = slice(start, min(end, start + _AT_ONCE))
            numbers, steps, shards = (
                columns.group[some].tolist(),
                columns.step[some].tolist(),
                columns.shard[some].tolist(),
            )
            offsets, checksums = columns.offset[some].tolist(), columns.checksum[some].tolist()
            for number, step, shard, offset, checksum in zip(numbers, steps, shards, offsets, checksums, strict=True):
                group = self._groups[number]
                block = (
                    (offset, group.nbytes)
                    if len(group.tensors) > 1 or group.nbytes != group.tensors[0].nbytes
                    else None
                )
                for part, place in group.parts[which]:
                    # The fields are those of an entry that was validated; a frozen dataclass takes ten times as long.
                    entry = object.__new__(Entry)
                    vars(entry).update(part, step=step, location=Location(shard, offset + place, checksum, block))
                    yield entry if entry.added is None else self._whole(entry)

    def _whole(self, rows: Entry) -> Entry:
        """Return the tensor to which `rows` are added; the rows alone where the step before does not have it."""
        added = rows.added
        assert added is not None
        steps, counts = self._counts(rows.site, rows.rank)
        count = int(counts[np.searchsorted(steps, rows.step)])
        shape = (*rows.shape[: added.axis], count or rows.shape[added.axis], *rows.shape[added.axis + 1 :])
        added = replace(added, location=rows.location)
        return replace(rows, shape=shape, nbytes=num_bytes(rows.dtype, shape), location=None, added=added)

    def _counts(self, site: str, rank: int) -> tuple[Array, Array]:
        """Return the steps of a tensor that grows, and its rows in each; 0 where the first of them are missing."""
        found = self._rows.get((site, rank))
        if found is None:
            own = {
                number: group.places[site, rank]
                for number, group in enumerate(self._groups)
                if (site, rank) in group.places
            }
            tensors = {number: self._groups[number].tensors[index] for number, index in own.items()}
            axis = next(tensor.added.axis for tensor in tensors.values() if tensor.added is not None)
            which = np.isin(self._columns.group, list(own))
            steps, numbers = self._columns.step[which], self._columns.group[which].tolist()
            # Of a damaged file: what has no such axis is no base, as reading will find.
            shapes = {number: tensor.shape for number, tensor in tensors.items()}
            sizes = {number: shape[axis] if axis < len(shape) else 0 for number, shape in shapes.items()}
            counts = np.array([sizes[number] for number in numbers], dtype=np.int64)
            is_first = np.array([tensors[number].added is None for number in numbers])
            is_lost = ~is_first & (np.diff(steps, prepend=-1) != 1)
            sums = np.cumsum(counts)
            start = np.maximum.accumulate(np.where(is_first | is_lost, np.arange(len(sums)), 0))
            totals = sums - sums[start] + counts[start]
            found = self._rows[site, rank] = steps, np.where(is_lost[start], 0, totals)
        return found


@dataclass(frozen=True)
class Measured:
    """Tensors of one group in one step of which statistics were taken in place of the values.

    Attributes:
        tensors: What they are.
        step: The step.
        reason: Why their values are not there.
        rows: little-endian float64[3, tensors]: minima, maxima (NaN where nothing finite is left), norms.
        num_nonfinite: Index -> elements that are not finite, where there are any.
    """

    tensors: Sequence[Entry]
    step: int
    reason: str
    rows: bytes
    num_nonfinite: Mapping[int, int]

    def item(self, index: int) -> LeftOut:
        """Return one of them."""
        tensor, count = self.tensors[index], len(self.tensors)
        low, high, norm = (float(np.frombuffer(self.rows, "<f8", 1, 8 * (index + row * count))[0]) for row in range(3))
        nothing = math.isnan(low)
        num_nonfinite = self.num_nonfinite.get(index, 0)
        light = LightStatistics(None if nothing else low, None if nothing else high, norm, num_nonfinite)
        return LeftOut(tensor.site, self.step, tensor.rank, self.reason, tensor.dtype, tensor.shape, light)

    def __len__(self) -> int:
        """Return how many they are."""
        return len(self.tensors)


class LeftOuts(Lazy[LeftOut]):
    """Tensors without values, ascending by step.

    Args:
        parts: Each alone, or those of a group.
        ranks: Of each part, where that is another one than it says.
    """

    def __init__(self, parts: Iterable[LeftOut | Measured], ranks: Sequence[int] | None = None) -> None:
        self._parts = list(parts)
        self._ranks = ranks
        counts = [len(part) if isinstance(part, Measured) else 1 for part in self._parts]
        self._first = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])

    def __len__(self) -> int:
        """Return the number of tensors."""
        return int(self._first[-1])

    def __iter__(self) -> Iterator[LeftOut]:
        """Yield every tensor."""
        for number, part in enumerate(self._parts):
            for index in range(len(part) if isinstance(part, Measured) else 1):
                yield self._made(number, index)

    def filtered(self, keep: Callable[[str], bool]) -> list[LeftOut]:
        """Return the tensors of some names; each name is looked at once."""
        known = functools.cache(keep)
        return [item for item in self if known(item.site)]

    def with_steps_of(self, other: LeftOuts) -> LeftOuts:
        """Return these and those of steps that only another part of the same recording has."""
        known = {part.step for part in self._parts}
        parts = [*self._parts, *(part for part in other._parts if part.step not in known)]
        return LeftOuts(sorted(parts, key=lambda part: part.step))

    @classmethod
    def of_ranks(cls, parts: Mapping[int, LeftOuts]) -> LeftOuts:
        """Return those of several recordings, each of a rank of its own, ascending by step and rank."""
        both = [(part.step, rank, part) for rank, found in parts.items() for part in found._parts]
        both.sort(key=lambda one: one[:2])
        return cls([part for _, _, part in both], [rank for _, rank, _ in both])

    def _item(self, place: int) -> LeftOut:
        number = int(np.searchsorted(self._first, place, "right")) - 1
        return self._made(number, place - int(self._first[number]))

    def _made(self, number: int, index: int) -> LeftOut:
        part = self._parts[number]
        item = part.item(index) if isinstance(part, Measured) else part
        return item if self._ranks is None else replace(item, rank=self._ranks[number])


class Mapped(Lazy[Item]):
    """What a function makes of each item of a sequence."""

    def __init__(self, function: Callable[[Any], Item], items: Sequence[Any]) -> None:
        self._function = function
        self._items = items

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        """Yield every item."""
        return map(self._function, self._items)

    def _item(self, place: int) -> Item:
        return self._function(self._items[place])
