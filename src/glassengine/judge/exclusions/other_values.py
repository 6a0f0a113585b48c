"""Legally otherwise: what comes of elements in whose place every right implementation may have something else.

A source marks elements of a node and says why. Other values take their place in a lane beside the program's; what reads
them is computed once more, in graph order, from the other values. Elements that come out otherwise depend on those that
were marked, and are excluded. Where the other values are dropped again, nothing depends on them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.blocks import agree
from glassengine.results import ExemptionReason

ValueOf = Callable[[Node], Any]
"""Gives the value of a node that another one reads."""

WHOLE = object()
"""Stands for another value of which nothing is known: all that reads it differs."""


class OtherValues:
    """The lane: other legal values of the nodes of a graph, as far as they differ from the program's.

    Args:
        again: Computes a node once more: takes it, and the other values of nodes that it reads.
        lost: Stands for the result of a node that cannot be computed from other values; takes the program's.

    Attributes:
        others: Node -> other value.
    """

    def __init__(
        self, again: Callable[[Node, Mapping[Node, Any]], Any], lost: Callable[[Any], Any] = lambda value: WHOLE
    ) -> None:
        self._again, self._lost = again, lost
        self.others: dict[Node, Any] = {}

    def below(self, node: Node, value: Any) -> Any:
        """Return what a node makes of the other values that it reads; its own `value` where it reads none."""
        own = [source for source in node.all_input_nodes if source in self.others]
        if not own:
            return value
        if any(self.others[source] is WHOLE for source in own):
            return WHOLE
        try:
            return self._again(node, self.others)
        except (RuntimeError, IndexError, ValueError):  # a number that is not an index
            return self._lost(value)

    def keep(self, node: Node, other: Any, value: Any) -> bool:
        """Keep another value of a node where it differs; return whether it does."""
        is_other = other is WHOLE or (
            other is not value and any(pytree.tree_leaves(pytree.tree_map(_differs_at_all, value, other)))
        )
        if is_other:
            self.others[node] = other
        return is_other

    def of(self, node: Node, value: Tensor, share: float = 0.0) -> Tensor | None:
        """Return a bool mask of the elements of `value`, a node's own, that differ; None where none does.

        Args:
            node: It.
            value: Its value.
            share: Of the size of an element: smaller differences do not count.
        """
        if node not in self.others:
            return None
        found = differs(self.others[node], value, share)
        return found if bool(found.any()) else None

    def settle(self, node: Node) -> None:
        """Take note that nothing depends on `node`: its value is known, or nothing reads it any more."""
        self.others.pop(node, None)


class Source:
    """What leaves elements undefined. Subclasses say where.

    Attributes:
        kind: What sort of exclusion it is.
        reason: Why these elements do not count.
    """

    kind: ExemptionReason
    reason: str

    def marks(self, node: Node, value: Tensor, value_of: ValueOf) -> Tensor | None:
        """Return a bool mask, to broadcast against `value`, of what `node` leaves undefined; None for nothing."""
        raise NotImplementedError

    def drops(self, node: Node, value: Tensor, value_of: ValueOf) -> Tensor | None:
        """Return a bool mask of other elements that do not count, on which nothing that counts depends."""
        return None

    def excludes(self, mask: Tensor) -> bool:
        """Whether elements of a tensor that were found are excluded."""
        return True


class Followed:
    """The elements of one step that depend on what a source marks, found in graph order."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._value_of: ValueOf = _nothing
        self._lane = OtherValues(self._again, far_from)
        self._excluded: dict[str, Tensor] = {}

    def visit(self, node: Node, value: Any, value_of: ValueOf) -> None:
        """Take note of a computed node.

        Args:
            node: It.
            value: Its value: a tensor, or the tensors of an op with several results.
            value_of: Gives the value of a node that it reads.
        """
        self._value_of = value_of
        other = self._lane.below(node, value)
        is_tensor = isinstance(value, Tensor)
        if is_tensor and (marks := self.source.marks(node, value, value_of)) is not None:
            other = torch.where(marks, far_from(value), other)
        found = self._lane.of(node, value) if self._lane.keep(node, other, value) and is_tensor else None
        dropped = self.source.drops(node, value, value_of) if is_tensor else None
        if dropped is not None and bool(dropped.any()):
            found = dropped if found is None else found | dropped
        if found is not None:
            self._excluded[node.name] = found

    def of(self, node: str) -> Tensor | None:
        """Return a bool mask, in the shape of the node's value, of what does not count; None where all does."""
        found = self._excluded.get(node)
        return found if found is not None and self.source.excludes(found) else None

    def settle(self, node: Node) -> None:
        """Take note that nothing reads `node` any more."""
        self._lane.settle(node)
        self._excluded.pop(node.name, None)

    def _again(self, node: Node, others: Mapping[Node, Any]) -> Any:
        args, kwargs = torch.fx.node.map_arg(
            (node.args, node.kwargs), lambda source: others[source] if source in others else self._value_of(source)
        )
        target: Any = node.target
        return target(*args, **kwargs)


def _nothing(node: Node) -> Any:
    raise KeyError(node)


def far_from(value: Any) -> Any:
    """Return other values than these in every element of every tensor."""
    return pytree.tree_map(lambda leaf: _far_from(leaf) if isinstance(leaf, Tensor) else leaf, value)


def _far_from(value: Tensor) -> Tensor:
    if value.dtype is torch.bool:
        return ~value
    if value.is_floating_point():
        return torch.where(value > 0, -1.0, 1.0).to(value.dtype)
    limits = torch.iinfo(value.dtype)
    return torch.where(value > 0, limits.min // 2, limits.max // 2).to(value.dtype)


def differs(other: Any, value: Tensor, share: float = 0.0) -> Tensor:
    """Return where another value differs from a node's own by more than `share` of its size."""
    if not isinstance(other, Tensor) or other.shape != value.shape:
        return torch.ones_like(value, dtype=torch.bool)
    same = agree(other, value)
    return ~same & ~((other - value).abs() <= share * value.abs()) if share else ~same


def _differs_at_all(value: Any, other: Any) -> bool:
    if not isinstance(value, Tensor):
        return not isinstance(other, Tensor) and bool(other != value)
    return other is not value and bool(differs(other, value).any())
