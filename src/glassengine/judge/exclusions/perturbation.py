"""Elements in whose place every right implementation may have other values, and what depends on them.

A `Source` marks elements of a node's result and gives other legal values for them. `OtherValues`, the lane, holds these
beside the program's own values and computes what reads them once more, in graph order. Elements that come out different
depend on a marked element and are excluded; where an op drops the other values, nothing depends on them any more.
`Followed` is one source with its lane, in one step.

The sources are listed in `sources`. Padding is not among them: the inputs say which
positions hold a token (see `masked`).

Dead elements differ, and no result reads them, on any input. A port computes all rows where the baseline computes the
first one alone and takes it afterwards: the other rows are right as well. The baseline's own program is run with NaN in
their place; if no result holds a NaN, they are not read. The proof must hold for other inputs as well, so an op counts
as reading an element if it makes a number of a NaN without leaving it out (a comparison, a ranking), or if what is
given decides what it leaves out (an index, a mask, a length): another input would leave out something else, and a
mistake that these inputs hide is one. Scores that a mask hides from a softmax are the exception: an attention in one op
shows none of them either, and whether the candidate hides them is judged where they are hidden.

They are not a `Source`: nothing marks these elements before they are compared. It is asked after a step, for elements
that were found to differ, whether all that reads them drops any value at all. The rest of the tensor must be right by
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.blocks import agree
from glassengine.numerics.float64 import is_real, target_of
from glassengine.numerics.judgement import Judgement, unit_roundoff
from glassengine.numerics.mask_values import HIDDEN
from glassengine.ops.traits import traits_of
from glassengine.program.representation.outputs import last_uses
from glassengine.program.representation.program import Program
from glassengine.results import ExemptionReason

Values = Mapping[Node, Sequence[Any]]
"""Node -> its values in one step, of the nodes computed so far: see `EXACT` and `NATIVE`, then runs with noise."""
EXACT, NATIVE = 0, 1
"""Positions in `Values`: the float64 value, and the value in the program's own dtype."""

Again = Callable[[Node, Mapping[Node, Any]], Any]
"""Computes a node once more: takes it, and other values of nodes that it reads."""

WHOLE = object()
"""Stands for another value of which nothing is known: it differs in every element, and so does all that reads it."""
MOST_MARKED = 16
"""Tensors of a step that are followed at once; of others nothing has to be kept."""
_ROUNDINGS = 16


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

    def keep(self, node: Node, other: Any, value: Any) -> None:
        """Keep another value of a node if it differs from `value`, the node's own."""
        if other is WHOLE or any(pytree.tree_leaves(pytree.tree_map(_differs_at_all, value, other))):
            self.perturbed[node] = other

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


