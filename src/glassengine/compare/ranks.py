"""Puts the parts together that the processes of one run recorded, to judge them against a run in one process.

A distributed tensor says how it is spread. Of any other the shape of its counterpart tells: parts of that shape must be
the same in all processes; parts that make it up along one dimension are concatenated, in the order of the ranks.
A fused projection is concatenated piece by piece where only that agrees: each rank has its share of each piece.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glassengine.compare.matching import Match, Matching
from glassengine.compare.measure import measure
from glassengine.compare.shards import assembled, is_spread, why_not_assembled
from glassengine.recording.layout import Entry
from glassengine.recording.source import TensorSource
from glassengine.results import Skipped

EXPLAINED = 0.02
"""Another arrangement of the parts is right when it leaves at most this fraction of the error."""

_MAX_GROUP = 64
"""Query heads per key head up to which a fused projection is recognised."""

_GOOD_SNR_DB = 20.0
"""Parts in a wrong place make errors as large as the tensor: what is better than this is in its place."""


@dataclasses.dataclass(frozen=True)
class Copies:
    """What the parts of one tensor make.

    Attributes:
        wholes: Every copy of the whole; more than one where several ranks have it, or the same part of it.
        ranks: Of each copy: the ranks it is from.
        how: In words.
        dim: Along which dimension the parts of a copy lie, if they do.
    """

    wholes: tuple[Tensor, ...]
    ranks: tuple[tuple[int, ...], ...]
    how: str
    dim: int | None = None

    @property
    def are_same(self) -> bool:
        """Whether all copies are equal; NaN is equal to NaN."""
        first, *others = self.wholes
        return all(torch.equal(first, other) or error_of(first, other) == 0 for other in others)


class PutTogether:
    """A source of several ranks as one of a single rank.

    Entries are those of the lowest rank that has the tensor, as rank 0; `tensor` gives the whole once `expect` was told
    the counterpart.
    """

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._parts: dict[tuple[int, str], list[Entry]] = {}
        for entry in source.entries:
            self._parts.setdefault((entry.step, entry.site), []).append(entry)
        self.entries: tuple[Entry, ...] = tuple(dataclasses.replace(parts[0], rank=0) for parts in self._parts.values())
        self._expected: dict[tuple[int, str], tuple[TensorSource, Entry]] = {}
        self._arranged: dict[tuple[int, str], str] = {}

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._source.path

    @property
    def metadata(self) -> dict[str, Any]:
        """That of the source."""
        return self._source.metadata

    @property
    def complete(self) -> bool:
        """Whether the source is."""
        return self._source.complete

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """What the source has skipped."""
        return self._source.skipped

    @property
    def arrangements(self) -> Mapping[str, int]:
        """How the tensors that were read were put together -> how many, most frequent first."""
        return dict(Counter(self._arranged.values()).most_common())

    def expect(self, entry: Entry, source: TensorSource, counterpart: Entry) -> None:
        """Note that the whole of `entry` is judged against `counterpart`, of `source`."""
        self._expected[_key(entry)] = source, counterpart

    def why_not(self, entry: Entry) -> str | None:
        """Return why the whole of `entry` cannot be told from its parts; None where it can."""
        parts = self._parts[_key(entry)]
        if len(parts) == 1:
            return None
        if is_spread(parts):
            return why_not_assembled(parts)
        if _key(entry) not in self._expected:
            return f"how the parts of {len(parts)} ranks belong together is not known where a map changes the layout"
        shapes, whole = [part.shape for part in parts], self._expected[_key(entry)][1].shape
        is_one_shape = all(shape == shapes[0] for shape in shapes)
        if dimension_of(shapes, whole) is not None or (is_one_shape and not _is_split(shapes[0], whole)):
            return None
        named = ", ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        return f"the parts of {len(parts)} ranks, {named}, do not make up {list(whole)} along one dimension"

    def tensor(self, entry: Entry) -> Tensor:
        """Return the whole of one of `entries`.

        Of copies that are not the same, it is the one that differs most from the counterpart.
        """
        copies = self.copies(entry)
        key = _key(entry)
        self._arranged[key] = copies.how
        if copies.are_same:
            return copies.wholes[0]
        self._arranged[key] += ", which are not the same"
        source, counterpart = self._expected[key]
        reference = source.tensor(counterpart)
        return max(copies.wholes, key=lambda whole: error_of(whole, reference))

    def parts(self, entry: Entry) -> list[tuple[int, Tensor]]:
        """Return rank and values of each part of one of `entries`."""
        return [(part.rank, self._source.tensor(part)) for part in self._parts[_key(entry)]]

    def copies(self, entry: Entry) -> Copies:
        """Return what the parts of one of `entries` make."""
        entries, parts = self._parts[_key(entry)], self.parts(entry)
        if len(parts) == 1:
            return Copies((parts[0][1],), ((parts[0][0],),), "of one rank")
        if is_spread(entries):
            found = assembled(
                [(rank, tensor, entry.sharding) for (rank, tensor), entry in zip(parts, entries, strict=True)]
            )
            return Copies(*found, "distributed tensors")
        source, counterpart = self._expected[_key(entry)]
        dim = dimension_of([tuple(tensor.shape) for _, tensor in parts], counterpart.shape)
        if dim is None:
            return Copies(tuple(tensor for _, tensor in parts), tuple((rank,) for rank, _ in parts), "in every rank")
        parts = _distinct(parts, counterpart.shape[dim], dim)
        ranks, tensors = tuple(rank for rank, _ in parts), [tensor for _, tensor in parts]
        whole, num_pieces = _concatenated(tensors, dim, source.tensor(counterpart))
        how = f"concatenated along dimension {dim}" + (f" in {num_pieces} pieces" if num_pieces > 1 else "")
        return Copies((whole,), (ranks,), how, dim)


def sides_of_one_rank(left: TensorSource, right: TensorSource) -> tuple[TensorSource, TensorSource]:
    """Return both sides, that of several ranks put together where the other one has a single rank.

    Sides that both have several are compared rank by rank.
    """
    several = [len({entry.rank for entry in side.entries}) > 1 for side in (left, right)]
    if several[0] == several[1]:
        return left, right
    return (PutTogether(left), right) if several[0] else (left, PutTogether(right))


def expect_counterparts(left: TensorSource, right: TensorSource, matching: Matching) -> Matching:
    """Tell a side that is put together what each tensor is judged against.

    Returns:
        The matching without what cannot be put together, which is listed with its reason.
    """
    possible: list[Match] = []
    impossible: list[tuple[Entry, str]] = []
    for match in matching.matches:
        reason = None
        if isinstance(left, PutTogether):
            reason = _reason(left, match.baseline, right, match.candidates[0], match)
        elif isinstance(right, PutTogether):
            found = (_reason(right, entry, left, match.baseline, match) for entry in match.candidates)
            reason = next(filter(None, found), None)
        if reason is None:
            possible.append(match)
        else:
            impossible.append((match.baseline, reason))
    return Matching(tuple(possible), (*matching.baseline_only, *impossible), matching.candidate_only)


def _reason(side: PutTogether, entry: Entry, other: TensorSource, counterpart: Entry, match: Match) -> str | None:
    rule = match.rule
    if len(match.candidates) == 1 and (rule is None or not (rule.baseline_ops or rule.candidate_ops)):
        side.expect(entry, other, counterpart)
    return side.why_not(entry)


def dimension_of(shapes: Sequence[tuple[int, ...]], whole: tuple[int, ...]) -> int | None:
    """Return along which dimension parts make up `whole`, or several copies of it; None where along none."""
    if any(len(shape) != len(whole) for shape in shapes):
        return None
    found: list[tuple[bool, int]] = []
    for dim, size in enumerate(whole):
        others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        total = sum(shape[dim] for shape in shapes)
        if len(others) != 1 or not 0 < size <= total or total % size or any(shape[dim] >= size for shape in shapes):
            continue
        # Caches of two runs may be of other lengths.
        is_exact = others == {(*whole[:dim], *whole[dim + 1 :])}
        if is_exact or not _is_split(shapes[0], whole):
            found.append((not is_exact, dim))
    return min(found)[1] if found else None


def error_of(x: Tensor, y: Tensor) -> float:
    """Return the root mean square of `y - x`; infinite for other shapes, or where one alone is not finite."""
    if x.shape != y.shape:
        return math.inf
    figures = measure(x, y, rtol=0.0, atol=0.0)
    return math.inf if figures.num_nonfinite_mismatch else figures.rms_diff


def _key(entry: Entry) -> tuple[int, str]:
    return entry.step, entry.site


def _is_split(part: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a part looks like one of a tensor that is split along several dimensions."""
    if len(part) != len(whole) or any(p == 0 or w % p for p, w in zip(part, whole, strict=True)):
        return False
    return sum(p != w for p, w in zip(part, whole, strict=True)) > 1


