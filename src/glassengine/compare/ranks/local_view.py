"""Maps what one process has to the whole model: names of modules, results of stages, rows and positions of inputs.

A stage of a pipeline, or a process with some of the experts, may count its modules from 0. Which of the whole they are
is derived from the tensors, otherwise from the order of the ranks. What a stage itself gets and gives is what its first
module gets, or what the next stage gets: it is judged there, and no part of the whole's inputs and results.

The inputs of the model are exact copies of parts of the whole inputs: of consecutive rows, of every n-th one, or of the
first and the last of what is left, as long sequences are dealt out so that all have as much to attend to.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glassengine.compare.matching.sources import path_of, paths_above, phase_of
from glassengine.compare.ranks.spread import DataLayout, agreement, share_of_sample, take
from glassengine.recording.layout.layout import Entry
from glassengine.recording.source import TensorSource
from glassengine.sites import ROOT

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.:@])")
_SECOND = f"{ROOT}@1"
_MAX_EVIDENCE = 12
"""Tensors that are looked at to tell which modules a process has."""


@dataclass
class LocalNames:
    """What is called otherwise.

    Attributes:
        offsets: (rank, list of modules) -> what is added to its numbers.
        of_stages: (rank, step, site) of what is judged under another name.
        is_called_twice: Whether a wrapper calls the model for something that calls the model in its turn, as Lightning
            does with a training step: the inner call is that of the whole.
    """

    offsets: dict[tuple[int, str], int] = field(default_factory=dict)
    of_stages: set[tuple[int, int, str]] = field(default_factory=set)
    is_called_twice: bool = False

    def of(self, rank: int, site: str) -> str:
        """Return the whole's name for a site of a rank."""
        if self.is_called_twice and site.startswith(_SECOND):
            site = ROOT + site.removeprefix(_SECOND)
        return _renumbered(site, lambda pattern: self.offsets.get((rank, pattern), 0)) if self.offsets else site

    def parts(self, source: TensorSource) -> dict[tuple[int, str], list[Entry]]:
        """Return (step, the whole's name) -> what the ranks have of it."""
        parts: dict[tuple[int, str], list[Entry]] = {}
        for entry in source.entries:
            if (entry.rank, entry.step, entry.site) not in self.of_stages:
                parts.setdefault((entry.step, self.of(entry.rank, entry.site)), []).append(entry)
        return parts


def local_names(source: TensorSource, whole: TensorSource) -> LocalNames:
    """Return what the ranks of `source` call otherwise than `whole`, which is of one process."""
    names = LocalNames()
    second = [any(entry.site.partition(":")[0] == _SECOND for entry in side.entries) for side in (source, whole)]
    names.is_called_twice = second == [True, False]
    ours = _numbers(entry.site for entry in whole.entries)
    by_rank: dict[int, list[Entry]] = defaultdict(list)
    for entry in source.entries:
        by_rank[entry.rank].append(entry)
    there = {(entry.step, entry.site): entry for entry in whole.entries}
    for pattern in sorted(ours, key=lambda text: text.count("#")):
        theirs = {
            rank: found[pattern]
            for rank, entries in by_rank.items()
            if pattern in (found := _numbers(names.of(rank, entry.site) for entry in entries))
        }
        # Numbers that together are all there are, are those of the whole.
        if len(theirs) < 2 or set().union(*theirs.values()) >= ours[pattern]:
            continue
        if any(min(own) != min(ours[pattern]) or not own < ours[pattern] for own in theirs.values()):
            continue
        by_offset = {
            rank: _offset(source, whole, there, names, rank, by_rank[rank], pattern, ours[pattern], own)
            for rank, own in theirs.items()
        }
        usual = _in_order(theirs, len(ours[pattern]))
        offsets = {rank: usual[rank] if offset is None else offset for rank, offset in by_offset.items()}
        covered = {number + offsets[rank] for rank, own in theirs.items() for number in own}
        if covered == ours[pattern]:
            names.offsets |= {(rank, pattern): offset for rank, offset in offsets.items()}
    names.of_stages = _of_stages(source, whole, names)
    if names.is_called_twice:
        outer = (entry for entry in source.entries if entry.site.partition(":")[0] == ROOT)
        names.of_stages |= {(entry.rank, entry.step, entry.site) for entry in outer}
    return names


