"""A model beside one that is inside of another module: `h.0.attn` for `net.h.0.attn`, throughout.

A trainer that is a module itself (Lightning's, a wrapper with the loss) calls the model as a part of it: in one process
the record begins at the model, under DistributedDataParallel at the trainer around it. Names of the candidate become
those of the baseline; what it has around the model has no counterpart and is listed as such.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from glassengine.compare.ranks.of_source import OfSource
from glassengine.recording.layout.layout import Entry
from glassengine.recording.read.source import TensorSource
from glassengine.sites import ROOT

if TYPE_CHECKING:
    from torch import Tensor

RENAMED = "renamed"
"""Key of the metadata of such a source: in which way."""

_SHARE = 0.9
_AROUND = "(around the model)"
_ENDS = (":", "/", "@")


class Renamed(OfSource):
    """A source whose model is called by the name that another one has for it.

    Args:
        source: The source.
        inner: Path of the model in it; the root where it is the outermost.
        wanted: What that path is called instead.
    """

    def __init__(self, source: TensorSource, inner: str, wanted: str) -> None:
        super().__init__(source)
        self._inner, self._wanted = inner, wanted
        self._of = {dataclasses.replace(one, site=self._named(one.site)): one for one in source.entries}
        self.entries: tuple[Entry, ...] = tuple(self._of)

    @property
    def metadata(self) -> dict[str, Any]:
        """That of the source, its names changed, and in which way."""
        told = f"{self._inner!r} of the candidate is compared as {self._wanted!r}"
        found, sources = {**self._source.metadata, RENAMED: told}, self._source.metadata.get("sources")
        if isinstance(sources, dict):
            found["sources"] = {self._named(site): line for site, line in sources.items()}
        return found

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`."""
        return self._source.tensor(self._of[entry])

    def _named(self, site: str) -> str:
        inside = _inside(site, self._inner)
        if inside is None:
            return _AROUND + site.removeprefix(ROOT) if _path(site) == ROOT else site
        if not inside or inside.startswith(_ENDS):
            return self._wanted + inside
        return inside if self._wanted == ROOT else f"{self._wanted}.{inside}"


def of_one_model(left: TensorSource, right: TensorSource) -> tuple[TensorSource, TensorSource]:
    """Return both sides, the candidate with the baseline's names where one model is a part of another module."""
    ours, theirs = ({_path(entry.site) for entry in side.entries} - {ROOT} for side in (left, right))
    if not ours or not theirs or not ours.isdisjoint(theirs):
        return left, right
    if (inner := _prefix(ours, theirs)) is not None:
        return left, Renamed(right, inner, ROOT)
    outer = _prefix(theirs, ours)
    return (left, right) if outer is None else (left, Renamed(right, ROOT, outer))


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
