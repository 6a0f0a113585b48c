"""Two sides of which one was run by several processes: its parts are put together, each for its counterpart.

A baseline of several ranks whose candidate is spread otherwise (TP 2 against TP 4) is put together first. Nothing says
what the whole of a tensor is. Of the few shapes that both sides may be parts of, and the few ways to put the baseline's
parts into them, that one is taken with which most parts of the candidate agree; where none does, the usual one: the
candidate is then judged against it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from glassengine.compare.matching.matching import MatchedPair, Matching, by_step
from glassengine.compare.matching.sources import SourceWrapper, is_of_activation, is_of_parameter
from glassengine.compare.ranks.assembly import (
    EXPLAINED,
    Assembly,
    Local,
    assembled,
    error_of,
    is_spread,
    lies_in_rows,
    meshes,
    why_not_assembled,
)
from glassengine.compare.ranks.local_view import (
    data_layout,
    is_in_lists,
    local_names,
    numbers_of_shares,
    spreads_of_inputs,
    with_other_stages,
)
from glassengine.compare.ranks.ranks import AssembledRanks
from glassengine.compare.ranks.spread import (
    DataLayout,
    RankArrangement,
    RankPart,
    Shape,
    agreement,
    arrangements,
    moved_by,
    put,
    sampled,
    taken_at,
    uneven,
)
from glassengine.recording.layout.layout import Entry, have_same_bytes
from glassengine.recording.source import TensorSource


def sides_of_one_rank(left: SourceWrapper, right: SourceWrapper) -> tuple[SourceWrapper, SourceWrapper]:
    """Return both sides, that of several ranks put together where the other one has a single rank.

    Sides that both have several are compared rank by rank where they are spread alike. Else the baseline is put
    together first, where the parts of the candidate agree with it, and then the candidate.
    """
    several = [len({entry.rank for entry in side.entries}) > 1 for side in (left, right)]
    is_two = all(several) and not is_spread_alike(left, right)
    if several[0] == several[1] and not is_two:
        return left, right
    if is_two:
        joined = ReshardedRanks(left, right)
        return joined, AssembledRanks(right, joined, num_groups=joined.num_groups)
    return (AssembledRanks(left, right), right) if several[0] else (left, AssembledRanks(right, left))


def expect_counterparts(left: SourceWrapper, right: SourceWrapper, matching: Matching) -> Matching:
    """Tell a side that is put together what each tensor is judged against.

    Returns:
        The matching without what cannot be put together, which is listed with its reason.
    """
    possible: list[MatchedPair] = []
    impossible: list[tuple[Entry, str]] = []
    for match in matching.matches:
        reason = None
        if left.is_assembled:
            reason = _reason(left, match.baseline, right, match.candidates[0], match)
        elif right.is_assembled:
            found = (_reason(right, entry, left, match.baseline, match) for entry in match.candidates)
            reason = left.why_not(match.baseline) or next(filter(None, found), None)
        if reason is None:
            possible.append(match)
        else:
            impossible.append((match.baseline, reason))
    return Matching(tuple(possible), (*matching.baseline_only, *impossible), matching.candidate_only)


def _reason(
    side: SourceWrapper, entry: Entry, other: SourceWrapper, counterpart: Entry, match: MatchedPair
) -> str | None:
    rule = match.rule
    if len(match.candidates) == 1 and (rule is None or not (rule.baseline_ops or rule.candidate_ops)):
        side.expect(entry, other, counterpart)
    return side.why_not(entry)


def is_spread_alike(left: SourceWrapper, right: SourceWrapper) -> bool:
    """Return whether each rank has the same tensors on both sides, of the same shapes and for the same inputs."""
    if {entry.rank for entry in left.entries} != {entry.rank for entry in right.entries}:
        return False
    first: list[tuple[Entry, Entry]] = []
    for found in by_step(left.entries, right.entries):
        ours, theirs = ({(e.step, e.rank, e.site): e for e in side.values()} for side in found)
        common = [(entry, theirs[key]) for key, entry in ours.items() if key in theirs]
        if any(one.shape != other.shape for one, other in common):
            return False
        if not first:
            inputs = [both for both in common if both[0].site.startswith(".:in") and both[0].dtype == "int64"]
            first = [both for both in inputs if both[0].step == min(one.step for one, _ in inputs)]
    if all(have_same_bytes(one, other) for one, other in first):
        return True
    given = [(one.site, left.values(one).array, right.values(other).array) for one, other in first]
    if all(np.array_equal(one, other) for _, one, other in given):
        return True
    # Other data is a finding; the same data in other ranks is another layout.
    for site in {name for name, _, _ in given}:
        values = [np.concatenate([both[side].flatten() for name, *both in given if name == site]) for side in range(2)]
        if not np.array_equal(np.sort(values[0]), np.sort(values[1])):
            return True
    return False


_UNDECIDED = "both sides number these modules in each rank from 0, with unequal shares, and several ranks have the same"
_MAX_WHOLES = 12

_Key = tuple[int, str]


class ReshardedRanks(SourceWrapper):
    """A source of several ranks as one of a single rank, in the places in which another source agrees with it."""

    def __init__(self, source: TensorSource, other: TensorSource) -> None:
        super().__init__(source)
        self._other = other
        names = local_names(source, source)
        offsets, undecided = numbers_of_shares(source, other)
        names.offsets |= offsets
        self._undecided = undecided
        self._parts = names.parts(source)
        self._theirs: dict[_Key, list[Entry]] = {}
        for entry in other.entries:
            self._theirs.setdefault((entry.step, entry.site), []).append(entry)
        self._styles: Counter[str] = Counter()
        self._layouts: dict[int, tuple[DataLayout | None, DataLayout | None]] = {}
        self._ways: dict[_Key, tuple[RankArrangement, str]] = {}
        self.entries: tuple[Entry, ...] = tuple(
            dataclasses.replace(parts[0], rank=0, site=key[1], shape=self._whole_shape(key), sharding=None)
            for key, parts in self._parts.items()
        )

    def why_not(self, entry: Entry) -> str | None:
        """Return why one of `entries` cannot be judged; None if it can."""
        return _UNDECIDED if is_in_lists(entry.site, self._undecided) else None

    @property
    def arrangements(self) -> Mapping[str, int]:
        """How the tensors were put together -> how many, most frequent first."""
        return dict(Counter(how for _, how in self._ways.values()).most_common())

    def num_groups(self, step: int, site: str | None = None) -> int:
        """Return how many groups of ranks have data of their own: gradients are as many times those of one mean.

        Of a site that does not consist of such data it is 1.
        """
        layout = self._layout(step)[0]
        if layout is None or (site is not None and not self._lies_in_rows((step, site), layout)):
            return 1
        return layout.num_groups

    def _lies_in_rows(self, key: _Key, layout: DataLayout) -> bool:
        return key in self._ways and lies_in_rows(Assembly(self._joined(key), self._ways[key][0]), layout)

    def tensor(self, entry: Entry) -> Tensor:
        """Return the whole of one of `entries`."""
        key = entry.step, entry.site
        way, how = self._ways[key]
        return _whole(self._joined(key), way, how, self.num_groups(entry.step))

    def _whole_shape(self, key: _Key) -> Shape:
        way, how = self._found_way(key)
        self._ways[key] = way, how
        self._styles[way.style] += bool(way.style)
        return way.whole

    def _found_way(self, key: _Key) -> tuple[RankArrangement, str]:
        ours, theirs = self._joined(key), _parts(self._other, self._theirs.get(key, []))
        shape = tuple(ours[0].tensor.shape)
        is_one = all(part.tensor.shape == ours[0].tensor.shape for part in ours)
        if len(ours) == 1 or not theirs:
            return _in_place(ours), "of one rank" if len(ours) == 1 else "in every rank"
        if not is_one:
            return _uneven(ours), "concatenated"
        is_same = all(torch.equal(part.tensor, ours[0].tensor) for part in ours[1:])
        there = {tuple(part.tensor.shape) for part in theirs}
        if len(there) > 1:
            whole = next((w for w in _wholes_of(shape, shape, len(ours), 1) if uneven(theirs, w) is not None), shape)
            return next(arrangements(ours, whole, None), _in_place(ours)), "concatenated"
        other = there.pop()
        if len(other) != len(shape):
            return _in_place(ours), "in every rank"
        own_layout, their_layout = (None, None) if is_of_parameter(key[1]) else self._layout(key[0])
        best: tuple[tuple[int, int, int, int, int], RankArrangement, str] | None = None
        sizes = () if own_layout is None else own_layout.sizes
        wholes = _likely(_wholes_of(shape, other, len(ours), len(theirs)), ours, theirs, sizes)
        # In place of one another first: sums of other parts are equal, too, where parts are dealt out otherwise.
        for how in (
            _COPIES,
            *(() if is_same or not ours[0].tensor.is_floating_point() else (_MEAN, _SUM, _MEAN_OF_SUMS)),
        ):
            for number, whole in enumerate(wholes):
                for way in arrangements(ours, whole, own_layout):
                    if way.num_pieces > 1 or (how != _COPIES and len(set(way.cells)) == len(ours)):
                        continue
                    made = _whole(ours, way, how, self.num_groups(key[0]) if how == _MEAN_OF_SUMS else 1)
                    count = _num_agreeing(theirs, made, their_layout, how, is_of_activation(key[1]))
                    score = (count, how == _COPIES, bool(way.by_data), -number, self._styles.get(way.style, 0))
                    if best is None or score > best[0]:
                        best = score, way, how
                    if count == len(theirs):
                        return way, how
        assert best is not None
        return best[1], best[2]

    def _joined(self, key: _Key) -> tuple[RankPart, ...]:
        return _parts(self._source, self._parts[key])

    def _layout(self, step: int) -> tuple[DataLayout | None, DataLayout | None]:
        """Return who was given what of the inputs of a step, on both sides."""
        if step not in self._layouts:
            keys = [key for key in self._parts if key[0] == step and key[1].startswith(".:in") and key in self._theirs]
            ours = [{part.ranks[0]: part.tensor for part in self._joined(key)} for key in keys]
            theirs = [{r: p.tensor for p in _parts(self._other, self._theirs[key]) for r in p.ranks} for key in keys]
            self._layouts[step] = _layouts(ours, theirs)
            for i, (side, layout) in enumerate(zip((self._parts, self._theirs), self._layouts[step], strict=True)):
                if layout is not None:
                    ranks = {part.rank for (at, _), own in side.items() if at == step for part in own}
                    known = with_other_stages(layout, ranks)
                    both = self._layouts[step]
                    self._layouts[step] = (known, both[1]) if i == 0 else (both[0], known)
        return self._layouts[step]


_COPIES, _SUM, _MEAN, _MEAN_OF_SUMS = "in place", "added up", "averaged", "added up and averaged"


def _whole(parts: Sequence[RankPart], way: RankArrangement, how: str, num_groups: int) -> Tensor:
    whole = torch.empty(way.whole, dtype=parts[0].tensor.dtype)
    for members in Assembly(tuple(parts), way).cells():
        part = parts[members[0]].tensor
        if how in (_SUM, _MEAN, _MEAN_OF_SUMS):
            total = torch.stack([parts[i].tensor.double() for i in members]).sum(0)
            part = (total / {_SUM: 1, _MEAN: len(members)}.get(how, num_groups)).to(part.dtype)
        put(whole, way.index[members[0]], part)
    return whole


def _num_agreeing(parts: Sequence[RankPart], whole: Tensor, layout: DataLayout | None, how: str, scales: bool) -> int:
    """Return how many parts agree with what `whole` has in their place, in the best of all ways."""
    shape = tuple(parts[0].tensor.shape)
    best = 0
    sample = sampled(shape, tuple(whole.shape))
    ours = [taken_at(part.tensor, sample) for part in parts]
    for way in arrangements(parts, tuple(whole.shape), layout):
        theirs = [taken_at(whole, moved_by(sample, index)) for index in way.index]
        found = sum(_agrees(x, y, scales) for x, y in zip(ours, theirs, strict=True))
        best = max(best, found)
        if best == len(parts):
            return best
        cells = Assembly(tuple(parts), way).cells()
        if how != _COPIES and max(map(len, cells)) > 1 and not _all_same(ours, cells):
            totals = [torch.stack([ours[i] for i in cell]).sum(0) for cell in cells]
            divisor = {_SUM: 1, _MEAN: len(cells[0])}.get(how, 1 if layout is None else layout.num_groups)
            pairs = zip(totals, cells, strict=True)
            if all(_agrees(total / divisor, theirs[cell[0]], False) for total, cell in pairs):
                return len(parts)
        if not way.dims or way.num_pieces > 2:
            break
    return best


def _all_same(tensors: Sequence[Tensor], cells: Sequence[Sequence[int]]) -> bool:
    return all(torch.equal(tensors[cell[0]], tensors[i]) for cell in cells for i in cell[1:])


def _agrees(x: Tensor, y: Tensor, scales: bool) -> bool:
    if scales:
        return agreement(x, y)
    return error_of(x, y) <= EXPLAINED * float(y.norm()) / max(1, math.sqrt(y.numel()))


def _wholes_of(ours: Shape, theirs: Shape, num_ours: int, num_theirs: int) -> Iterator[Shape]:
    """Yield what parts of two shapes may both be parts of, the smallest first."""
    choices = []
    for a, b in zip(ours, theirs, strict=True):
        if not a or not b:
            choices.append([max(a, b)])
            continue
        factors = (f for f in range(1, num_ours + 1) if num_ours % f == 0)
        choices.append([a * f for f in factors if a * f % b == 0 and num_theirs % (a * f // b) == 0])
    found = []
    for whole in itertools.product(*choices):
        cuts = [math.prod(w // s if s else 1 for w, s in zip(whole, side, strict=True)) for side in (ours, theirs)]
        if num_ours % cuts[0] == 0 and num_theirs % cuts[1] == 0:
            found.append(whole)
    yield from sorted(found, key=math.prod) or [ours]


def _likely(
    wholes: Iterator[Shape], ours: Sequence[RankPart], theirs: Sequence[RankPart], sizes: Sequence[int]
) -> list[Shape]:
    """Return some wholes, first those of as many different parts as there are, and of all rows and positions."""
    facts = [(side[0].tensor.shape, _num_different(side)) for side in (ours, theirs)]

    def key(whole: Shape) -> tuple[int, int, int]:
        num_cuts = [math.prod(w // s if s else 1 for w, s in zip(whole, shape, strict=True)) for shape, _ in facts]
        odd = sum(cuts != number for cuts, (_, number) in zip(num_cuts, facts, strict=True))
        other = sum(size != at for size, at in zip(sizes, whole, strict=False))
        return odd, other, sum(w != s for w, s in zip(whole, facts[0][0], strict=True))

    return sorted(wholes, key=key)[:_MAX_WHOLES]


def _num_different(parts: Sequence[RankPart]) -> int:
    sample = sampled(*(tuple(parts[0].tensor.shape),) * 2)
    return len({tuple(taken_at(part.tensor, sample).tolist()) for part in parts})


def _uneven(ours: Sequence[RankPart]) -> RankArrangement:
    shape = ours[0].tensor.shape
    for dim in range(len(shape)):
        size = sum(part.tensor.shape[dim] for part in ours)
        found = uneven(ours, (*shape[:dim], size, *shape[dim + 1 :]))
        if found is not None:
            return found
    return _in_place(ours)


def _in_place(parts: Sequence[RankPart]) -> RankArrangement:
    shape = tuple(parts[0].tensor.shape)
    return RankArrangement(shape, ((None,) * len(shape),) * len(parts), ((),) * len(parts), ())


def _parts(source: TensorSource, entries: Sequence[Entry]) -> tuple[RankPart, ...]:
    """Return the parts of one tensor, distributed tensors put together."""
    if entries and is_spread(entries):
        of_meshes = meshes(entries)
        if not any(map(why_not_assembled, of_meshes)):
            found: list[RankPart] = []
            for mesh in of_meshes:
                local: list[Local] = [(e.rank, source.tensor(e), e.sharding) for e in mesh if e.sharding is not None]
                found += assembled(local)
            return tuple(found)
    return tuple(RankPart((entry.rank,), source.tensor(entry)) for entry in entries)


def _layouts(
    ours: Sequence[Mapping[int, Tensor]], theirs: Sequence[Mapping[int, Tensor]]
) -> tuple[DataLayout | None, DataLayout | None]:
    """Return who was given what of all inputs on both sides, as far as they are parts of the same."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a and b and _is_even(a) and _is_even(b)]
    if not pairs:
        return None, None
    leading = max(pairs, key=lambda pair: next(iter(pair[0].values())).dim())
    shapes = [tuple(next(iter(side.values())).shape) for side in leading]
    if len(shapes[0]) != len(shapes[1]):
        return None, None
    for whole in _wholes_of(shapes[0], shapes[1], len(leading[0]), len(leading[1])):
        for place in spreads_of_inputs(sorted(leading[0]), shapes[0], whole):
            made = [_filled(a, place, whole) for a, _ in pairs]
            usable = [(x, a, b) for x, (a, b) in zip(made, pairs, strict=True) if x is not None]
            found = [data_layout([(x, side) for x, *sides in usable for side in (sides[i],)]) for i in (0, 1)]
            if found[0] is not None and found[1] is not None:
                return found[0], found[1]
    return None, None


def _filled(parts: Mapping[int, Tensor], place: Mapping[int, tuple[Tensor | None, ...]], whole: Shape) -> Tensor | None:
    first = next(iter(parts.values()))
    if first.dim() > len(whole) + 1 or first.dim() < 1:
        return None
    sizes = (*whole[: first.dim()], *first.shape[len(whole) :])
    made = torch.zeros(sizes, dtype=first.dtype)
    for rank, part in parts.items():
        index = (*place.get(rank, ()), *[None] * first.dim())[: first.dim()]
        wanted = tuple(size if at is None else len(at) for at, size in zip(index, sizes, strict=True))
        if wanted != tuple(part.shape):
            return None
        put(made, index, part)
    return made


def _is_even(parts: Mapping[int, Tensor]) -> bool:
    return len({tuple(part.shape) for part in parts.values()}) == 1 and next(iter(parts.values())).dim() > 0
