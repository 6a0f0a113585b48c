"""A piece of the baseline in float64, with some of its nodes changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.errors import BackendError
from glassengine.judge.pieces import Piece
from glassengine.judge.site_pairs import down
from glassengine.numerics.float64 import in_double, is_real, retarget, retargeted, target_of
from glassengine.ops.row import Rounding
from glassengine.ops.traits import traits_of

FAILS = (BackendError, RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, AssertionError)
"""What an op raises that is called with what it does not take."""

_MOST_WORK = 1_600_000_000
"""Nanoseconds of one thread that may be spent on one flagged tensor, as they are estimated here."""
OF_DIFFERENCES = 200_000_000
"""And beside them on what only differs."""
_OF_DEPTH = 0.6
"""Of what is left, the share that one of several questions about a tensor may spend."""
_OF_CALL, _OF_TRIAL = 16_000, 80_000
"""Nanoseconds of calling an op, and of comparing what a changed piece makes, beside those of its elements."""
_OF_ELEMENT, _OF_PRODUCT = 1.4, 0.07
"""Nanoseconds of writing one element, and of one multiplication in a product."""
_OF_EDIT = 4
"""An edited op reads and writes its tensors so many times."""


class OutOfWork(Exception):
    """What may be spent on one question is spent."""


class Budget:
    """Work that may still be done for one tensor that was flagged, however often and deeply it is asked about.

    Work is estimated from shapes and not measured, so that a hint does not depend on how busy a machine is.

    Args:
        work: In nanoseconds, as they are estimated here.

    Attributes:
        num_skipped: Families of mistakes that were not tried, or not all of them, since nothing was left.
    """

    def __init__(self, work: float = _MOST_WORK) -> None:
        self._left = work
        self._kept = 0.0
        self.num_skipped = 0

    def begin(self, *, is_last: bool) -> None:
        """Begin a question: it may spend a share of what is left, the last one all of it."""
        self._kept = 0.0 if is_last else (1 - _OF_DEPTH) * self._left

    def spend(self, work: float) -> None:
        """Take some of it.

        Raises:
            OutOfWork: Nothing is left.
        """
        self._left -= work
        if self._left < self._kept:
            raise OutOfWork

    def spend_passes(self, number: int, tensor: torch.Tensor) -> None:
        """Take what it costs to read or write all elements of a tensor so many times; raises as `spend` does."""
        self.spend(number * _OF_ELEMENT * tensor.numel())


def real_parts(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor with real and imaginary parts as one more axis, if it is complex."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def factor_between(one: torch.Tensor, other: torch.Tensor, otherwise: float = 0.0) -> float:
    """Return the number by which one tensor comes nearest to another; `otherwise` where it is zero, or infinite."""
    power = float(one.square().sum())
    return float((one * other).sum()) / power if power and math.isfinite(power) else otherwise


class TrialCall:
    """One node as it is computed in float64: the op, its arguments and what it makes."""

    def __init__(self, node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> None:
        self.node, self.target, self.args, self.kwargs, self.value = node, target, args, kwargs, value

    @property
    def leaves(self) -> list[Any]:
        """All arguments, those in lists one by one."""
        return pytree.tree_leaves((self.args, self.kwargs))


Edit = Callable[[TrialCall], Any] | torch.Tensor
"""What a node makes instead: a tensor, or a function of its call."""


def edited(call: TrialCall, edit: Edit) -> Any:
    """Return what a node makes by an edit; of several results a tensor is the first, and the others stay."""
    made = edit if isinstance(edit, torch.Tensor) else edit(call)
    if isinstance(made, (tuple, list)) == isinstance(call.value, (tuple, list)):
        return made
    return made[0] if isinstance(made, (tuple, list)) else (made, *call.value[1:])


class Trial:
    """Runs a piece in float64 once, and again with some nodes changed: only what is below them is recomputed.

    Attributes:
        ops: Nodes that compute, in order.
        inputs: Placeholders, in order.
        values: What every node makes.
        end: The node whose value the piece returns.
    """

    def __init__(self, piece: Piece, budget: Budget | None = None) -> None:
        graph = piece.module.graph
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.ops = [node for node in graph.nodes if node.op == "call_function"]
        (self.end,) = graph.output_node().all_input_nodes
        self.values: dict[Node, Any] = {}
        self._called: dict[Node, tuple[Any, Any, Any]] = {}
        for node, tensor in zip(self.inputs, piece.arguments(), strict=True):
            self.values[node] = retarget(tensor)
        for node in self.ops:
            self.values[node] = self._call(node, self.values).value
        self._order = {node: place for place, node in enumerate([*self.inputs, *self.ops])}
        self._below = {node: set(down([node], self._order)) for node in self._order}
        self._cost = {node: _cost(node, self.values) for node in self._order}
        self._made_by: dict[Node, Edit] = {}
        self.budget = Budget() if budget is None else budget

    @property
    def right(self) -> torch.Tensor:
        """What the piece makes, in real numbers."""
        return real_parts(self.values[self.end])

    def tensor(self, item: Any) -> torch.Tensor | None:
        """Return the tensor that an argument stands for; None where it is none of the piece."""
        value = self.values.get(item) if isinstance(item, Node) else None
        return value if isinstance(value, torch.Tensor) else None

    def real_ops(self) -> Iterator[tuple[Node, torch.Tensor]]:
        """Yield the ops that make floating numbers, with what they make, last ops first."""
        return ((node, self.values[node]) for node in reversed(self.ops) if is_real(self.values[node]))

    def spend_first(self) -> None:
        """Take what the piece itself costs: once in float64, and once as the baseline rounds; raises `OutOfWork`."""
        self.budget.spend(2 * sum(self._cost.values()))

    def call(self, node: Node) -> TrialCall:
        """Return a node with its arguments in float64."""
        return self._call(node, self.values, is_known=True)

    def changed(self, edits: Mapping[Node, Edit], end: Node | None = None) -> torch.Tensor | None:
        """Return what the piece makes with some nodes changed, or one of its nodes; None where an op does not take it.

        Raises:
            OutOfWork: Enough was computed.
        """
        values = self._changed(edits, end)
        made = None if values is None else values[end or self.end]
        return real_parts(made) if isinstance(made, torch.Tensor) else None

    def after(self, edits: Mapping[Node, Edit]) -> Trial | None:
        """Return this trial with some nodes changed for good, to change others; None where an op does not take that."""
        values = self._changed(edits)
        if values is None or not isinstance(values[self.end], torch.Tensor):
            return None
        found = copy.copy(self)
        found.values, found._made_by = values, {**self._made_by, **edits}
        return found

    def _changed(self, edits: Mapping[Node, Edit], end: Node | None = None) -> dict[Node, Any] | None:
        below = set().union(*(self._below[node] for node in edits))
        last = len(self._order) if end is None else self._order[end]
        order = sorted({*edits, *below}, key=self._order.__getitem__)
        order = [node for node in order if self._order[node] <= last]
        work = sum(self._cost[node] for node in order if node in below)
        self.budget.spend(work + _OF_TRIAL + sum(_OF_EDIT * self._cost[node] for node in edits))
        values = dict(self.values)
        try:
            for node in order:
                call = self._call(node, values, is_known=node in edits and node not in below)
                edit = edits.get(node, self._made_by.get(node))
                values[node] = call.value if edit is None else edited(call, edit)
        except FAILS:
            return None
        return values

    def _call(self, node: Node, values: Mapping[Node, Any], *, is_known: bool = False) -> TrialCall:
        if node.op == "placeholder":
            return TrialCall(node, None, (), {}, values[node])
        if node not in self._called:
            self._called[node] = in_double(node, target_of(node)), *retargeted((node.args, dict(node.kwargs)))
        target, args, kwargs = self._called[node]
        args, kwargs = torch.fx.node.map_arg((args, kwargs), lambda source: retargeted(values[source]))
        value = values[node] if is_known else target(*args, **kwargs)
        return TrialCall(node, target, args, dict(kwargs), value)


def _cost(node: Node, values: Mapping[Node, Any]) -> float:
    """Return the estimated nanoseconds of an op."""
    made = [leaf for leaf in pytree.tree_leaves(values[node]) if isinstance(leaf, torch.Tensor)]
    size = sum(leaf.numel() for leaf in made)
    if node.op != "placeholder" and traits_of(node).reads_memory:
        read = [values[source] for source in node.all_input_nodes]
        shapes = [t.shape for t in read if isinstance(t, torch.Tensor) and t.dim()]
        is_attention = traits_of(node).rounding is Rounding.ATTENTION
        # Each query is multiplied by every key, and what comes of it by every value.
        terms = sum(shape[-2] for shape in shapes[1:2]) * 2 if is_attention else max((s[-1] for s in shapes), default=1)
        return _OF_CALL + size * (_OF_ELEMENT + _OF_PRODUCT * terms)
    return _OF_CALL + _OF_ELEMENT * size
