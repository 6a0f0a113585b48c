"""Entry points that other packages add to this one: by group and name."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points

BACKENDS = "glassengine.backends"
"""Each entry is a class that makes a `backends.protocol.Backend`; the built-in ones come by the same door."""
FORMATS = "glassengine.formats"
"""Each entry is a `recording.read.source.Format`."""
SERVING = "glassengine.serving"
"""Each entry is a function from a place and `serving.protocol.Options` to a `serving.protocol.Served`."""


def registered(group: str) -> dict[str, EntryPoint]:
    """Return the entries of a group, by name."""
    return _entries_on(tuple(sys.path), group, entry_points)


@functools.lru_cache(maxsize=8)
def _entries_on(_path: tuple[str, ...], group: str, find: Callable[..., Iterable[EntryPoint]]) -> dict[str, EntryPoint]:
    """Return the entries of all distributions on the path: hundreds of files, asked for ten times in a check."""
    return {entry.name: entry for entry in find(group=group)}


def remedy(entry: EntryPoint) -> str:
    """Return what should repair an entry that cannot be imported."""
    if entry.dist is None:
        return "install the package that registers it again"
    ours = entry.dist.name == "glassengine"
    return "pip install 'glassengine[onnx]'" if ours else f"pip install --force-reinstall {entry.dist.name}"
