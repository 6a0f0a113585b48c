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
from torch.utils import _pytree as pytree

from glassengine.program.naming import op_name

_CASTS = frozenset({"_to_copy", "to", "convert_element_type"})


class Undefined:
    """Elements of one step that hang on something undefined, filled in graph order; subclasses say where they begin."""

    def __init__(self) -> None:
        self._others: dict[str, Any] = {}
        self._undefined: dict[str, torch.Tensor] = {}

    def visit(self, node: Node, value: Any, value_of: Callable[[Node], Any]) -> None:
        """Take note of a computed node.

        Args:
            node: It.
            value: Its value: a tensor, or the tensors of an op with several results.
            value_of: Gives the value of a node that it reads.
        """
        is_below = any(source.name in self._others for source in node.all_input_nodes)
        other = self._again(node, value, value_of) if is_below else value
        if isinstance(value, torch.Tensor) and (begins := self.begin(node, value, value_of)) is not None:
            other = torch.where(begins, far_from(value), other)
        if other is value:
            return
        differs = pytree.tree_map(_differs, value, other)
        if any(isinstance(leaf, torch.Tensor) and bool(leaf.any()) for leaf in pytree.tree_leaves(differs)):
            self._others[node.name] = other
            if isinstance(differs, torch.Tensor):
                self._undefined[node.name] = differs

    def begin(self, node: Node, value: torch.Tensor, value_of: Callable[[Node], Any]) -> torch.Tensor | None:
        """Return a bool mask, to broadcast against `value`, of what `node` leaves undefined; None for nothing."""
        raise NotImplementedError

    def of(self, node: str) -> torch.Tensor | None:
        """Return a bool mask, in the shape of the node's value, of what does not count; None where all does."""
        return self._undefined.get(node)

    def _again(self, node: Node, value: Any, value_of: Callable[[Node], Any]) -> Any:
        def argument(source: Node) -> Any:
            return self._others[source.name] if source.name in self._others else value_of(source)

        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), argument)
        target: Any = node.target
        try:
            return target(*args, **kwargs)
        except (RuntimeError, IndexError):  # a number that is no index
            return pytree.tree_map(_far_from, value)


class UndefinedCasts(Undefined):
    """What hangs on a cast of a number that the integer dtype cannot hold."""

    def begin(self, node: Node, value: torch.Tensor, value_of: Callable[[Node], Any]) -> torch.Tensor | None:
        """Return where those numbers are."""
        if op_name(node) not in _CASTS or value.is_floating_point() or value.dtype is torch.bool:
            return None
        return _beyond(value_of(node.all_input_nodes[0]), value.dtype)


def _beyond(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return which numbers an integer dtype cannot hold."""
    if not source.is_floating_point():
        return None
    limits = torch.iinfo(dtype)
    return ~((source > limits.min - 1.0) & (source < limits.max + 1.0))


def far_from(value: torch.Tensor) -> torch.Tensor:
    """Return other values than these in every element."""
    if value.dtype is torch.bool:
        return ~value
    if value.is_floating_point():
        return torch.where(value > 0, -1.0, 1.0).to(value.dtype)
    limits = torch.iinfo(value.dtype)
    return torch.where(value > 0, limits.min // 2, limits.max // 2).to(value.dtype)


def _far_from(value: Any) -> Any:
    return far_from(value) if isinstance(value, torch.Tensor) else value


def _differs(value: Any, other: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return False
    if not isinstance(other, torch.Tensor) or other.shape != value.shape:
        return torch.ones_like(value, dtype=torch.bool)
    return (other != value) & ~(other.isnan() & value.isnan())
