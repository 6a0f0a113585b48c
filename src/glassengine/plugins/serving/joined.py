"""Joins the recordings of a server's ranks to one of a single process.

A table says which tensors are parts (`Table.ranks`): heads side by side, the parts of fused projections, halves of gate
and up; where there are more ranks than key heads, some have the same one. Everything else is a copy in every rank. A
rank whose copies are others than those of the first is judged on its own, with its copies and the parts of all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glassengine.errors import CorruptError
from glassengine.recording.layout.layout import Entry
from glassengine.recording.read.source import TensorSource
from glassengine.sites import matches

WAYS = ("side by side", "keys", "qkv", "halves")


class JoinedRanks:
    """The recording of a server as one of its ranks has it, with the parts of the others.

    Args:
        sources: Of the ranks, in order.
        rank: Whose copies are taken.
        ways: Pattern of names -> one of `WAYS`.
        numbers: Of the checkpoint, as `alignment.numbers_of`.

    Raises:
        CorruptError: The ranks have not run the same forwards.
    """

    def __init__(
        self, sources: Sequence[TensorSource], rank: int, ways: Mapping[str, str], numbers: Mapping[str, int | None]
    ) -> None:
        own = sources[rank]
        forwards = [[[_identity(part) for part in one] for one in source.metadata["forwards"]] for source in sources]
        if any(one != forwards[0] for one in forwards[1:]):
            raise CorruptError("the ranks have not run the same forwards", got=str(own.path))
        self.path: Path = own.path
        self.complete = own.complete
        self.skipped = own.skipped
        settings = {**own.metadata["settings"], "world": 1}
        self.metadata: dict[str, Any] = {**own.metadata, "settings": settings, "rank": rank}
        self._sources = sources
        self._rank = rank
        self._heads, self._kv_heads = numbers["heads"] or 1, numbers["kv_heads"] or 1
        self._found = [{(one.site, one.step): one for one in source.entries} for source in sources]
        self._ways: dict[Entry, str | None] = {}
        # What the first rank alone has, the scores above all, is everybody's.
        for place in dict.fromkeys([*self._found[rank], *self._found[0]]):
            one = self._found[rank].get(place) or self._found[0][place]
            way = next((way for pattern, way in ways.items() if matches(pattern, one.site)), None)
            parts = [found[place].shape for found in self._found if place in found]
            if way is not None and (len(parts) < len(sources) or len(set(parts)) > 1 or not one.shape):
                continue
            shape = one.shape if way is None else self._whole(way, one.shape)
            if shape is not None:
                nbytes = one.nbytes // max(1, one.shape[-1]) * shape[-1] if one.shape else one.nbytes
                self._ways[dataclasses.replace(one, rank=0, shape=shape, nbytes=nbytes, location=None)] = way
        self.entries: Sequence[Entry] = tuple(self._ways)

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`."""
        way, place = self._ways[entry], (entry.site, entry.step)
        if way is None:
            rank = self._rank if place in self._found[self._rank] else 0
            return self._sources[rank].tensor(self._found[rank][place])
        parts = [source.tensor(found[place]) for source, found in zip(self._sources, self._found, strict=True)]
        made = self._joined(way, parts)
        if tuple(made.shape) != entry.shape:
            raise CorruptError("a file changed while it was being read", got=f"{self.path}: {entry.site}")
        return made

    def is_as(self, other: JoinedRanks) -> bool:
        """Whether the copies of two ranks are the same."""
        places = [(entry.site, entry.step) for entry, way in self._ways.items() if way is None]
        pairs = [(self._found[self._rank].get(place), other._found[other._rank].get(place)) for place in places]
        mine, theirs = self._sources[self._rank], other._sources[other._rank]
        return all(a is None or b is None or torch.equal(mine.tensor(a), theirs.tensor(b)) for a, b in pairs)

    @property
    def _apart(self) -> int:
        """Of how many ranks in a row each has the same key heads."""
        return max(1, len(self._sources) // self._kv_heads)

    def _whole(self, way: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of what parts of a shape make; None where they do not fit."""
        try:
            return tuple(self._joined(way, [torch.empty(shape, device="meta")] * len(self._sources)).shape)
        except (RuntimeError, ValueError):
            return None

    def _joined(self, way: str, parts: Sequence[Tensor]) -> Tensor:
        # Heads of their own are a dimension: [tokens, heads, size]; else they are in the last one.
        dim = 1 if parts[0].dim() == 3 else -1
        if way == "side by side":
            return torch.cat(list(parts), dim)
        if way == "keys":
            return torch.cat(list(parts[:: self._apart]), dim)
        if way == "halves":
            halves = zip(*(part.chunk(2, -1) for part in parts), strict=True)
            return torch.cat([torch.cat(one, -1) for one in halves], -1)
        queries = self._heads // len(parts)
        keys = max(1, self._kv_heads // len(parts))
        size = parts[0].shape[-1] // (queries + 2 * keys)
        sizes = [queries * size, keys * size, keys * size]
        split = [part.split_with_sizes(sizes, -1) for part in parts]
        kept = split[:: self._apart]
        return torch.cat([*(one[0] for one in split), *(one[1] for one in kept), *(one[2] for one in kept)], -1)


def of_ranks(
    sources: Sequence[TensorSource], ways: Mapping[str, str], numbers: Mapping[str, int | None]
) -> list[TensorSource]:
    """Return a server's recording for each rank that has copies of its own; for one rank, what it is."""
    if len(sources) == 1:
        return list(sources)
    made = [JoinedRanks(sources, rank, ways, numbers) for rank in range(len(sources))]
    return [made[0], *(one for one in made[1:] if not one.is_as(made[0]))]


def _identity(part: Mapping[str, Any]) -> tuple[Any, ...]:
    return part.get("start"), part.get("length"), tuple(part.get("prompt") or ())
