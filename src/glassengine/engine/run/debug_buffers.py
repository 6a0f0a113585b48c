"""The tensors of one step by name: what `session.debug_buffers` is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from glassengine.errors import UnknownNameError
from glassengine.sites import matches

if TYPE_CHECKING:
    from glassengine.engine.store.manifest import AddedOutput


class UnknownBufferError(UnknownNameError, KeyError):
    """A name that no tensor of the step has; a KeyError as well, as of any dict."""


class DebugBuffers(dict[str, torch.Tensor]):
    """A dict in which a tensor is also found by any other name of its own: `buffers["layers.6.mlp_output"]`.

    That is its site or node, or a pattern that names this tensor and no other, such as the end of its site. Only
    `buffers[name]` looks that far: keys, `in` and `get` know the names alone that it was asked for by.

    Args:
        values: Name -> tensor, in the order of the documents.
        added_outputs: Name -> what is known of it, for those of them that were added to the engine.
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
