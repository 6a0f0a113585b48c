"""Elements that depend on a cast of a number that the integer dtype cannot hold: infinities, NaN, numbers too large.

The result of such a cast depends on the processor, so no result is wrong. Model code makes them on purpose and
drops them again (the logarithm of a distance of 0 in relative positions); what counts is all that does not depend on
them. Whether an element does is tried: each reader of such a cast is computed a second time, from other numbers.
Nor does an element count that is made to be cast so and for nothing else, or to be cast and dropped again: others keep
the 0 from the logarithm. There what comes after is computed ahead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from glassengine.blocks import agree
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import ExemptionReason


class Undefined:
    """Elements of one step that depend on something undefined, filled in graph order; subclasses define the start.

    Attributes:
        kind: What sort of exemption it is.
        reason: Why these elements do not count.
    """

    kind: ExemptionReason
    reason: str

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
        except (RuntimeError, IndexError):  # a number that is not an index
            return pytree.tree_map(_far_from, value)


class UndefinedCasts(Undefined):
    """What depends on a cast of a number that the integer dtype cannot hold, and what is only made to be cast so."""

    kind: ExemptionReason = "undefined casts"
    reason = "elements of which a cast to integers makes nothing defined, or nothing that is kept"

    def __init__(self) -> None:
        super().__init__()
        self._made_for_casts: set[Node] | None = None
        self._ahead: dict[Node, Any] = {}
        self._lost_at: dict[Node, torch.Tensor] = {}

    def visit(self, node: Node, value: Any, value_of: Callable[[Node], Any]) -> None:
        """Take note of a computed node, as everywhere, and of what is only made of it."""
        super().visit(node, value, value_of)
        if self._made_for_casts is None:
            self._made_for_casts = _made_for_casts(node.graph)
        if node not in self._made_for_casts or not isinstance(value, torch.Tensor):
            return
        try:
            lost = self._lost(node, value, value_of)
        except _Unknown:
            return
        if bool(lost.any()):
            own = self._undefined.get(node.name)
            self._undefined[node.name] = lost if own is None else lost | own

    def begin(self, node: Node, value: torch.Tensor, value_of: Callable[[Node], Any]) -> torch.Tensor | None:
        """Return where those numbers are."""
        if not traits_of(node).casts or value.is_floating_point() or value.dtype is torch.bool:
            return None
        return _beyond(value_of(node.all_input_nodes[0]), value.dtype)

    def _lost(self, node: Node, value: torch.Tensor, value_of: Callable[[Node], Any]) -> torch.Tensor:
        """Return which elements end undefined or dropped, for any readers."""
        if node in self._lost_at:
            return self._lost_at[node]
        lost = torch.ones_like(value, dtype=torch.bool)
        for user in _readers(node):
            if _sizes(user) != _sizes(node):
                raise _Unknown
            if _may_drop(user, node):
                condition = self._computed(user.args[0], value_of)  # type: ignore[arg-type]
                lost = lost & (~condition if user.args[1] is node else condition)
                continue
            of_user = torch.zeros_like(lost)
            if user in (self._made_for_casts or ()):
                with contextlib.suppress(_Unknown):
                    of_user = self._lost(user, self._computed(user, value_of), value_of)
            beyond = _beyond(value, user.meta["val"].dtype) if _makes_integers(user) else None
            lost = lost & (of_user if beyond is None else of_user | beyond)
        self._lost_at[node] = lost
        return lost

    def _computed(self, node: Node, value_of: Callable[[Node], Any]) -> Any:
        """Return the value of a node that may be still to come."""
        try:
            return value_of(node)
        except KeyError:
            if node not in self._ahead:
                # In place, or numbers that a program makes to compute with.
                if not traits_of(node).in_place and not traits_of(node).moves:
                    raise _Unknown from None
                args, kwargs = torch.fx.node.map_arg(
                    (node.args, node.kwargs), lambda source: self._computed(source, value_of)
                )
                target: Any = node.target
                self._ahead[node] = target(*args, **kwargs)
            return self._ahead[node]


class _Unknown(Exception):
    """Something that is still to come is no matter of single elements."""


def _made_for_casts(graph: Graph) -> set[Node]:
    """Return the nodes of which nothing is made but integers, and those integers that may all be dropped again."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        readers = _readers(node)
        if readers and all(_may_drop(u, node) or _leads_on(u, node, found) for u in readers):
            found.add(node)
    cast: set[Node] = set()
    for node in graph.nodes:
        if (_makes_integers(node) and _is_float(node.args[0])) or not cast.isdisjoint(node.all_input_nodes):
            cast.add(node)
    return {node for node in found if _is_float(node) or node in cast}


def _leads_on(user: Node, node: Node, found: set[Node]) -> bool:
    return bool(traits_of(user).in_place) and (user in found or (_makes_integers(user) and _is_float(node)))


def _may_drop(user: Node, node: Node) -> bool:
    """Whether `user` takes integers from `node` where it does not take them from elsewhere."""
    is_branch = op_name(user) == "where" and len(user.args) == 3 and user.args.count(node) == 1
    return is_branch and user.args[0] is not node and not _is_float(node)


def _sizes(node: Node) -> list[str]:
    """Return the shape of a node; sizes that are symbols are not compared by value, which would bind them."""
    return [str(size) for size in node.meta["val"].shape]


def _is_float(node: Any) -> bool:
    kept = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(kept, torch.Tensor) and kept.is_floating_point()


def _readers(node: Node) -> list[Node]:
    return [user for user in node.users if "_assert" not in str(user.target)]


def _makes_integers(node: Node) -> bool:
    """Whether a node casts to an integer dtype."""
    kept = node.meta.get("val")
    is_integer = isinstance(kept, torch.Tensor) and not kept.is_floating_point() and kept.dtype is not torch.bool
    return is_integer and traits_of(node).casts


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
    return ~agree(other, value)
