"""Elements that differ and that no result reads, on any input: later ops leave them out, with any values.

A port computes all rows where the baseline computes the first one alone and takes it afterwards: the other rows are no
mistake. The baseline's own program is run with NaN in their place (see `perturbation`); if no result holds a NaN, they
are not read. The proof must hold for other inputs as well, so an op counts as reading an element if it makes a number
of a NaN without leaving it out (a comparison, a ranking), or if what is given decides what it leaves out (an index, a
mask, a length): another input would leave out something else, and a mistake that these inputs hide is one.

This is not a `Source`: nothing marks these elements before they are compared. It is asked after a step, for elements
that were found to differ, whether all that reads them drops any value at all. The rest of the tensor must be right by
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.exclusions.perturbation import WHOLE, OtherValues, call_with
from glassengine.numerics.float64 import target_of
from glassengine.numerics.judgement import Judgement, unit_roundoff
from glassengine.ops.traits import traits_of
from glassengine.program.representation.outputs import last_uses
from glassengine.program.representation.program import Program

MOST_MARKED = 16
"""Tensors of a step that are followed at once; of others nothing has to be kept."""
_ROUNDINGS = 16


@dataclass(frozen=True)
class Differing:
    """The elements of a tensor that differ, and a judgement of the others.

    Attributes:
        where: Bool mask of the elements.
        rest: Judges the tensor with these elements put right.
    """

    where: torch.Tensor
    rest: Callable[[], Judgement]


def differing(
    candidate: torch.Tensor,
    predicted: torch.Tensor,
    judge_again: Callable[[torch.Tensor], Judgement],
    exempt: Iterable[torch.Tensor] = (),
) -> Differing | None:
    """Return the elements that differ by more than rounding; None if there are none.

    Beside large elements a small one may differ by less than that and still be wrong, so the rest has to be judged.

    Args:
        candidate: A tensor of a candidate.
        predicted: What it should be.
        judge_again: Judges another tensor in its place.
        exempt: Bool masks of the elements that do not count.
    """
    if candidate.shape != predicted.shape or not candidate.is_floating_point() or not predicted.is_floating_point():
        return None
    ours, theirs = predicted.double(), candidate.double()
    counts = torch.ones_like(ours, dtype=torch.bool)
    for mask in exempt:
        counts = counts & ~mask
    same = (theirs == ours) | (theirs.isnan() & ours.isnan())
    both = ours.isfinite() & theirs.isfinite()
    numbers = torch.where(both & counts, ours, 0.0)
    size = torch.maximum(numbers.abs(), (numbers.square().sum() / counts.sum()).sqrt())
    near = both & ((theirs - ours).abs() <= _ROUNDINGS * unit_roundoff(candidate.dtype) * size)
    found = counts & ~(same | near)
    if not bool(found.any()):
        return None
    return Differing(found, lambda: judge_again(torch.where(found, predicted.to(candidate.dtype), candidate)))


def unread_nodes(program: Program) -> set[str]:
    """Return the ops from which no path leads to a result or a cache."""
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
        marked: Node -> bool mask in the shape of its value.
    """
    given = {port.node: inputs.get(port.name) for port in program.inputs} | program.weights()
    if any(node.users and given.get(node.name) is None for node in program.graph.find_nodes(op="placeholder")):
        return set()  # the caches of a later step are not available: nothing is left out
    values: dict[Node, Any] = {}
    waiting = {name: _Lane(mask, values) for name, mask in list(marked.items())[:MOST_MARKED]}
    last_use, varying = last_uses(program), _of_inputs(program)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = given.get(node.name)
        elif node.op == "get_attr":
            values[node] = getattr(program.exported.graph_module, str(node.target))
        elif "_assert" not in str(node.target):
            if node.op != "output":
                values[node] = call_with(node, values.__getitem__, target_of(node))
            waiting = {name: lane for name, lane in waiting.items() if not lane.is_read_by(node, varying)}
            if node.name in waiting and not waiting[node.name].mark(node):
                del waiting[node.name]
        for dead in last_use.get(node, ()):
            values.pop(dead, None)
            for lane in waiting.values():
                lane.settle(dead)
        if not waiting:
            break
    return set(waiting)


class _Lane(OtherValues):
    """A program with NaN in some elements of one node.

    Args:
        mask: Bool mask of these elements.
        values: Of the nodes computed so far.
    """

    def __init__(self, mask: torch.Tensor, values: Mapping[Node, Any]) -> None:
        super().__init__(self._called)
        self._mask, self._values = mask, values

    def mark(self, node: Node) -> bool:
        """Put NaN into the value of a node; return whether that is possible."""
        value = self._values[node]
        is_possible = _is_float(value) and self._mask.shape == value.shape
        if is_possible:
            self.perturbed[node] = torch.where(self._mask, torch.nan, value)
        return is_possible

    def is_read_by(self, node: Node, varying: set[Node]) -> bool:
        """Follow the NaN through a node; return whether the node counts as reading them.

        Args:
            node: The node, computed; or the output of the graph.
            varying: Nodes that depend on what the program is given.
        """
        traits = traits_of(node)
        if not any(source in self.perturbed for source in node.all_input_nodes) or traits.reads_sizes:
            return False
        leaves = pytree.tree_leaves(self._values.get(node))
        ranks = traits.choice is not None and traits.choice.places
        if node.op == "output" or traits.is_arbitrary or ranks or not all(_is_float(leaf) for leaf in leaves):
            return True
        decide = [s for s in node.all_input_nodes if s in varying and not _is_float(self._values[s])]
        # The bounds of a part may be sizes of what is given.
        if traits.selects and any(isinstance(self._values[s], (torch.Tensor, int)) for s in decide):
            return True
        other = self.below(node, self._values[node])
        if other is WHOLE:
            return True
        for ours, theirs in zip(leaves, pytree.tree_leaves(other), strict=True):
            if theirs.shape != ours.shape or bool(((theirs != ours) & ~theirs.isnan()).any()):
                return True
        self.keep(node, other, self._values[node])
        return False

    def _called(self, node: Node, other_values: Mapping[Node, Any]) -> Any:
        return call_with(node, lambda source: other_values.get(source, self._values[source]), target_of(node))


def _of_inputs(program: Program) -> set[Node]:
    """Return the nodes that depend on what the program is given, if only on its sizes."""
    weights = program.weights()
    found: set[Node] = set()
    for node in program.graph.nodes:
        is_given = node.op == "placeholder" and node.name not in weights
        if is_given or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
