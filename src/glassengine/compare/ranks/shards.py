"""Distributed tensors as torch spreads them over a mesh of processes: from the parts back to the whole."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from glassengine.compare.ranks.spread import RankPart
from glassengine.recording.layout.layout import Entry, Sharding

if TYPE_CHECKING:
    from torch import Tensor

_SHARD = re.compile(r"_?S\((-?\d+)(?:, (\d+))?\)")
_REPLICATED, _SUM, _MEAN = "R", "P(sum)", "P(avg)"

Local = tuple[int, "Tensor", Sharding]
"""Rank, values and sharding of what one process has."""


def is_spread(parts: Sequence[Entry]) -> bool:
    """Return whether the parts of every rank say how the whole is spread."""
    return all(part.sharding is not None and part.sharding.coordinate for part in parts)


def meshes(parts: Sequence[Entry], groups: Mapping[int, int] | None = None) -> list[list[Entry]]:
    """Return the parts of each mesh: a run may have several, each of which spreads a tensor of its own.

    Args:
        parts: Of all ranks.
        groups: Rank -> which data it was given; ranks of one mesh that is not named have the same.
    """
    by_mesh: dict[tuple[object, ...], list[Entry]] = defaultdict(list)
    num_seen: dict[tuple[object, ...], int] = defaultdict(int)
    shardings = [part.sharding for part in parts if part.sharding is not None]
    is_one = len(parts) <= math.prod(shardings[0].mesh)
    for part, sharding in zip(parts, shardings, strict=True):
        if sharding.ranks:
            by_mesh[sharding.ranks].append(part)
        elif is_one:
            by_mesh[()].append(part)
        else:
            group = groups.get(part.rank) if groups is not None and len(set(groups.values())) > 1 else None
            place = (group, sharding.coordinate)
            by_mesh[group, num_seen[place]].append(part)
            num_seen[place] += 1
    return list(by_mesh.values())


def why_not_assembled(parts: Sequence[Entry]) -> str | None:
    """Return why the parts of one mesh cannot be put together; None where they can."""
    shardings = [part.sharding for part in parts if part.sharding is not None]
    first = shardings[0]
    if any((one.mesh, one.placements, one.shape) != (first.mesh, first.placements, first.shape) for one in shardings):
        return f"the ranks contradict each other: {'; '.join(dict.fromkeys(map(str, shardings)))}"
    places = {one.coordinate for one in shardings}
    if len(places) != math.prod(first.mesh) or len(places) != len(shardings):
        return f"recorded are {len(places)} of the {math.prod(first.mesh)} parts: {first}"
    for text in first.placements:
        shard = _SHARD.fullmatch(text)
        if shard is None and text not in (_REPLICATED, _SUM, _MEAN):
            return f"parts that are placed as {text} cannot be put together"
        if shard is not None and not -len(first.shape) <= int(shard[1]) < len(first.shape):
            return f"impossible: {first}"
    return (
        None if _order(first) is not None else f"parts that are placed as {first.placements[0]} cannot be put together"
    )


def assembled(parts: Sequence[Local]) -> tuple[RankPart, ...]:
    """Return every copy of the whole, one for each place along the dimensions of the mesh that replicate it.

    Args:
        parts: Of one mesh, for which `why_not_assembled` is None.
    """
    sharding = parts[0][2]
    placements, mesh = sharding.placements, sharding.mesh
    by_place = {tuple(one.coordinate): (rank, tensor) for rank, tensor, one in parts}
    replicas = [range(size if text == _REPLICATED else 1) for text, size in zip(placements, mesh, strict=True)]
    found = []
    for replica in itertools.product(*replicas):
        chosen = {
            place: part
            for place, part in by_place.items()
            if all(
                text != _REPLICATED or at == wanted for at, wanted, text in zip(place, replica, placements, strict=True)
            )
        }
        whole = _joined({place: tensor for place, (_, tensor) in chosen.items()}, sharding)
        found.append(RankPart(tuple(rank for rank, _ in chosen.values()), whole))
    return tuple(found)


def owners(parts: Sequence[Local]) -> Tensor | None:
    """Return which rank each element of one copy is from, given its parts; None where ranks add up to it."""
    import torch

    if any(text in (_SUM, _MEAN) for text in parts[0][2].placements):
        return None
    named = [(rank, torch.full(tensor.shape, rank), _first_copy(one)) for rank, tensor, one in parts]
    return assembled(named)[0].tensor


def _first_copy(sharding: Sharding) -> Sharding:
    """Return the place of a process in a mesh without the dimensions that replicate."""
    is_copy = [text == _REPLICATED for text in sharding.placements]
    mesh = tuple(1 if copy else size for copy, size in zip(is_copy, sharding.mesh, strict=True))
    at = tuple(0 if copy else place for copy, place in zip(is_copy, sharding.coordinate, strict=True))
    return dataclasses.replace(sharding, mesh=mesh, coordinate=at, ranks=())


def _order(sharding: Sharding) -> list[int] | None:
    """Return in which order the dimensions of the mesh are joined; None where that is unknown.

    torch splits along the first dimension of the mesh first, so it is joined last. One that says by how many shares of
    later dimensions it was split, was split after them.
    """
    found = [_SHARD.fullmatch(text) for text in sharding.placements]
    strided = [axis for axis, shard in enumerate(found) if shard is not None and shard[2] is not None]
    for axis in strided:
        shard = found[axis]
        assert shard is not None
        later = [
            size
            for other, size in zip(found[axis + 1 :], sharding.mesh[axis + 1 :], strict=True)
            if other is not None and other[1] == shard[1]
        ]
        if math.prod(later) != int(shard[2]):
            return None
    return [*strided, *(axis for axis in reversed(range(len(found))) if axis not in strided)]


def _joined(by_place: dict[tuple[int, ...], Tensor], sharding: Sharding) -> Tensor:
    """Return one copy of the whole."""
    for axis in _order(sharding) or ():
        groups: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for place in sorted(by_place):
            groups[*place[:axis], 0, *place[axis + 1 :]].append(by_place[place])
        by_place = {place: _join(sharding.placements[axis], group) for place, group in groups.items()}
    (whole,) = by_place.values()
    return whole


def _join(placement: str, parts: list[Tensor]) -> Tensor:
    import torch

    shard = _SHARD.fullmatch(placement)
    if shard is not None:
        return torch.cat(parts, int(shard[1]))
    if placement == _REPLICATED:
        return parts[0]
    total = torch.stack(parts).sum(0, dtype=parts[0].dtype)
    return total / len(parts) if placement == _MEAN else total
