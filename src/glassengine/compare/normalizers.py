"""Brings two sources into one form before they are paired: NORMALIZERS, each a function of both sides.

printed_statistics   two traces that hold printed statistics alone are compared by these
inner_model          a model beside one that is inside of another module: `h.0.attn` for `net.h.0.attn`
sides_of_one_rank    the parts of several ranks beside a run of one rank, or of ranks of another layout
batch_axis           a record of a server, [tokens, ...], beside one of rows, [1, tokens, ...]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from glassengine.blocks.arrays import ArrayValues
from glassengine.compare.matching.sources import OpenedSource, SourceWrapper
from glassengine.errors import IncomparableError
from glassengine.recording.formats.debug_tree import FULL
from glassengine.recording.layout.layout import Entry
from glassengine.recording.source import TensorSource
from glassengine.sites import ROOT

if TYPE_CHECKING:
    from torch import Tensor

Sides = tuple[SourceWrapper, SourceWrapper]

_SHARE = 0.9
"""Of the names, or of the tensors of three dimensions, that must be in the other form."""
_FEWEST_FLAT = 4
_AROUND = "(around the model)"
_ENDS = (":", "/", "@")


def printed_statistics(left: SourceWrapper, right: SourceWrapper) -> Sides:
    """Return the statistics of two traces that hold nothing else.

    Raises:
        IncomparableError: One side has values and the other statistics alone.
    """
    found = [side.printed() for side in (left, right)]
    if found[0] is not None and found[1] is not None:
        return found[0], found[1]
    for side, statistics in ((left, found[0]), (right, found[1])):
        if statistics is not None:
            raise IncomparableError(
                "one side has statistics alone",
                got=str(side.path),
                expected="two summaries, or two traces with values",
                hint=f"the file next to it that ends in {FULL}, or the summary of the other side alone",
            )
    return left, right


def inner_model(left: SourceWrapper, right: SourceWrapper) -> Sides:
    """Return both sides, the candidate with the baseline's names where one model is a part of another module.

    A trainer that is a module itself (Lightning's, a wrapper with the loss) calls the model as a part of it. What the
    candidate has around the model has no counterpart and is listed as such.
    """
    ours, theirs = ({_path(entry.site) for entry in side.entries} - {ROOT} for side in (left, right))
    if not ours or not theirs or not ours.isdisjoint(theirs):
        return left, right
    if (inner := _prefix(ours, theirs)) is not None:
        return left, Renamed(right, inner, ROOT)
    outer = _prefix(theirs, ours)
    return (left, right) if outer is None else (left, Renamed(right, ROOT, outer))


def sides_of_one_rank(left: SourceWrapper, right: SourceWrapper) -> Sides:
    """Return both sides, each put together of its ranks where the other needs it; see `ranks.sides`."""
    if all(len({entry.rank for entry in side.entries}) < 2 for side in (left, right)):
        return left, right
    from glassengine.compare.ranks.sides import sides_of_one_rank

    return sides_of_one_rank(left, right)


def batch_axis(left: SourceWrapper, right: SourceWrapper) -> Sides:
    """Return both sides, a flat one beside one of a single row with a dimension for that row.

    Servers concatenate the tokens of the requests that they run at once. Of one request both records have the same
    elements in the same order. One tensor that lacks the dimension is a mistake; a record that always does is flat.
    """
    flat = _flat(left, right)
    if flat:
        return left, WithBatchAxis(right, flat)
    flat = _flat(right, left)
    return (WithBatchAxis(left, flat), right) if flat else (left, right)


Normalizer = Callable[[SourceWrapper, SourceWrapper], Sides]
NORMALIZERS: tuple[tuple[Normalizer, bool, bool], ...] = (
    (printed_statistics, True, True),
    (inner_model, False, True),
    (sides_of_one_rank, True, True),
    (batch_axis, False, False),
)
"""In this order: the function, and whether it also applies beside a map, and beside transposed tensors."""


def normalized(left: TensorSource, right: TensorSource, *, has_map: bool, is_transposed: bool) -> Sides:
    """Return two sources in one form.

    Raises:
        IncomparableError: One side has values and the other statistics alone.
    """
    sides: Sides = OpenedSource(left), OpenedSource(right)
    for normalizer, beside_map, beside_transpose in NORMALIZERS:
        if (beside_map or not has_map) and (beside_transpose or not is_transposed):
            sides = normalizer(*sides)
    return sides


class Renamed(SourceWrapper):
    """A source whose model has the name that another source has for it.

    Args:
        source: The source.
        inner: Path of the model in it; the root where it is the outermost.
        wanted: What that path is called instead.
    """

    def __init__(self, source: SourceWrapper, inner: str, wanted: str) -> None:
        super().__init__(source)
        self._inner, self._wanted = inner, wanted
        self._of = {dataclasses.replace(one, site=self._named(one.site)): one for one in source.entries}
        self.entries = tuple(self._of)

    @property
    def metadata(self) -> dict[str, Any]:
        """That of the source, with the new names."""
        metadata = dict(self._source.metadata)
        if isinstance(sources := metadata.get("sources"), dict):
            metadata["sources"] = {self._named(site): line for site, line in sources.items()}
        return metadata

    @property
    def changes(self) -> Mapping[str, Any]:
        """Which name stands for which."""
        return {"renamed": f"{self._inner!r} of the candidate is compared as {self._wanted!r}"}

    def tensor(self, entry: Entry) -> Tensor:
        """Return one of `entries`."""
        return super().tensor(self._of[entry])

    def _named(self, site: str) -> str:
        inside = _inside(site, self._inner)
        if inside is None:
            return _AROUND + site.removeprefix(ROOT) if _path(site) == ROOT else site
        if not inside or inside.startswith(_ENDS):
            return self._wanted + inside
        return inside if self._wanted == ROOT else f"{self._wanted}.{inside}"


class WithBatchAxis(SourceWrapper):
    """A flat record with a dimension for its one row."""

    def __init__(self, source: SourceWrapper, flat: Sequence[Entry]) -> None:
        super().__init__(source)
        self._flat = {dataclasses.replace(one, shape=(1, *one.shape), location=None): one for one in flat}
        changed = {made.place: made for made in self._flat}
        self.entries = tuple(changed.get(one.place, one) for one in source.entries)

    @property
    def changes(self) -> Mapping[str, Any]:
        """That of the source, and to how many tensors a dimension was given."""
        made, one = next(iter(self._flat.items()))
        flat = {f"flat {list(one.shape)} for {list(made.shape)}": len(self._flat)}
        return {**self._source.changes, "flat": flat}

    def tensor(self, entry: Entry) -> Tensor:
        """Return one of `entries`."""
        own = self._flat.get(entry)
        return super().tensor(entry) if own is None else super().tensor(own)[None]

    def values(self, entry: Entry) -> ArrayValues:
        """Return the values of one of `entries`."""
        own = self._flat.get(entry)
        found: ArrayValues = self._source.values(own or entry)
        return found if own is None else found._replace(array=found.array[None])


def _prefix(paths: Iterable[str], others: set[str]) -> str | None:
    """Return the path under which another model has nearly all modules of a model; None where there is none."""
    paths = sorted(paths)
    ends = [other.removesuffix(f".{path}") for path in paths[:1] for other in others if other.endswith(f".{path}")]
    shares = {end: sum(f"{end}.{path}" in others for path in paths) / len(paths) for end in sorted(ends, key=len)}
    best = max(shares, key=lambda end: shares[end], default=None)
    return best if best is not None and shares[best] >= _SHARE else None


def _path(site: str) -> str:
    """Return the path of a site, without its call."""
    return site.partition(":")[0].partition("/")[0].partition("@")[0]


def _inside(site: str, path: str) -> str | None:
    """Return what follows the path of a module, or the name within it; None where a site is of something else."""
    if path == ROOT:
        return site.removeprefix(ROOT) if _path(site) == ROOT else site
    if site == path or site.startswith(tuple(path + end for end in _ENDS)):
        return site.removeprefix(path)
    return site.removeprefix(f"{path}.") if site.startswith(f"{path}.") else None


def _flat(rows: SourceWrapper, other: SourceWrapper) -> list[Entry]:
    """Return the tensors of `other` that lack the dimension of a row, where it is flat throughout; else none."""
    known = {one.place: one.shape for one in rows.entries}
    pairs = [(known[one.place], one) for one in other.entries if one.place in known]
    hidden = [(shape, one) for shape, one in pairs if len(shape) == 3 and shape[0] == 1]
    found = {one.site for shape, one in hidden if shape[1:] == one.shape}
    if len(found) < _FEWEST_FLAT or len(found) < _SHARE * len({one.site for _, one in hidden}):
        return []
    return [one for shape, one in pairs if shape == (1, *one.shape)]
