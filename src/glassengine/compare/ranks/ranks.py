"""Puts the parts together that the processes of one run recorded, to judge them against a run in one process.

A distributed tensor says how it is spread. Of any other the shape of its counterpart tells: parts of that shape must be
the same in all processes, or add up to it; other parts are put side by side, along the dimensions in which they are
smaller (`spread`). What each process was given of the inputs says along which it has rows of its own, and by
which factor its gradients differ where its loss is a mean over them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from torch import Tensor

from glassengine.compare.matching.sources import CACHES, Remark, SourceWrapper, is_of_activation, is_of_parameter
from glassengine.compare.ranks.assembly import (
    COPIES,
    HOW,
    ROWS,
    SUM,
    Assembly,
    Local,
    assembled,
    errors_of_ranks,
    factor_of_rows,
    is_spread,
    lies_in_rows,
    meshes,
    settled,
    why_not_assembled,
)
from glassengine.compare.ranks.local_view import LocalNames, data_layout, local_names, with_other_stages
from glassengine.compare.ranks.spread import (
    DataLayout,
    RankArrangement,
    RankPart,
    arrangements,
    can_be_arranged,
    choose,
    padding,
    shape_of_whole,
    uneven,
)
from glassengine.recording.layout.layout import Entry
from glassengine.recording.source import TensorSource

_NUM_FACTORS = 48
"""Gradients of a step from which their common factor is derived."""

_Key = tuple[int, str]


class AssembledRanks(SourceWrapper):
    """A source of several ranks as one of a single rank.

    Entries are those of the lowest rank that has the tensor, as rank 0; `tensor` gives the whole once `expect` got
    the counterpart.

    What is found of a step depends on the step alone, and on what is put together before: who begins with nothing and
    goes the same way finds the same.

    Args:
        source: Of several ranks.
        whole: The other side.
        num_groups: Of each step, how many ranks with data of their own made the whole.
    """

    is_assembled = True

    def __init__(
        self, source: TensorSource, whole: TensorSource | None = None, *, num_groups: Callable[..., int] | None = None
    ) -> None:
        super().__init__(source)
        self._begin()
        self._groups_of_whole = num_groups
        self._names = local_names(source, whole) if whole is not None else LocalNames()
        self._parts = self._names.parts(source)
        self.entries: tuple[Entry, ...] = tuple(
            dataclasses.replace(parts[0], rank=0, site=site) for (_, site), parts in self._parts.items()
        )

    def _begin(self) -> None:
        self._expected: dict[_Key, tuple[TensorSource, Entry]] = {}
        self._arranged: dict[_Key, str] = {}
        self._ways: dict[_Key, Assembly] = {}
        self._rejected: set[_Key] = set()
        self._layouts: dict[int, DataLayout | None] = {}
        self._factors: dict[int, float] = {}
        self._styles: Counter[str] = Counter()
        self._told: dict[_Key, tuple[bool, bool]] = {}

    @property
    def changes(self) -> Mapping[str, Any]:
        """That of the source, and how the tensors that were read were put together."""
        return {**super().changes, "arrangements": self.arrangements}

    @property
    def arrangements(self) -> Mapping[str, int]:
        """How the tensors that were read were put together -> how many, most frequent first."""
        counts = Counter(self._arranged.values())
        if self._names.offsets:
            moved = sum(
                1
                for parts in self._parts.values()
                for part in parts
                if self._names.of(part.rank, part.site) != part.site
            )
            counts["under the numbers of the whole, which a rank counts from its own first module"] = moved
        if self._names.of_stages:
            counts["inputs and results of stages and wrappers, judged as those of their modules"] = len(
                self._names.of_stages
            )
        return dict(counts.most_common())

    def expect(self, entry: Entry, source: TensorSource, counterpart: Entry) -> None:
        """Note that the whole of `entry` is judged against `counterpart`, of `source`."""
        self._expected[_key(entry)] = source, counterpart

    def why_not(self, entry: Entry) -> str | None:
        """Return why the whole of `entry` cannot be assembled from its parts; None if it can."""
        parts = self._parts[_key(entry)]
        if len(parts) == 1:
            return None
        is_distributed = is_spread(parts)
        if is_distributed:
            of_meshes = meshes(parts)
            if (reason := next(filter(None, map(why_not_assembled, of_meshes)), None)) is not None:
                return reason
            if len(of_meshes) == 1:
                return None
        if _key(entry) not in self._expected:
            return f"how the parts of {len(parts)} ranks belong together is not known where a map changes the layout"
        whole = self._expected[_key(entry)][1].shape
        if is_distributed:
            shapes = [part.sharding.shape for part in parts if part.sharding is not None]
        else:
            shapes = [part.shape for part in parts]
        count = len(of_meshes) if is_distributed else len(parts)
        if can_be_arranged(shapes, count, whole, entry.site):
            return None
        named = ", ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        return f"the parts of {len(parts)} ranks, {named}, do not make up {list(whole)}"

    def tensor(self, entry: Entry) -> Tensor:
        """Return the whole of one of `entries`.

        Of copies that are not the same, it is the one that differs most from the counterpart. Gradients of activations
        are those of a mean over the rows of all ranks.
        """
        key = _key(entry)
        assembly, reference = self.assembly(entry)
        how = assembly.in_words if len(self._parts[key]) > 1 else "of one rank"
        if is_spread(self._parts[key]) and len(self._parts[key]) > 1:
            is_one = len(self._meshes(key)) == 1
            how = how.replace("in every rank", "distributed tensors") if is_one else f"distributed tensors, {how}"
        whole = assembly.whole(reference) if reference is not None else assembly.parts[0].tensor
        factor = self._factor_of(entry, assembly)
        if factor != 1:
            how += f", divided by {factor:g}: gradients of a mean over the rows of each rank"
            whole = whole / factor
        self._arranged[key] = how
        return whole

    def assembly(self, entry: Entry) -> tuple[Assembly, Tensor | None]:
        """Return the parts of one of `entries` in their places, and the counterpart of the whole where it is known."""
        key = _key(entry)
        expected = self._expected.get(key)
        reference = None if expected is None else expected[0].tensor(expected[1])
        parts = self._joined(key)
        known = self._ways.get(key)
        if known is not None:
            found = dataclasses.replace(known, parts=parts)
        elif reference is None or len(self._parts[key]) == 1:
            ndim = parts[0].tensor.dim()
            way = RankArrangement(tuple(parts[0].tensor.shape), ((None,) * ndim,) * len(parts), ((),) * len(parts), ())
            found = Assembly(parts, way)
            if reference is not None and len(parts) > 1:
                found = self._settled(key, found, reference)
        else:
            found = self._settled(key, Assembly(parts, self._way(key, parts, reference)), reference)
            if found.differ and found.kind == COPIES and found.way.dims and is_of_parameter(key[1]):
                found = self._as_shares(key, parts, reference) or found
        self._ways[key] = dataclasses.replace(found, parts=())
        return found, reference

    def local_parts(self, entry: Entry) -> list[tuple[int, Tensor, Entry]]:
        """Return rank, values and entry of what each process recorded of one of `entries`."""
        return [(part.rank, self._source.tensor(part), part) for part in self._parts[_key(entry)]]

    def errors(self, entry: Entry, reference: Tensor) -> dict[int, float] | None:
        """Return how far what each rank has is from its place in `reference`; None where ranks add up to it."""
        assembly, _ = self.assembly(entry)
        if assembly.kind != COPIES:
            return None
        return errors_of_ranks(assembly, reference, self._factor_of(entry, assembly), self.local_parts(entry))

    def counterpart(self, step: int, site: str) -> Tensor | None:
        """Return what the other side has of a site."""
        expected = self._expected.get((step, site))
        return None if expected is None else expected[0].tensor(expected[1])

    def ranks_of(self, step: int, site: str) -> list[int]:
        """Return the ranks that recorded a site."""
        return [part.rank for part in self._parts.get((step, site), ())]

    def num_rows(self, step: int) -> dict[int, int]:
        """Return how many rows each rank was given of the first input of a step."""
        of_inputs = (parts for (at, site), parts in self._parts.items() if at == step and site.startswith(".:in"))
        return {part.rank: part.shape[0] for part in next(of_inputs, ()) if part.shape}

    def reject(self, entry: Entry) -> None:
        """Note that shares of a sum or mean were never added up: each part is to be the whole."""
        key = _key(entry)
        self._rejected.add(key)
        self._ways.pop(key, None)

    def layout(self, step: int) -> DataLayout | None:
        """Return who was given what of the inputs of a step; None where they do not tell."""
        if step not in self._layouts:
            self._layouts[step] = None  # unknown until it is derived
            self._layouts[step] = self._told_layout(step)
        return self._layouts[step]

    def _told_layout(self, step: int) -> DataLayout | None:
        inputs = []
        for (at, site), parts in self._parts.items():
            if at != step or not site.startswith(".:in") or (at, site) not in self._expected or len(parts) < 2:
                continue
            source, counterpart = self._expected[at, site]
            found = [part for part in self._joined((at, site)) if part.tensor.dim() == len(counterpart.shape)]
            given = {rank: part.tensor for part in found for rank in part.ranks}
            inputs.append((source.tensor(counterpart), given))
        found_layout = data_layout(inputs)
        if found_layout is None:
            return None
        return with_other_stages(
            found_layout, {part.rank for (at, _), own in self._parts.items() if at == step for part in own}
        )

    def _joined(self, key: _Key) -> tuple[RankPart, ...]:
        """Return the parts, distributed tensors put together."""
        entries = self._parts[key]
        if not is_spread(entries) or any(why_not_assembled(mesh) for mesh in self._meshes(key)):
            return self._without_padding(key, [RankPart((e.rank,), self._source.tensor(e)) for e in entries])
        found: list[RankPart] = []
        for mesh in self._meshes(key):
            local: list[Local] = [
                (entry.rank, self._source.tensor(entry), entry.sharding) for entry in mesh if entry.sharding is not None
            ]
            found += assembled(local)
        return tuple(found)

    def _without_padding(self, key: _Key, parts: Sequence[RankPart]) -> tuple[RankPart, ...]:
        shapes = {tuple(part.tensor.shape) for part in parts}
        if key in self._expected and len(shapes) == 1:
            found = padding(shapes.pop(), len(parts), self._expected[key][1].shape, key[1])
            if found is not None:
                return (*parts[:-1], RankPart(parts[-1].ranks, parts[-1].tensor.narrow(found[0], 0, found[1])))
        return tuple(parts)

    def _meshes(self, key: _Key) -> list[list[Entry]]:
        entries = self._parts[key]
        if entries[0].sharding is not None and entries[0].sharding.ranks:
            return meshes(entries)
        layout = self.layout(key[0])
        return meshes(entries, layout.groups if layout is not None else None)

    def _way(self, key: _Key, parts: Sequence[RankPart], reference: Tensor) -> RankArrangement:
        shapes = {tuple(part.tensor.shape) for part in parts}
        whole = tuple(reference.shape)
        layout = None if is_of_parameter(key[1]) else self.layout(key[0])
        if len(shapes) > 1 and (found := uneven(parts, whole, layout)) is not None:
            return found
        shape = tuple(parts[0].tensor.shape)
        made = shape_of_whole(shape, whole, is_cache=key[1].endswith(CACHES)) if len(shapes) == 1 else None
        if made is not None:
            way = choose(parts, arrangements(parts, made, layout), reference, self._styles)
            if way is not None:
                self._styles[way.style] += bool(way.style)
                return way
        return RankArrangement(shape, ((None,) * len(shape),) * len(parts), ((),) * len(parts), ())

    def _as_shares(self, key: _Key, parts: tuple[RankPart, ...], reference: Tensor) -> Assembly | None:
        """Return the places in which parts that agree with nothing alone add up to it: gradients of own data."""
        shape, whole = tuple(parts[0].tensor.shape), tuple(reference.shape)
        if any(tuple(part.tensor.shape) != shape for part in parts):
            return None
        for way in arrangements(parts, whole, None):
            if way.num_pieces == 1:
                found = self._settled(key, Assembly(parts, way), reference)
                if found.kind != COPIES:
                    return found
        return None

    def _settled(self, key: _Key, assembly: Assembly, reference: Tensor) -> Assembly:
        layout = self.layout(key[0])
        found = settled(
            assembly,
            reference,
            num_groups=None if layout is None else layout.num_groups,
            is_of_parameter=is_of_parameter(key[1]),
            is_updated=is_of_parameter(key[1]) and not key[1].endswith(":grad"),
        )
        return dataclasses.replace(found, kind=COPIES, is_open=False) if key in self._rejected else found

    def _factor_of(self, entry: Entry, assembly: Assembly) -> float:
        """Return how many times the whole's the gradients of an activation are."""
        is_whole = self._num_groups_of_whole(entry.step, entry.site) == 1 and not self._has_own_rows(
            entry.step, assembly
        )
        if not is_of_activation(entry.site) or (is_whole and not self._is_of_sum(entry)):
            return 1
        if entry.step not in self._factors:
            self._factors[entry.step] = self._told_factor(entry.step)
        return self._factors[entry.step]

    def _is_of_sum(self, entry: Entry) -> bool:
        """Whether a gradient is that of a loss to which all ranks add up: the mean of gradients undoes a factor."""
        known = self._ways.get((entry.step, entry.site.replace(":grad_out", ":out")))
        return known is not None and known.kind == SUM and not known.is_open

    def _told_factor(self, step: int) -> float:
        """Return the number of ranks with data of their own, if that is the factor of the gradients; else 1.

        Where the loss of each is a mean over its own rows, and gradients of parameters are averaged, all gradients of
        activations are that many times those of a mean over all rows. Those of the parameters prove the average.
        """
        layout, of_whole = self.layout(step), self._num_groups_of_whole(step)
        keys = [key for key in self._expected if key[0] == step and is_of_activation(key[1]) and key in self._parts]
        known: list[tuple[Assembly, Tensor]] = []
        for key in keys[:: max(1, len(keys) // _NUM_FACTORS)]:
            assembly, reference = self.assembly(dataclasses.replace(self._parts[key][0], rank=0, site=key[1]))
            if reference is not None and (self._num_groups_of_whole(*key) > 1 or self._has_own_rows(step, assembly)):
                known.append((assembly, reference))
        return factor_of_rows(known, None if layout is None else layout.num_groups, of_whole)

    def _num_groups_of_whole(self, step: int, site: str | None = None) -> int:
        return 1 if self._groups_of_whole is None else self._groups_of_whole(step, site)

    def _has_own_rows(self, step: int, assembly: Assembly) -> bool:
        """Whether the parts are those of different rows; the first dimension, where the inputs do not tell."""
        layout = self.layout(step)
        return lies_in_rows(assembly, layout) if layout is not None else 0 in assembly.way.dims

    def fresh(self) -> Self:
        """Return the same, with nothing found yet."""
        found = copy.copy(self)
        found._begin()
        return found

    def remarks(self) -> list[Remark]:
        """Return what was found of each tensor that was read."""
        return [Remark(*key, how, *self._standing(key)) for key, how in self._arranged.items()]

    def note(self, remarks: Iterable[Remark]) -> None:
        """Take over what a `fresh` one remarked."""
        for one in remarks:
            key = one.step, one.site
            self._arranged[key], self._told[key] = one.how, (one.is_open, one.is_same)

    def standing(self, entry: Entry) -> tuple[bool, bool]:
        """Return whether a tensor is shares that are not added up yet, and whether all ranks have the same."""
        key = (entry.step, entry.site)
        if key in self._told:
            return self._told[key]
        if key not in self._ways:
            self.assembly(entry)
        return self._standing(key)

    def is_of_rows(self, entry: Entry) -> bool:
        """Whether each row of a tensor is in the rank whose share of a table has it."""
        self.standing(entry)
        return self._arranged.get((entry.step, entry.site)) == HOW[ROWS]

    def _standing(self, key: _Key) -> tuple[bool, bool]:
        way = self._ways[key]
        places = Counter(way.way.cells)
        return way.is_open, not way.differ and places.total() > 1 and max(places.values()) > 1


def _key(entry: Entry) -> _Key:
    return entry.step, entry.site