def _distinct(parts: list[tuple[int, Tensor]], size: int, dim: int) -> list[tuple[int, Tensor]]:
    """Return the parts that make up `size` once, of parts that several ranks have."""
    if sum(part.shape[dim] for _, part in parts) == size:
        return parts
    kept: list[tuple[int, Tensor]] = []
    for rank, part in parts:
        if not any(part.shape == other.shape and torch.equal(part, other) for _, other in kept):
            kept.append((rank, part))
    if sum(part.shape[dim] for _, part in kept) == size:
        return kept
    # Copies that are not the same: the first of them, so that the difference shows as one.
    totals = itertools.accumulate(part.shape[dim] for _, part in parts)
    return [part for part, total in zip(parts, totals, strict=True) if total <= size]


def _concatenated(parts: Sequence[Tensor], dim: int, reference: Tensor) -> tuple[Tensor, int]:
    """Return the parts one after another, or piece by piece where that alone agrees; and the number of pieces."""
    plain = torch.cat(list(parts), dim)
    if plain.shape != reference.shape or torch.equal(plain, reference):
        return plain, 1
    figures = measure(reference, plain, rtol=0.0, atol=0.0)
    if not figures.snr_db < _GOOD_SNR_DB:
        return plain, 1
    for sizes in _pieces([part.shape[dim] for part in parts]):
        # One row tells most arrangements apart; the whole is looked at where the row agrees.
        row = _packed([_first_row(part, dim) for part in parts], sizes)
        expected = _first_row(reference, dim)
        if error_of(row, expected) <= EXPLAINED * error_of(_first_row(plain, dim), expected):
            packed = _packed([part.movedim(dim, -1) for part in parts], sizes).movedim(-1, dim)
            if error_of(packed, reference) <= EXPLAINED * figures.rms_diff:
                return packed, len(sizes)
    return plain, 1


def _pieces(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield how parts may consist of pieces: two equal ones, or queries and as many or fewer keys and values."""
    size = sizes[0]
    if any(other != size for other in sizes):
        return
    if size % 2 == 0:
        yield size // 2, size // 2
    for group in range(1, _MAX_GROUP + 1):
        if size % (group + 2) == 0:
            piece = size // (group + 2)
            yield group * piece, piece, piece


def _packed(parts: Sequence[Tensor], sizes: tuple[int, ...]) -> Tensor:
    split = [torch.split(part, list(sizes), -1) for part in parts]
    return torch.cat([pieces[i] for i in range(len(sizes)) for pieces in split], -1)


def _first_row(tensor: Tensor, dim: int) -> Tensor:
    return tensor.movedim(dim, -1).reshape(-1, tensor.shape[dim])[0]
