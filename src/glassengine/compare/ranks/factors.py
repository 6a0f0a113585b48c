"""By which factor gradients differ that ranks have of rows of their own."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from glassengine.compare.ranks.assembly import Assembly
from glassengine.compare.ranks.samples import factor_of
from glassengine.compare.ranks.spread import DataLayout

if TYPE_CHECKING:
    from torch import Tensor

_SAME_FACTOR = 0.02


def factor_of_rows(known: Sequence[tuple[Assembly, Tensor]], num_groups: int | None, of_whole: int = 1) -> float:
    """Return the number of ranks with rows of their own, if gradients are that many times the whole's; else 1.

    Args:
        known: Gradients of activations of such ranks, and their counterparts.
        num_groups: How many groups of ranks were given different data; None where the inputs do not tell.
        of_whole: Of how many such groups the counterparts are.
    """
    found: dict[tuple[int, ...], list[float]] = defaultdict(list)
    counts: Counter[int] = Counter()
    for assembly, reference in known:
        if assembly.differ:
            continue
        if assembly.way.whole:
            counts[-(-assembly.way.whole[0] // max(1, *(part.tensor.shape[0] for part in assembly.parts)))] += 1
        for i, part in enumerate(assembly.parts):
            factor = factor_of(part.tensor, assembly.place(i, reference))
            if factor is not None:
                found[part.ranks].append(factor)
    if not found or not counts:
        return 1
    count = (counts.most_common(1)[0][0] if num_groups is None else num_groups) / of_whole
    # One rank with such gradients shows what those of the others are to be.
    middles = map(statistics.median, found.values())
    return count if any(abs(middle - count) <= _SAME_FACTOR * count for middle in middles) else 1


def lies_in_rows(assembly: Assembly, layout: DataLayout) -> bool:
    """Whether each part is of rows or positions that its ranks were given, or of some of these: others share them."""
    way = assembly.way
    if way.by_data:
        return True
    given = [layout.positions(part.ranks) for part in assembly.parts]
    for dim in way.dims:
        for axis, size in enumerate(layout.sizes):
            there = [None if at is None else at[axis] for at in given]
            if way.whole[dim] != size or any(at is None for at in there):
                continue
            places = [index[dim] for index in way.index]
            if all(
                own is not None and at is not None and set(own.tolist()) <= set(at.tolist())
                for own, at in zip(places, there, strict=True)
            ):
                return True
    return False
