"""Assembles one tensor of its parts: slices, equal copies, shares of a sum or mean, or as torch shards it."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from glassengine.compare.ranks.spread import DataLayout, RankArrangement, RankPart, factor_of, put, take
from glassengine.recording.layout.layout import Entry, Sharding

EXPLAINED = 0.02
"""Another reading of the parts is right when it leaves at most this fraction of the error."""

_MOST_MASKED = 2
"""Rows that a rank has in place of those of others."""

COPIES, SUM, MEAN, MEAN_OF_SUMS, NUMBERS, ROWS = "copies", "sum", "mean", "mean of sums", "numbers", "rows"

HOW = {
    SUM: "added up: shares of a sum",
    MEAN: "averaged over the ranks that have data of their own",
    MEAN_OF_SUMS: "added up over the ranks that have the same data, averaged over the others",
    NUMBERS: "counted from the first row of each rank's table",
    ROWS: "each row from the rank whose share of a table has it",
}


@dataclass(frozen=True)
class Assembly:
    """Parts in their places.

    Attributes:
        parts: What the processes have.
        way: Where it lies.
        kind: What parts in one place are to each other.
        differ: Whether parts in one place are different.
        is_open: Whether `kind` stands only if what follows in the run is right: a share of a sum is right if it is
            added to the others later.
        num_groups: How many groups of ranks have data of their own, in a mean of sums.
    """

    parts: tuple[RankPart, ...]
    way: RankArrangement
    kind: str = COPIES
    differ: bool = False
    is_open: bool = False
    num_groups: int = 1

    @property
    def in_words(self) -> str:
        """In words."""
        how = self.way.in_words
        if self.kind == COPIES:
            return f"{how}, which are not the same" if self.differ else how
        return HOW[self.kind] if not self.way.dims else f"{how}, {HOW[self.kind]}"

    @property
    def ranks(self) -> list[int]:
        """All ranks that have a part."""
        return sorted(rank for part in self.parts for rank in part.ranks)

    def whole(self, reference: Tensor) -> Tensor:
        """Return the whole; of copies that differ the worst ones."""
        chosen: list[tuple[RankPart, int]] = []
        for members in self.cells():
            if self.kind in (SUM, MEAN, MEAN_OF_SUMS):
                total = torch.stack([self.parts[i].tensor.double() for i in members]).sum(0)
                total = total / {SUM: 1, MEAN: len(members)}.get(self.kind, self.num_groups)
                first = self.parts[members[0]]
                chosen.append((RankPart(first.ranks, total.to(first.tensor.dtype)), members[0]))
            elif self.kind in (ROWS, NUMBERS):
                of_cell, place = [self.parts[i].tensor for i in members], self.place(members[0], reference)
                found = (_numbered if self.kind == NUMBERS else _nearest_rows)(of_cell, place)
                chosen.append((RankPart(self.parts[members[0]].ranks, found), members[0]))
            elif self.differ:
                worst = max(members, key=lambda i: error_of(self.parts[i].tensor, self.place(i, reference)))
                chosen.append((self.parts[worst], worst))
            else:
                chosen.append((self.parts[members[0]], members[0]))
        if len(chosen) == 1 and not self.way.dims:
            return chosen[0][0].tensor
        whole = torch.empty(self.way.whole, dtype=chosen[0][0].tensor.dtype)
        for part, i in chosen:
            put(whole, self.way.index[i], part.tensor)
        return whole

    def cells(self) -> list[list[int]]:
        """Return the numbers of the parts that share a place, for each place."""
        by_place: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, cell in enumerate(self.way.cells):
            by_place[cell].append(i)
        return list(by_place.values())

    def place(self, i: int, reference: Tensor) -> Tensor:
        """Return what `reference` has at the position of part `i`; a cache may be of another length."""
        if tuple(reference.shape) == self.way.whole:
            return take(reference, self.way.index[i])
        if reference.dim() != len(self.way.whole):
            return reference
        part = self.parts[i].tensor
        found = reference
        for dim, at in enumerate(self.way.index[i]):
            if at is not None and reference.shape[dim] == self.way.whole[dim]:
                found = take(found, tuple(at if d == dim else None for d in range(reference.dim())))
            elif reference.shape[dim] > part.shape[dim]:
                found = found.narrow(dim, 0, part.shape[dim])
        return found


def settled(
    assembly: Assembly, reference: Tensor, *, num_groups: int | None, is_of_parameter: bool, is_updated: bool = False
) -> Assembly:
    """Return what parts in one place are to each other.

    Args:
        assembly: Parts in their places.
        reference: The counterpart of the whole.
        num_groups: How many groups of ranks were given different data; None where that is not known.
        is_of_parameter: Whether the tensor belongs to a parameter, which is the same for all data.
        is_updated: Whether it is what an update made.
    """
    cells = assembly.cells()
    parts = assembly.parts
    if all(_same(parts[cell[0]].tensor, parts[i].tensor) for cell in cells for i in cell[1:]):
        return assembly
    assembly = Assembly(parts, assembly.way, COPIES, differ=True)
    if tuple(reference.shape) != assembly.way.whole:
        return assembly
    if not reference.is_floating_point():
        numbered = Assembly(parts, assembly.way, NUMBERS)
        is_whole = not reference.is_complex() and reference.dtype is not torch.bool
        return numbered if is_whole and bool((numbered.whole(reference) == reference).all()) else assembly
    error = error_of(assembly.whole(reference), reference)
    # Results of what each rank was given are its own; of a parameter there is one for all.
    is_local = num_groups != 1 and not assembly.way.by_data and not is_of_parameter
    is_local = is_local and (num_groups is not None or reference.numel() == 1)
    # The result of an update is the same in all ranks, for any gradients.
    for kind in (SUM, MEAN, MEAN_OF_SUMS) if not is_updated else ():
        if kind == MEAN and not is_of_parameter and not is_local:
            continue
        if kind == MEAN_OF_SUMS and not (is_of_parameter and 1 < (num_groups or 1) < len(cells[0])):
            continue
        other = Assembly(parts, assembly.way, kind, differ=True, is_open=not is_local, num_groups=num_groups or 1)
        if error_of(other.whole(reference), reference) <= EXPLAINED * error:
            return other
    of_rows = Assembly(parts, assembly.way, ROWS, differ=True, is_open=True)
    if all(_are_of_table([parts[i].tensor for i in cell], of_rows.place(cell[0], reference)) for cell in cells):
        return of_rows
    return assembly


def _nearest_rows(parts: Sequence[Tensor], reference: Tensor) -> Tensor:
    """Return of each row the one of the part that is nearest to that of the counterpart."""
    errors = torch.stack([(part.double() - reference.double()).square().sum(-1) for part in parts]).nan_to_num(math.inf)
    return torch.stack(list(parts)).gather(0, errors.argmin(0)[None, ..., None].expand(1, *parts[0].shape))[0]


def _are_of_table(parts: Sequence[Tensor], reference: Tensor) -> bool:
    """Whether parts are what ranks with shares of a table look up, before what others have is masked.

    Each row of the whole is in one rank, wherever that row is. In place of all others a rank has one row, that of the
    number it puts there; or two, where it cuts numbers off at both ends of its share.
    """
    width = reference.shape[-1] if reference.dim() > 1 else 0
    if width < 2 or len(parts) < 2 or any(part.shape != reference.shape for part in parts):
        return False
    rows, number = torch.unique(reference.reshape(-1, width), dim=0, return_inverse=True)
    size = float(reference.double().square().mean().sqrt())
    counts, owners = torch.bincount(number), torch.zeros(len(rows), dtype=torch.int64)
    for part in parts:
        flat = part.reshape(-1, width)
        is_here = (flat - rows[number]).double().square().mean(-1).sqrt() <= EXPLAINED * size
        has = torch.bincount(number[is_here], minlength=len(rows)) == counts
        if not bool((has[number] == is_here).all()) or len(torch.unique(flat[~is_here], dim=0)) > _MOST_MASKED:
            return False
        owners += has
    return len(rows) > _MOST_MASKED and bool((owners == 1).all())


def _numbered(parts: Sequence[Tensor], reference: Tensor) -> Tensor:
    """Return the numbers that ranks with consecutive shares of a table mean, each by those in its share.

    A rank counts from the first row of its share, and puts some number in place of those it does not have.
    """
    found = torch.full_like(reference, -1)
    starts: list[int] = []
    for part in parts:
        if part.shape != reference.shape or part.is_floating_point():
            return found
        difference = (reference - part.to(reference.dtype)).flatten()
        values, counts = torch.unique(difference[difference >= 0], return_counts=True)
        # In its share the difference is always the same.
        distinct = [len(torch.unique(part.flatten()[difference == value])) for value in values]
        if not distinct:
            return found
        best = max(range(len(distinct)), key=lambda i: (distinct[i], int(counts[i])))
        starts.append(int(values[best]))
    if sorted(set(starts)) != starts and len(set(starts)) == len(starts):
        return found
    for start, part in zip(starts, parts, strict=True):
        meant = part.to(reference.dtype) + start
        found = torch.where((found != reference) & (meant == reference), meant, found)
    return found


def _same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x, y) or error_of(x, y) == 0


def error_of(x: Tensor, y: Tensor) -> float:
    """Return the root mean square of `y - x`; infinite for other shapes, or where one alone is not finite."""
    from glassengine.numerics.distances import measure

    if x.shape != y.shape:
        return math.inf
    figures = measure(x, y, rtol=0.0, atol=0.0)
    return math.inf if figures.num_nonfinite_mismatch else figures.rms_diff


_SAME_FACTOR = 0.02


def factor_of_rows(known: Sequence[tuple[Assembly, Tensor]], num_groups: int | None, of_whole: int = 1) -> float:
    """Return the number of ranks with rows of their own, if gradients are that many times the whole's; else 1.

    Args:
        known: Gradients of activations of such ranks, and their counterparts.
        num_groups: How many groups of ranks were given different data; None where the inputs do not tell.
        of_whole: Of how many such groups the counterparts are.
    """
    by_shape: dict[tuple[int, ...], list[float]] = defaultdict(list)
    counts: Counter[int] = Counter()
    for assembly, reference in known:
        if assembly.differ:
            continue
        if assembly.way.whole:
            counts[-(-assembly.way.whole[0] // max(1, *(part.tensor.shape[0] for part in assembly.parts)))] += 1
        for i, part in enumerate(assembly.parts):
            factor = factor_of(part.tensor, assembly.place(i, reference))
            if factor is not None:
                by_shape[part.ranks].append(factor)
    if not by_shape or not counts:
        return 1
    count = (counts.most_common(1)[0][0] if num_groups is None else num_groups) / of_whole
    # One rank with such gradients shows what those of the others are to be.
    middles = map(statistics.median, by_shape.values())
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


def errors_of_ranks(
    assembly: Assembly, reference: Tensor, factor: float, local_parts: Sequence[tuple[int, Tensor, Entry]]
) -> dict[int, float] | None:
    """Return the error of each rank; None where ranks add up to what they have.

    Args:
        assembly: Parts in their places.
        reference: The counterpart of the whole.
        factor: How many times the whole's the parts are.
        local_parts: Rank, values and entry of what each process recorded.
    """
    errors: dict[int, float] = {}
    for i, part in enumerate(assembly.parts):
        there, tensor = assembly.place(i, reference), part.tensor / factor if factor != 1 else part.tensor
        if len(part.ranks) == 1:
            errors[part.ranks[0]] = error_of(tensor, there)
            continue
        local: list[Local] = [
            (rank, of_rank, one.sharding)
            for rank, of_rank, one in local_parts
            if rank in part.ranks and one.sharding is not None
        ]
        by = owners(local)
        if by is None or tensor.shape != there.shape:
            return None
        errors |= {rank: error_of(tensor[by == rank], there[by == rank]) for rank in part.ranks}
    return errors


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
    if any(text in (_SUM, _MEAN) for text in parts[0][2].placements):
        return None
    named = [(rank, torch.full(tensor.shape, rank), _first_copy(one)) for rank, tensor, one in parts]
    return assembled(named)[0].tensor


def _first_copy(sharding: Sharding) -> Sharding:
    """Return the place of a process in a mesh without the dimensions that replicate."""
    is_copy = [text == _REPLICATED for text in sharding.placements]
    mesh = tuple(1 if copy else size for copy, size in zip(is_copy, sharding.mesh, strict=True))
    at = tuple(0 if copy else place for copy, place in zip(is_copy, sharding.coordinate, strict=True))
    return replace(sharding, mesh=mesh, coordinate=at, ranks=())


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
    shard = _SHARD.fullmatch(placement)
    if shard is not None:
        return torch.cat(parts, int(shard[1]))
    if placement == _REPLICATED:
        return parts[0]
    total = torch.stack(parts).sum(0, dtype=parts[0].dtype)
    return total / len(parts) if placement == _MEAN else total
