"""The registry of what is beside the core: plugins of this package, and entry points of other packages.

A plugin is a folder of `plugins/`. Nothing outside of that folder imports from it: a plugin is asked for here, by name,
so that the core works without it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from glassengine.errors import GlassError, UsageError, first_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

BACKENDS = "glassengine.backends"
"""Each entry is a class that makes a `backends.protocol.backend.Backend`; the built-in ones come by the same door."""
FORMATS = "glassengine.formats"
"""Each entry is a `recording.source.SourceFormat`."""
SERVING = "glassengine.serving"
"""Each entry is a function from a place and `serving.protocol.ServingOptions` to a `serving.protocol.Served`."""

EXTRAS = {
    "cluster": "ray",
    "lazy": "lazy",
    "onnx": "onnx",
    "quantized": "quantized",
    "serving": "serving",
    "tensorrt_rtx": "tensorrt-rtx",
}
"""Plugin -> the extra that installs it, with the packages that it needs."""
_PLUGINS = "glassengine.plugins."


def plugin(module: str) -> Any:
    """Return a plugin, or a module of one: "cluster.ray_tasks" is `plugins/cluster/ray_tasks.py`.

    Raises:
        UsageError: The plugin is not installed; names the extra that has it.
    """
    return imported(_PLUGINS + module)


def imported(module: str) -> Any:
    """Return a module of this package, of which a part may be missing.

    Raises:
        UsageError: It is of a plugin that is not installed, or needs one; names the extra that has it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = _plugin_of(error.name or "")
        if name is None:
            raise
        raise UsageError(
            f"the plugin {name!r} is not installed", got=first_line(error), hint=_install(EXTRAS[name])
        ) from error


def require_package(module: str, what: str, install: str, error: type[GlassError] = UsageError) -> Any:
    """Return a module of a package that may not be installed.

    Args:
        module: Its full name.
        what: Cannot be done without it.
        install: The command that installs it.
        error: That is raised without it.

    Raises:
        GlassError: It cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        raise error(what, got=str(problem), hint=install) from problem


def registered(group: str) -> dict[str, EntryPoint]:
    """Return the entries of a group, by name."""
    from importlib.metadata import entry_points

    return _entries_on(tuple(sys.path), group, entry_points)


@functools.lru_cache(maxsize=8)
def _entries_on(_path: tuple[str, ...], group: str, find: Callable[..., Iterable[EntryPoint]]) -> dict[str, EntryPoint]:
    """Return the entries of all distributions on the path: hundreds of files, asked for ten times in a check."""
    return {entry.name: entry for entry in find(group=group)}


def remedy(entry: EntryPoint) -> str:
    """Return what should repair an entry that cannot be imported."""
    if entry.dist is None:
        return "install the package that registers it again"
    if entry.dist.name != "glassengine":
        return f"pip install --force-reinstall {entry.dist.name}"
    return _install(EXTRAS.get(_plugin_of(entry.module) or "", "onnx"))


def _plugin_of(module: str) -> str | None:
    name = module.removeprefix(_PLUGINS).partition(".")[0]
    return name if module.startswith(_PLUGINS) and name in EXTRAS else None


def _install(extra: str) -> str:
    return f"pip install 'glassengine[{extra}]'"
