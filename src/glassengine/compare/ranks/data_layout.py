"""Derives the rows and positions of the inputs that each process was given, from the inputs themselves.

The inputs of the model are exact copies of parts of the whole inputs: of consecutive rows, of every n-th one, or of the
first and the last of what is left, as long sequences are dealt out so that all have as much to attend to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from glassengine.compare.ranks.spread import DataLayout, take

if TYPE_CHECKING:
    from torch import Tensor

_NUM_AXES = 2
"""Data lies along the first dimensions of the inputs: rows and positions."""


def data_layout(inputs: Sequence[tuple[Tensor, Mapping[int, Tensor]]]) -> DataLayout | None:
    """Return who was given what.

    Args:
        inputs: Of each input of the model: the whole, and the part of each rank.

    Returns:
        None where the parts are not copies of regular parts of the whole.
    """
    inputs = [(whole, parts) for whole, parts in inputs if whole.dim() and len(parts) > 1]
    if not inputs:
        return None
    # The most dimensions are the most informative; a mask may have no rows.
    leading, _ = max(inputs, key=lambda one: (min(one[0].dim(), _NUM_AXES), one[0].shape[:_NUM_AXES]))
    sizes = tuple(leading.shape[:_NUM_AXES])
    ranks = sorted(set.intersection(*(set(parts) for _, parts in inputs)))
    usable = [
        (whole, {rank: parts[rank] for rank in ranks})
        for whole, parts in inputs
        if tuple(whole.shape[: len(sizes)]) == sizes and all(parts[rank].dim() == whole.dim() for rank in ranks)
    ]
    if not usable or len(ranks) < 2:
        return None
    counts = _counts(usable, sizes)
    if counts is None:
        return _by_content(usable, sizes)  # ranks with different numbers of rows
    if math.prod(counts) == 1:
        is_same = all(_bytes(part) == _bytes(whole) for whole, parts in usable for part in parts.values())
        all_of_it: tuple[Tensor | None, ...] = (None,) * len(sizes)
        return DataLayout(sizes, dict.fromkeys(ranks, all_of_it), dict.fromkeys(ranks, 0)) if is_same else None
    if len(ranks) % math.prod(counts):
        return None
    keys = {rank: tuple(_bytes(parts[rank]) for _, parts in usable) for rank in ranks}
    for ways in itertools.product(*(_WAYS if count > 1 else _WAYS[:1] for count in counts)):
        places = list(itertools.product(*(range(count) for count in counts)))
        index = {
            place: tuple(
                None if count == 1 else way(at, count, size)
                for way, at, count, size in zip(ways, place, counts, sizes, strict=True)
            )
            for place in places
        }
        there = {
            place: tuple(_bytes(take(whole, (*at, *[None] * (whole.dim() - len(at))))) for whole, _ in usable)
            for place, at in index.items()
        }
        for spread in _spreads(len(ranks), counts):
            if all(keys[rank] == there[place] for rank, place in zip(ranks, spread, strict=True)):
                numbers = {place: i for i, place in enumerate(places)}
                return DataLayout(
                    sizes,
                    {rank: index[place] for rank, place in zip(ranks, spread, strict=True)},
                    {rank: numbers[place] for rank, place in zip(ranks, spread, strict=True)},
                )
    return _by_content(usable, sizes) if math.prod(counts) == counts[0] else None


def spreads_of_inputs(
    ranks: Sequence[int], shape: Sequence[int], whole: Sequence[int]
) -> Iterator[dict[int, tuple[Tensor | None, ...]]]:
    """Yield which rows and positions each rank may have of inputs of a shape; None where it has all."""
    sizes = tuple(whole[:_NUM_AXES])
    counts = [size // own if own else 1 for size, own in zip(sizes, shape, strict=False)]
    if len(ranks) % math.prod(counts):
        return
    for ways in itertools.product(*(_WAYS if count > 1 else _WAYS[:1] for count in counts)):
        for spread in _spreads(len(ranks), counts):
            yield {
                rank: tuple(
                    None if count == 1 else way(at, count, size)
                    for way, at, count, size in zip(ways, place, counts, sizes, strict=True)
                )
                for rank, place in zip(ranks, spread, strict=True)
            }


def with_other_stages(layout: DataLayout, ranks: Iterable[int]) -> DataLayout:
    """Return the layout with all ranks of a run: other stages of a pipeline have the same rows in the same order."""
    first = sorted(layout.groups)
    of_rank, groups = dict(layout.of_rank), dict(layout.groups)
    others = sorted(set(ranks) - set(first))
    if first and len(others) % len(first) == 0:
        for i, rank in enumerate(others):
            of_rank[rank], groups[rank] = of_rank[first[i % len(first)]], groups[first[i % len(first)]]
    return DataLayout(layout.sizes, of_rank, groups)


def _by_content(usable: Sequence[tuple[Tensor, Mapping[int, Tensor]]], sizes: tuple[int, ...]) -> DataLayout | None:
    """Return who has which rows where they are dealt out in any order; None where rows are alike, or one is missing."""
    import torch

    rows = {_row(usable, i): i for i in range(sizes[0])}
    ranks = sorted(usable[0][1])
    rows_of: dict[int, tuple[int | None, ...]] = {}
    for rank in ranks:
        own = [(whole, {rank: parts[rank]}) for whole, parts in usable]
        rows_of[rank] = tuple(rows.get(_row(own, i, rank)) for i in range(own[0][1][rank].shape[0]))
    groups = {at: number for number, at in enumerate(dict.fromkeys(rows_of.values()))}
    dealt = [row for at in groups for row in at]
    if (
        len(rows) < sizes[0]
        or None in dealt
        or sorted(row for row in dealt if row is not None) != list(range(sizes[0]))
    ):
        return None
    others: tuple[None, ...] = (None,) * (len(sizes) - 1)
    return DataLayout(
        sizes,
        {rank: (torch.tensor(at), *others) for rank, at in rows_of.items()},
        {rank: groups[at] for rank, at in rows_of.items()},
    )


def _row(
    usable: Sequence[tuple[Tensor, Mapping[int, Tensor]]], row: int, rank: int | None = None
) -> tuple[object, ...]:
    """Return what all inputs of a row are, of the whole or of a rank."""
    return tuple(_bytes((whole if rank is None else parts[rank])[row]) for whole, parts in usable)


def _counts(usable: Sequence[tuple[Tensor, Mapping[int, Tensor]]], sizes: tuple[int, ...]) -> list[int] | None:
    """Return into how many parts each dimension of the data is cut."""
    found = []
    for axis, size in enumerate(sizes):
        own = {part.shape[axis] for _, parts in usable for part in parts.values()}
        if len(own) != 1 or not (one := own.pop()) or size % one:
            return None
        found.append(size // one)
    return found


def _spreads(num_ranks: int, counts: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """Yield which place each rank may have, in order of rank: those that have the same beside one another first."""
    axes = [*enumerate(counts), (-1, num_ranks // math.prod(counts))]
    for order in itertools.permutations(axes):
        spread = []
        for number in range(num_ranks):
            at = {}
            for axis, size in reversed(order):
                number, at[axis] = divmod(number, size)
            spread.append(tuple(at[axis] for axis in range(len(counts))))
        yield spread


def _block(at: int, count: int, size: int) -> Tensor:
    import torch

    one = size // count
    return torch.arange(at * one, (at + 1) * one)


def _zigzag(at: int, count: int, size: int) -> Tensor:
    import torch

    if size % (2 * count):
        return _block(at, count, size)
    return torch.cat([_block(at, 2 * count, size), _block(2 * count - 1 - at, 2 * count, size)])


def _every(at: int, count: int, size: int) -> Tensor:
    import torch

    return torch.arange(at, size, count)


_WAYS: tuple[Callable[[int, int, int], Tensor], ...] = (_block, _zigzag, _every)


def _bytes(tensor: Tensor) -> tuple[tuple[int, ...], bytes]:
    import torch

    plain = tensor.detach().contiguous()
    return tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy().tobytes()
