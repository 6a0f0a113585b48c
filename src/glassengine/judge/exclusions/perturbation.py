"""Elements in whose place every right implementation may have other values, and what depends on them.

A `Source` marks elements of a node's result and gives other legal values for them. `OtherValues`, the lane, holds these
beside the program's own values and computes what reads them once more, in graph order. Elements that come out different
depend on a marked element and are excluded; where an op drops the other values, nothing depends on them any more.
`Followed` is one source with its lane, in one step.

The sources are listed in `sources_per_step`. `dead_elements` uses the lane with NaN as the other value. Padding is no
source: the inputs say which positions hold a token (see `masked`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.blocks import agree
from glassengine.numerics.judgement import unit_roundoff
from glassengine.ops.row import OpTraits
from glassengine.ops.traits import traits_of
from glassengine.results import ExemptionReason

Values = Mapping[Node, Sequence[Any]]
"""Node -> its values in one step, of the nodes computed so far: see `EXACT` and `NATIVE`, then runs with noise."""
EXACT, NATIVE = 0, 1
"""Positions in `Values`: the float64 value, and the value in the program's own dtype."""

Again = Callable[[Node, Mapping[Node, Any]], Any]
"""Computes a node once more: takes it, and other values of nodes that it reads."""

WHOLE = object()
"""Stands for another value of which nothing is known: it differs in every element, and so does all that reads it."""


class OtherValues:
    """The lane: other legal values of the nodes of a graph, kept where they differ from the program's own.

    Args:
        again: Computes a node from other values.
        is_lost_as_a_whole: What stands for the other value of a node that cannot be computed from other values (an
            index out of range): `WHOLE` if true, else values that differ in every element, from which others are made.

    Attributes:
        perturbed: Node -> other value, in the shape and dtype of the node's own, or `WHOLE`.
    """

    def __init__(self, again: Again, *, is_lost_as_a_whole: bool = True) -> None:
        self._again, self._is_lost_as_a_whole = again, is_lost_as_a_whole
        self.perturbed: dict[Node, Any] = {}

    def below(self, node: Node, value: Any) -> Any:
        """Return what a node makes of the other values that it reads; its own `value` if it reads none."""
        own = [source for source in node.all_input_nodes if source in self.perturbed]
        if not own or traits_of(node).reads_sizes:
            return value
        if any(self.perturbed[source] is WHOLE for source in own):
            return WHOLE
        try:
            return self._again(node, self.perturbed)
        except (RuntimeError, IndexError, ValueError):  # a number that is not an index
            return WHOLE if self._is_lost_as_a_whole else far_from(value)

    def keep(self, node: Node, other: Any, value: Any) -> bool:
        """Keep another value of a node if it differs from `value`, the node's own; return whether it does."""
        is_other = other is WHOLE or (
            other is not value and any(pytree.tree_leaves(pytree.tree_map(_differs_at_all, value, other)))
        )
        if is_other:
            self.perturbed[node] = other
        return is_other

    def of(self, node: Node, value: Tensor, share: float = 0.0) -> Tensor | None:
        """Return a bool mask, in the shape of `value`, of the elements that differ; None if none does.

        Args:
            node: The node.
            value: Its own value.
            share: Differences up to this share of the size of an element do not count.
        """
        if node not in self.perturbed:
            return None
        found = differs(self.perturbed[node], value, share)
        return found if bool(found.any()) else None

    def settle(self, node: Node) -> None:
        """Forget the other value of `node`: it is no longer legal, or nothing reads it any more."""
        self.perturbed.pop(node, None)


