"""The tensors of one step by name: what `session.debug_buffers` is, and what patterns of names choose of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from glassengine.engine.session.loaded import LoadedEngine
from glassengine.engine.store.manifest import AddedOutput
from glassengine.errors import UnknownNameError, UsageError
from glassengine.sites import matches, patterns_of


class UnknownBufferError(UnknownNameError, KeyError):
    """A name that no tensor of the step has; a KeyError as well, as of any dict."""


class DebugBuffers(dict[str, torch.Tensor]):
    """A dict in which a tensor is also found by any other name of its own: `buffers["layers.6.mlp_output"]`.

    That is its site or node, or a pattern that names this tensor and no other, such as the end of its site. Only
    `buffers[name]` looks that far: keys, `in` and `get` know the names alone that it was asked for by.
    """

    def __init__(self, values: Mapping[str, torch.Tensor], added_outputs: Mapping[str, AddedOutput]) -> None:
        super().__init__(values)
        self._added_outputs = added_outputs

    def __missing__(self, wanted: str) -> torch.Tensor:
        added = [self._added_outputs[name] for name in self if name in self._added_outputs]
        known = [(name, name) for name in self]
        known += [(other, entry.name) for entry in added for other in (entry.site, entry.node)]
        found = {name for other, name in known if other == wanted}
        found = found or {name for other, name in known if matches(wanted, other)}
        if len(found) == 1:
            return self[found.pop()]
        kind = "tensor of this step" if not found else "single tensor of this step"
        raise UnknownBufferError(kind, wanted, self, hint="session.debug_buffers.keys() has the names")

    def __reduce__(self) -> Any:
        # What is saved is a plain dict, which `torch.load(weights_only=True)` reads and `glass compare` does.
        return OrderedDict, (), None, None, iter(self.items())


def select_names(engine: LoadedEngine, patterns: Sequence[str]) -> list[str]:
    """Return what of an engine's inputs and outputs `patterns` name, in the engine's order.

    Raises:
        UsageError: A pattern names a site of the program that was not built as an output.
        UnknownNameError: It names nothing at all.
    """
    wanted: set[str] = set()
    for pattern in patterns_of(patterns, "debug"):
        found = {name for name in engine.debug_names if name == pattern}
        found = found or {e.name for e in engine.manifest.added_outputs if pattern in (e.site, e.node)}
        found = found or {
            name
            for name in engine.debug_names
            if matches(pattern, name)
            or (name in engine.added_outputs and matches(pattern, engine.added_outputs[name].site))
        }
        sites = [] if found else engine.sites.match(pattern)
        nodes = {site.node for site in sites}
        found = found or {entry.name for entry in engine.manifest.added_outputs if entry.node in nodes}
        if sites and not found:
            raise UsageError(
                f"{pattern!r} is in the program, but was not built as an output of the engine {engine.manifest.name!r}",
                expected=[entry.name for entry in engine.manifest.added_outputs] or "no added outputs",
                hint=f"glass build {engine.manifest.model.get('spec', 'MODEL')} --add-output '{pattern}'",
            )
        if not found:
            names = [*engine.debug_names, *(site.name for site in engine.sites)]
            raise UnknownNameError("output", pattern, names, hint=f"glass sites {engine.directory}")
        wanted |= found
    return [name for name in engine.debug_names if name in wanted]
