"""Elements that differ and that no result reads, on any input: later ops leave them out, with any values.

A port computes all rows where the baseline computes the first one alone and takes it afterwards: the others are no
mistake. The baseline's own program, run with NaN in their place, shows that they are not read: no result holds any.
What swallows a NaN without leaving it out counts as reading it, a comparison or a ranking. So does all that leaves out
by what is given (an index, a mask, a length): another input would leave out something else, and a mistake that these
inputs hide is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.replay.reference import last_uses
from glassengine.numerics.float64 import target_of
from glassengine.numerics.judgement import unit_roundoff
from glassengine.ops.traits import traits_of
from glassengine.program.representation.program import Program

_MOST = 16
"""Tensors that are followed at once."""
_ROUNDINGS = 16


def differing(candidate: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor | None:
    """Return a bool mask of the elements that differ by more than rounding; None where there are none."""
    if candidate.shape != predicted.shape or not candidate.is_floating_point() or not predicted.is_floating_point():
        return None
    ours, theirs = predicted.double(), candidate.double()
    same = (theirs == ours) | (theirs.isnan() & ours.isnan())
    both = ours.isfinite() & theirs.isfinite()
    numbers = torch.where(both, ours, 0.0)
    size = torch.maximum(numbers.abs(), numbers.square().mean().sqrt())
    near = both & ((theirs - ours).abs() <= _ROUNDINGS * unit_roundoff(candidate.dtype) * size)
    found: torch.Tensor = ~(same | near)
    return found if bool(found.any()) else None


def unread_nodes(program: Program) -> set[str]:
    """Return the ops from which no way leads to a result or a cache."""
    read = {program.graph.output_node().name}
    for node in reversed(program.graph.nodes):
        if any(user.name in read for user in node.users):
            read.add(node.name)
    return {node.name for node in program.graph.nodes if node.op == "call_function" and node.name not in read}


@torch.no_grad()
def unread(program: Program, inputs: Mapping[str, torch.Tensor], marked: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the nodes of which no result, and no cache, reads the marked elements.

    Args:
        program: Of the baseline, with weights.
        inputs: Of one step, by name.
        marked: Node -> bool mask.
    """
    followed = _Followed(program, dict(list(marked.items())[:_MOST]))
    by_node = {port.node: inputs.get(port.name) for port in program.inputs} | program.weights()
    if any(node.users and by_node.get(node.name) is None for node in program.graph.find_nodes(op="placeholder")):
        return set()  # the caches of a later step are not available: nothing is left out
    last_use = last_uses(program)
    for node in program.graph.nodes:
        if node.op == "output":
            followed.end(node)
        elif node.op == "placeholder":
            followed.take(node, by_node.get(node.name))
        elif node.op == "get_attr":
            followed.take(node, getattr(program.exported.graph_module, str(node.target)))
        elif "_assert" not in str(node.target):
            followed.compute(node)
        for dead in last_use.get(node, ()):
            followed.forget(dead)
        if not followed.waiting:
            return set()
    return set(followed.waiting)


class _Followed:
    """Runs a program with NaN in some elements of some nodes, each in a lane of its own.

    Attributes:
        waiting: Nodes without a known reader so far -> what depends on them, with NaN.
    """

    def __init__(self, program: Program, marked: Mapping[str, torch.Tensor]) -> None:
        self._marked = marked
        self._values: dict[Node, Any] = {}
        self._varying = _of_inputs(program)
        self.waiting: dict[str, dict[Node, Any]] = {name: {} for name in marked}

    def take(self, node: Node, value: Any) -> None:
        """Take over an input or a constant."""
        self._values[node] = value

    def compute(self, node: Node) -> None:
        """Compute a node, and once more in every lane that it reads."""
        value = self._values[node] = self._call(node, {})
        for name, lane in list(self.waiting.items()):
            if any(source in lane for source in node.all_input_nodes) and self._reads(node, lane, value):
                del self.waiting[name]
        if node.name in self.waiting:
            mask = self._marked[node.name]
            if not _is_float(value) or mask.shape != value.shape:
                del self.waiting[node.name]
            else:
                self.waiting[node.name][node] = torch.where(mask, torch.nan, value)

    def end(self, node: Node) -> None:
        """Give up the nodes that a result depends on."""
        for name, lane in list(self.waiting.items()):
            if any(source in lane for source in node.all_input_nodes):
                del self.waiting[name]

    def forget(self, node: Node) -> None:
        """Free what is no longer needed."""
        self._values.pop(node, None)
        for lane in self.waiting.values():
            lane.pop(node, None)

    def _call(self, node: Node, others: Mapping[Node, Any]) -> Any:
        args, kwargs = torch.fx.node.map_arg(
            (node.args, node.kwargs), lambda source: others[source] if source in others else self._values[source]
        )
        return target_of(node)(*args, **kwargs)

    def _reads(self, node: Node, lane: dict[Node, Any], value: Any) -> bool:
        """Follow a lane through a node; return whether the node counts as reading it."""
        traits = traits_of(node)
        if traits.reads_sizes:
            return False
        leaves = pytree.tree_leaves(value)
        ranks = traits.choice is not None and traits.choice.places
        if traits.is_arbitrary or ranks or not all(_is_float(leaf) for leaf in leaves):
            return True
        decide = [s for s in node.all_input_nodes if s in self._varying and not _is_float(self._values[s])]
        # The bounds of a part may be sizes of what is given.
        if traits.selects and any(isinstance(self._values[s], (torch.Tensor, int)) for s in decide):
            return True
        try:
            other = self._call(node, lane)
        except (RuntimeError, IndexError, ValueError):
            return True
        is_left = False
        for ours, theirs in zip(leaves, pytree.tree_leaves(other), strict=True):
            if theirs.shape != ours.shape:
                return True
            if bool(((theirs != ours) & ~theirs.isnan()).any()):
                return True
            is_left = is_left or bool((theirs.isnan() & ~ours.isnan()).any())
        if is_left:
            lane[node] = other
        return False


def _of_inputs(program: Program) -> set[Node]:
    """Return the nodes that depend on what the program is given, be it only on its sizes."""
    weights = program.weights()
    found: set[Node] = set()
    for node in program.graph.nodes:
        is_given = node.op == "placeholder" and node.name not in weights
        if is_given or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