class Source:
    """A reason for which elements have other legal values. Subclasses say which elements, and which values.

    Attributes:
        kind: Reason by which the elements are counted.
        reason: Text for the list of skipped tensors; "" if the elements are only counted.
        lane: `EXACT` or `NATIVE`: the values that are marked and followed.
        negligible: Differences up to so many times what rounding does to an element do not count.
        is_lost_as_a_whole: As for `OtherValues`.
        is_choice: Whether a candidate's own value settles the matter: what it made of that value is judged by replay,
            and after it other values are no longer legal.
    """

    kind: ExemptionReason
    reason = ""
    lane = NATIVE
    negligible = 0.0
    is_lost_as_a_whole = False
    is_choice = False

    def concerns(self, traits: OpTraits) -> bool:
        """Return whether an op of these traits may mark elements; others are not asked while nothing is marked."""
        return True

    def other(self, node: Node, below: Any, values: Values, other_values: Mapping[Node, Any]) -> Any:
        """Return another legal value of `node`.

        Args:
            node: A computed node.
            below: What it makes of the other values that it reads; its own value if it reads none.
            values: Of all nodes computed so far, this one among them.
            other_values: The other values of nodes before it.
        """
        value = values[node][self.lane]
        marks = self.marks(node, value, values) if isinstance(value, Tensor) else None
        return below if marks is None else torch.where(marks, far_from(value), below)

    def marks(self, node: Node, value: Tensor, values: Values) -> Tensor | None:
        """Return a bool mask, to broadcast against `value`, of what `node` itself leaves undefined; None if nothing."""
        raise NotImplementedError

    def drops(self, node: Node, value: Tensor, values: Values) -> Tensor | None:
        """Return a bool mask of other elements that do not count, on which nothing that counts depends."""
        return None

    def loses(self, node: Node, other_values: Mapping[Node, Any]) -> bool:
        """Return whether one other value of what `node` reads does not tell which of its elements depend on it."""
        return False

    def excludes(self, mask: Tensor) -> bool:
        """Return whether the elements of `mask`, all that were found in a tensor, are excluded."""
        return True


class Followed:
    """The elements of one step that depend on what a source marks, found in graph order.

    Args:
        source: What marks.
        again: Computes a node from other values; None for the op itself on the values of the source's lane.
    """

    def __init__(self, source: Source, again: Again | None = None) -> None:
        self.source = source
        self._lane = OtherValues(again or self._computed_again, is_lost_as_a_whole=source.is_lost_as_a_whole)
        self.perturbed = self._lane.perturbed
        self._dropped: dict[Node, Tensor] = {}
        self._values: Values = {}

    def visit(self, node: Node, values: Values) -> None:
        """Follow the marked elements through a computed node.

        Args:
            node: The node; its value is a tensor, or the tensors of an op with several results.
            values: Of all nodes computed so far that are still read, this one among them.
        """
        self._values = values
        traits, value = traits_of(node), values[node][self.source.lane]
        if self.perturbed or self.source.concerns(traits):
            # An op that draws or allocates makes other values each time, whatever it reads.
            below = value if traits.is_arbitrary else self._below(node, value)
            self._lane.keep(node, self.source.other(node, below, values, self.perturbed), value)
        dropped = self.source.drops(node, value, values) if isinstance(value, Tensor) else None
        if dropped is not None and bool(dropped.any()):
            self._dropped[node] = dropped

    def _below(self, node: Node, value: Any) -> Any:
        return WHOLE if self.source.loses(node, self.perturbed) else self._lane.below(node, value)

    def of(self, node: Node, values: Values, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return a bool mask, in the shape of the node's value, of what does not count; None if all of it counts.

        Args:
            node: The node that was visited last.
            values: As for `visit`.
            dtype: In which candidates round the value; None for its own.
        """
        if node not in self.perturbed and node not in self._dropped:
            return None
        value: Tensor = values[node][self.source.lane]
        share = self.source.negligible * unit_roundoff(dtype or value.dtype) if value.is_floating_point() else 0.0
        found = self._lane.of(node, value, share)
        if found is None:
            self._lane.settle(node)
        dropped = self._dropped.get(node)
        if dropped is not None:
            found = dropped if found is None else found | dropped
        return found if found is not None and self.source.excludes(found) else None

    def settle(self, node: Node) -> None:
        """Forget `node`: nothing reads it any more, or its other values are no longer legal."""
        self._lane.settle(node)
        self._dropped.pop(node, None)

    def _computed_again(self, node: Node, other_values: Mapping[Node, Any]) -> Any:
        return call_with(
            node,
            lambda source: other_values[source] if source in other_values else self._values[source][self.source.lane],
        )


def call_with(node: Node, value_of: Callable[[Node], Any], target: Any = None) -> Any:
    """Return the result of what `node` calls (or of `target`) on the values that `value_of` gives for what it reads."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value_of)
    call: Any = target or node.target
    return call(*args, **kwargs)


def far_from(value: Any) -> Any:
    """Return other values than these in every element of every tensor."""
    return pytree.tree_map(lambda leaf: _far_from(leaf) if isinstance(leaf, Tensor) else leaf, value)


def _far_from(value: Tensor) -> Tensor:
    if value.dtype is torch.bool:
        return ~value
    if value.is_floating_point() or value.is_complex():
        return torch.where(value.real > 0, -1.0, 1.0).to(value.dtype)
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