def numbers_of_shares(source: TensorSource, other: TensorSource) -> tuple[dict[tuple[int, str], int], set[str]]:
    """Return what to add to the numbers of modules that each rank counts from 0, on two sides with unequal shares.

    Two experts in each of two ranks, and one in each of four: the shares are consecutive, in the order of the ranks.
    The lists of modules come second in which several ranks have the same share: nothing says which.
    """
    sides = []
    for side in (source, other):
        by_rank: dict[int, dict[str, None]] = defaultdict(dict)
        for entry in side.entries:
            by_rank[entry.rank][entry.site] = None
        sides.append({rank: _numbers(sites) for rank, sites in by_rank.items()})
    offsets: dict[tuple[int, str], int] = {}
    undecided: set[str] = set()
    for pattern in {pattern for lists in sides[0].values() for pattern in lists}:
        own, theirs = ({rank: lists[pattern] for rank, lists in side.items() if pattern in lists} for side in sides)
        counts = [{len(numbers) for numbers in shares.values()} for shares in (own, theirs)]
        starts = {min(numbers) for shares in (own, theirs) for numbers in shares.values()}
        total = sum(map(len, own.values()))
        if len(own) < 2 or not theirs or counts[0] == counts[1] or len(starts) > 1:
            continue
        if max(map(len, counts)) == 1 and total == sum(map(len, theirs.values())):
            offsets |= {(rank, pattern): offset for rank, offset in _in_order(own, total).items()}
        else:
            undecided.add(pattern)
    return offsets, undecided


def is_in_lists(site: str, patterns: Collection[str]) -> bool:
    """Return whether a site is inside of one of some numbered lists of modules."""
    return bool(patterns) and not _numbers([site]).keys().isdisjoint(patterns)