class Followed(OtherValues):
    """The elements of one step that depend on what a source marks, found in graph order.

    Args:
        source: What marks.
        again: Computes a node from other values; None for the op itself on the values of the source's lane.
    """

    def __init__(self, source: Source, again: Again | None = None) -> None:
        super().__init__(again or self._computed_again, is_lost_as_a_whole=source.is_lost_as_a_whole)
        self.source = source
        self._dropped: dict[Node, Tensor] = {}
        self._values: Values = {}

    def visit(self, node: Node, values: Values) -> None:
        """Follow the marked elements through a computed node.

        Args:
            node: The node; its value is a tensor, or the tensors of an op with several results.
            values: Of all nodes computed so far that are still read, this one among them.
        """
        self._values = values
        value = values[node][self.source.lane]
        # An op that draws or allocates makes other values each time, whatever it reads.
        below = value if not self.perturbed or traits_of(node).is_arbitrary else self.below(node, value)
        other = self.source.other(node, below, values, self.perturbed)
        if other is not value:
            self.keep(node, other, value)
        dropped = self.source.drops(node, value, values) if isinstance(value, Tensor) else None
        if dropped is not None and bool(dropped.any()):
            self._dropped[node] = dropped

    def below(self, node: Node, value: Any) -> Any:
        """Return what a node makes of the other values that it reads; see `Source.loses`."""
        return WHOLE if self.source.loses(node, self.perturbed) else super().below(node, value)

    def excluded(self, node: Node, values: Values, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return a bool mask, in the shape of the node's value, of what does not count; None if all of it counts.

        Args:
            node: The node that was visited last.
            values: As for `visit`.
            dtype: In which candidates round the value; None for its own.
        """
        found = dropped = self._dropped.get(node)
        if node in self.perturbed:
            value: Tensor = values[node][self.source.lane]
            share = self.source.negligible * unit_roundoff(dtype or value.dtype) if value.is_floating_point() else 0.0
            other = differs(self.perturbed[node], value, share)
            if not bool(other.any()):
                super().settle(node)
            elif dropped is None:
                found = other
            else:
                found = other | dropped
        return found if found is not None and self.source.excludes(found) else None

    def settle(self, node: Node) -> None:
        """Forget `node`: nothing reads it any more, or its other values are no longer legal."""
        super().settle(node)
        self._dropped.pop(node, None)

    def _computed_again(self, node: Node, other_values: Mapping[Node, Any]) -> Any:
        own, lane = self._values, self.source.lane
        return call_with(node, lambda read: other_values[read] if read in other_values else own[read][lane])


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
    if other is value or not isinstance(value, Tensor):
        return other is not value and not isinstance(other, Tensor) and bool(other != value)
    return bool(differs(other, value).any())


@dataclass(frozen=True)
class Differing:
    """The elements of a tensor that differ, and a judgement of the others.

    Attributes:
        where: Bool mask of the elements.
        rest: Judges the tensor with these elements put right.
        shows: Whether one of them shows what a mask hides in the right tensor.
    """

    where: torch.Tensor
    rest: Callable[[], Judgement]
    shows: bool = False


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
    shows = bool((found & (ours <= HIDDEN) & ~(theirs <= HIDDEN)).any())
    return Differing(found, lambda: judge_again(torch.where(found, predicted.to(candidate.dtype), candidate)), shows)


def unread_nodes(program: Program) -> set[str]:
    """Return the ops from which no path leads to a result or a cache."""
    read = {program.graph.output_node().name}
    for node in reversed(program.graph.nodes):
        if any(user.name in read for user in node.users):
            read.add(node.name)
    return {node.name for node in program.graph.nodes if node.op == "call_function" and node.name not in read}


@torch.no_grad()
def unread(
    program: Program,
    inputs: Mapping[str, torch.Tensor],
    marked: Mapping[str, torch.Tensor],
    scores: Collection[Node] = (),
    shown: Collection[str] = (),
) -> set[str]:
    """Return the nodes of which no result, and no cache, reads the marked elements.

    Args:
        program: Of the baseline, with weights.
        inputs: Of one step, by name.
        marked: Node -> bool mask in the shape of its value.
        scores: Nodes that nothing but a softmax reads: what a mask hides in them is not read.
        shown: Nodes whose marked elements a mask hides on one side alone.
    """
    given = {port.node: inputs.get(port.name) for port in program.inputs} | program.weights()
    if any(node.users and given.get(node.name) is None for node in program.graph.find_nodes(op="placeholder")):
        return set()  # the caches of a later step are not available: nothing is left out
    values: dict[Node, Any] = {}
    some = list(marked.items())[:MOST_MARKED]
    waiting = {name: _Lane(mask, values, () if name in shown else scores) for name, mask in some}
    follow: dict[str, str] = {}  # node whose marked elements cover those of a later one -> the later node
    last_use, varying = last_uses(program), of_inputs(program)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = given.get(node.name)
        elif node.op == "get_attr":
            values[node] = getattr(program.exported.graph_module, str(node.target))
        elif "_assert" not in str(node.target):
            if node.op != "output":
                values[node] = call_with(node, values.__getitem__, target_of(node))
            waiting = {name: lane for name, lane in waiting.items() if not lane.is_read_by(node, varying)}
            own = waiting.get(node.name)
            if own is not None and not own.mark(node):
                del waiting[node.name]
            elif own is not None:
                follow |= {name: node.name for name, lane in waiting.items() if lane.covers(own, node)}
                waiting = {name: lane for name, lane in waiting.items() if name not in follow}
        for dead in last_use.get(node, ()):
            values.pop(dead, None)
            for lane in waiting.values():
                lane.settle(dead)
        if not waiting:
            break
    # If the elements of the later node are read, those that cover them are read as well.
    unknown = set(waiting)
    for name in reversed(follow):
        unknown |= {name} if follow[name] in unknown else set()
    undecided = {name: marked[name] for name in follow if name in unknown}
    return set(waiting) | (unread(program, inputs, undecided, scores, shown) if undecided else set())


class _Lane(OtherValues):
    """A program with NaN in some elements of one node.

    Args:
        mask: Bool mask of these elements.
        values: Of the nodes computed so far.
        scores: As for `unread`.
    """

    def __init__(self, mask: torch.Tensor, values: Mapping[Node, Any], scores: Collection[Node]) -> None:
        super().__init__(self._called)
        self._mask, self._values, self._scores = mask, values, scores

    def mark(self, node: Node) -> bool:
        """Put NaN into the value of a node; return whether that is possible."""
        value = self._values[node]
        is_possible = is_real(value) and self._mask.shape == value.shape
        if is_possible:
            self.perturbed[node] = torch.where(self._mask, torch.nan, value)
        return is_possible

    def covers(self, other: _Lane, node: Node) -> bool:
        """Whether all elements that another lane marks at `node` are NaN in this one, and count alike."""
        value = self.perturbed.get(node)
        if other is self or self._scores is not other._scores or value is None:
            return False
        return isinstance(value, Tensor) and bool(value[other._mask].isnan().all())

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
        if node.op == "output" or traits.is_arbitrary or ranks or not all(is_real(leaf) for leaf in leaves):
            return True
        decide = [s for s in node.all_input_nodes if s in varying and not is_real(self._values[s])]
        # The bounds of a part may be sizes of what is given.
        hides = node in self._scores
        if traits.selects and not hides and any(isinstance(self._values[s], (torch.Tensor, int)) for s in decide):
            return True
        other = self.below(node, self._values[node])
        if other is WHOLE:
            return True
        found, spec = pytree.tree_flatten(other)
        if hides and [one.shape for one in found] == [one.shape for one in leaves]:
            found = [torch.where(ours <= HIDDEN, ours, theirs) for ours, theirs in zip(leaves, found, strict=True)]
            other = pytree.tree_unflatten(found, spec)
        for ours, theirs in zip(leaves, found, strict=True):
            if theirs.shape != ours.shape or bool(((theirs != ours) & ~theirs.isnan()).any()):
                return True
        self.keep(node, other, self._values[node])
        return False

    def _called(self, node: Node, other_values: Mapping[Node, Any]) -> Any:
        return call_with(node, lambda source: other_values.get(source, self._values[source]), target_of(node))


def of_inputs(program: Program) -> set[Node]:
    """Return the nodes that depend on what the program is given, if only on its sizes."""
    weights = program.weights()
    found: set[Node] = set()
    for node in program.graph.nodes:
        is_given = node.op == "placeholder" and node.name not in weights
        if is_given or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found
