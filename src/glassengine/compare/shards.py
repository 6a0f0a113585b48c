"""Distributed tensors as torch spreads them over a mesh of processes: from the parts back to the whole."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from glassengine.recording.layout import Entry, Sharding

_SHARD = re.compile(r"S\((-?\d+)\)")
_REPLICATED, _SUM, _MEAN = "R", "P(sum)", "P(avg)"


def is_spread(parts: Sequence[Entry]) -> bool:
    """Return whether the parts of every rank say how the whole is spread."""
    return all(part.sharding is not None and part.sharding.coordinate for part in parts)


def why_not_assembled(parts: Sequence[Entry]) -> str | None:
    """Return why such parts cannot be put together; None where they can."""
    shardings = [part.sharding for part in parts if part.sharding is not None]
    first = shardings[0]
    if any((one.mesh, one.placements, one.shape) != (first.mesh, first.placements, first.shape) for one in shardings):
        return f"the ranks contradict each other: {'; '.join(dict.fromkeys(map(str, shardings)))}"
    places = {one.coordinate for one in shardings}
    if len(places) != math.prod(first.mesh) or len(places) != len(shardings):
        return f"recorded are {len(places)} of the {math.prod(first.mesh)} parts: {first}"
    found = [_SHARD.fullmatch(text) for text in first.placements]
    for text, shard in zip(first.placements, found, strict=True):
        if shard is None and text not in (_REPLICATED, _SUM, _MEAN):
            return f"parts that are placed as {text} cannot be put together"
        if shard is not None and not -len(first.shape) <= int(shard[1]) < len(first.shape):
            return f"impossible: {first}"
    return None


def assembled(
    parts: Sequence[tuple[int, Tensor, Sharding | None]],
) -> tuple[tuple[Tensor, ...], tuple[tuple[int, ...], ...]]:
    """Return every copy of the whole, one for each place along the dimensions of the mesh that replicate it.

    Args:
        parts: Rank, values and sharding, for which `why_not_assembled` is None.

    Returns:
        The copies, and the ranks of each.
    """
    sharding = next(sharding for _, _, sharding in parts if sharding is not None)
    placements, mesh = sharding.placements, sharding.mesh
    by_place = {tuple(one.coordinate): (rank, tensor) for rank, tensor, one in parts if one is not None}
    replicas = [range(size if text == _REPLICATED else 1) for text, size in zip(placements, mesh, strict=True)]
    wholes, ranks = [], []
    for replica in itertools.product(*replicas):
        chosen = {
            place: part
            for place, part in by_place.items()
            if all(
                text != _REPLICATED or at == wanted for at, wanted, text in zip(place, replica, placements, strict=True)
            )
        }
        ranks.append(tuple(rank for rank, _ in chosen.values()))
        wholes.append(_joined({place: tensor for place, (_, tensor) in chosen.items()}, placements))
    return tuple(wholes), tuple(ranks)


def _joined(by_place: dict[tuple[int, ...], Tensor], placements: Sequence[str]) -> Tensor:
    """Return one copy of the whole; torch splits along the first dimension of the mesh first, so it is joined last."""
    for axis in reversed(range(len(placements))):
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for place in sorted(by_place):
            groups.setdefault(place[:axis], []).append(by_place[place])
        by_place = {place: _join(placements[axis], group) for place, group in groups.items()}
    return by_place[()]


def _join(placement: str, parts: list[Tensor]) -> Tensor:
    shard = _SHARD.fullmatch(placement)
    if shard is not None:
        return torch.cat(parts, int(shard[1]))
    if placement == _REPLICATED:
        return parts[0]
    total = torch.stack(parts).sum(0, dtype=parts[0].dtype)
    return total / len(parts) if placement == _MEAN else total