def _numbers(sites: Iterable[str]) -> dict[str, set[int]]:
    """Return for each list of modules, its own numbers as `#`, the numbers of those in it."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for site in dict.fromkeys(sites):
        path = site.partition(":")[0]
        for match in _NUMBER.finditer(path):
            numbers[_NUMBER.sub("#", path[: match.start()])].add(int(match[0]))
    return numbers


def _renumbered(site: str, offset: Callable[[str], int]) -> str:
    path, colon, port = site.partition(":")

    def moved(match: re.Match[str]) -> str:
        return str(int(match[0]) + offset(_NUMBER.sub("#", path[: match.start()])))

    return _NUMBER.sub(moved, path) + colon + port


def _moved(site: str, pattern: str, offset: int) -> str:
    return _renumbered(site, lambda at: offset if at == pattern else 0)


def _in_order(theirs: Mapping[int, set[int]], total: int) -> dict[int, int]:
    """Return the offsets of consecutive shares; ranks beside one another have the same where there are more of them."""
    ranks = sorted(theirs)
    num_all = sum(len(own) for own in theirs.values())
    copies = max(1, num_all // total)
    found, next_one = {}, 0
    for i, rank in enumerate(ranks):
        found[rank] = next_one
        if (i + 1) % copies == 0:
            next_one += len(theirs[rank])
    return found


def _offset(
    source: TensorSource,
    whole: TensorSource,
    there: Mapping[tuple[int, str], Entry],
    names: LocalNames,
    rank: int,
    entries: Sequence[Entry],
    pattern: str,
    ours: set[int],
    own: set[int],
) -> int | None:
    """Return what to add to the numbers of a rank so that its tensors are those of the whole; None if that is open."""
    first = entries[0].step
    inside = [
        (entry, names.of(rank, entry.site))
        for entry in entries
        if entry.step == first and pattern in _numbers([names.of(rank, entry.site)])
    ]
    scores: dict[int, int] = {}
    for offset in sorted(number - min(own) for number in ours):
        if not {number + offset for number in own} <= ours:
            continue
        pairs = [(entry, there.get((first, _moved(name, pattern, offset)))) for entry, name in inside]
        known = [(entry, other) for entry, other in pairs if other is not None]
        scores[offset] = sum(
            _is_share(source, entry, whole, other)
            for entry, other in known[:: max(1, len(known) // _MAX_EVIDENCE)][:_MAX_EVIDENCE]
        )
    ranked = sorted(scores, key=lambda offset: scores[offset], reverse=True)
    if not ranked or not scores[ranked[0]] or (len(ranked) > 1 and scores[ranked[0]] == scores[ranked[1]]):
        return None
    return ranked[0]


def _is_share(source: TensorSource, entry: Entry, whole: TensorSource, other: Entry) -> bool:
    part, reference = source.tensor(entry), whole.tensor(other)
    if not part.is_floating_point() or part.numel() < 2:
        return False
    return any(agreement(x, y) for x, y in share_of_sample(part, reference))


def _of_stages(source: TensorSource, whole: TensorSource, names: LocalNames) -> set[tuple[int, int, str]]:
    """Return the inputs and results of stages which are those of other modules as well."""
    paths = {path_of(entry.site) for entry in whole.entries}
    containers = paths & {above for path in paths for above in paths_above(path)}
    order = {entry.site: i for i, entry in enumerate(whole.entries)}
    # Container -> rank -> positions of what it has in there.
    extent: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    parts: dict[tuple[int, str], list[Entry]] = defaultdict(list)
    alike: dict[tuple[object, ...], list[Entry]] = defaultdict(list)
    for entry in source.entries:
        site = names.of(entry.rank, entry.site)
        path = path_of(site)
        alike[entry.step, entry.dtype, entry.shape].append(entry)
        if path in containers:
            parts[entry.step, site].append(entry)
        elif site in order and phase_of(site) == "forward":
            for above in containers.intersection(paths_above(path)):
                extent[above][entry.rank].append(order[site])
    found = set()
    for (step, site), entries in parts.items():
        at = extent[path_of(site)]
        # A whole has no gradient of token ids, which are its input; a stage has one of its own input.
        is_of_whole = site in order
        if len(at) < 2 or (is_of_whole and len(entries) < 2):
            continue
        is_input = site.partition(":")[2].startswith(("in", "grad_in"))
        ends = {rank: min(own) if is_input else max(own) for rank, own in at.items()}
        owner = (min if is_input else max)(ends.values())
        strangers = [entry for entry in entries if ends.get(entry.rank, owner) != owner]
        if is_of_whole and len(strangers) == len(entries):
            continue
        for entry in strangers:
            inside = (
                other
                for other in alike[step, entry.dtype, entry.shape]
                if (name := names.of(other.rank, other.site)) in order and path_of(site) in paths_above(path_of(name))
            )
            if any(_are_same(source, entry, other) for other in inside):
                found.add((entry.rank, step, entry.site))
    return found


def _are_same(source: TensorSource, entry: Entry, other: Entry) -> bool:
    if entry.rank == other.rank and entry.location is not None and entry.location == other.location:
        return True
    return torch.equal(source.tensor(entry), source.tensor(other))


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
    one = size // count
    return torch.arange(at * one, (at + 1) * one)


def _zigzag(at: int, count: int, size: int) -> Tensor:
    if size % (2 * count):
        return _block(at, count, size)
    return torch.cat([_block(at, 2 * count, size), _block(2 * count - 1 - at, 2 * count, size)])


def _every(at: int, count: int, size: int) -> Tensor:
    return torch.arange(at, size, count)


_WAYS: tuple[Callable[[int, int, int], Tensor], ...] = (_block, _zigzag, _every)


def _bytes(tensor: Tensor) -> tuple[tuple[int, ...], bytes]:
    plain = tensor.detach().contiguous()
    return tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy().tobytes()
