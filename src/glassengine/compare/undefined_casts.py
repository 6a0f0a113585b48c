"""Elements that hang on a cast of a number that the integer dtype cannot hold: infinities, NaN, numbers too large.

What comes out of such a cast is up to the processor, so nobody is wrong about it. Model code makes them on purpose and
drops them again (the logarithm of a distance of 0 in relative positions); what counts is all that does not depend on
them. Whether an element does is tried: whatever reads such a cast is computed a second time, from other numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from glassengine.program.naming import op_name

_CASTS = frozenset({"_to_copy", "to", "convert_element_type"})


class UndefinedCasts:
    """The elements of one step, filled in graph order."""

    def __init__(self) -> None:
        self._others: dict[str, torch.Tensor] = {}
        self._undefined: dict[str, torch.Tensor] = {}

    def visit(self, node: Node, value: Any, value_of: Callable[[Node], Any]) -> None:
        """Take note of a computed node.

        Args:
            node: It.
            value: Its value.
            value_of: Gives the value of a node that it reads.
        """
        if not isinstance(value, torch.Tensor):
            return
        other = None
        if any(source.name in self._others for source in node.all_input_nodes):
            other = self._again(node, value, value_of)
        elif op_name(node) in _CASTS and not value.is_floating_point() and value.dtype is not torch.bool:
            beyond = _beyond(value_of(node.all_input_nodes[0]), value.dtype)
            other = value if beyond is None else torch.where(beyond, _far_from(value), value)
        if other is None:
            return
        differs = (other != value) & ~(other.isnan() & value.isnan())
        if bool(differs.any()):
            self._others[node.name], self._undefined[node.name] = other, differs

    def of(self, node: str) -> torch.Tensor | None:
        """Return a bool mask, in the shape of the node's value, of what does not count; None where all does."""
        return self._undefined.get(node)

    def _again(self, node: Node, value: torch.Tensor, value_of: Callable[[Node], Any]) -> torch.Tensor:
        def argument(source: Node) -> Any:
            return self._others[source.name] if source.name in self._others else value_of(source)

        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), argument)
        target: Any = node.target
        try:
            again: torch.Tensor = target(*args, **kwargs)
        except (RuntimeError, IndexError):  # a number that is no index
            return _far_from(value)
        return again


def _beyond(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return which numbers an integer dtype cannot hold."""
    if not source.is_floating_point():
        return None
    limits = torch.iinfo(dtype)
    return ~((source > limits.min - 1.0) & (source < limits.max + 1.0))


def _far_from(value: torch.Tensor) -> torch.Tensor:
    """Return other values than these in every element."""
    if value.dtype is torch.bool:
        return ~value
    if value.is_floating_point():
        return torch.where(value > 0, -1.0, 1.0).to(value.dtype)
    limits = torch.iinfo(value.dtype)
    return torch.where(value > 0, limits.min // 2, limits.max // 2).to(value.dtype)
