"""What the numbers of a tensor mean: positions that are counted, rows and columns of an image or of scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from glassengine.judge.hypotheses.trials.question import Question
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name

_NEAR = 8
"""Steps within which a tensor is counted, or read."""
_LEAST = 3
"""Fewer different numbers are flags."""
_FEW = 64
_MOST_ABOVE = 32
"""Ops from which it is asked whether they are made of weights alone."""
_PARTING = frozenset({"split", "split_with_sizes", "chunk", "tensor_split"})
_COUNTED = frozenset({"arange", "cumsum"})
BENDING = frozenset({"activation", "softmax", "log_softmax"})
"""Kinds of ops that make other values of each, or of each row: to leave one out is to leave out an activation."""
_TURNING = frozenset({"sin", "cos"})
_FAR = 24
"""Steps from a sine up to what counts its positions: they are cast, multiplied and joined."""


def is_counted(question: Question, node: Node) -> bool:
    """Whether a node makes whole numbers of positions that are counted: their sign and factor is a position."""
    value = question.trial.values.get(node)
    if not isinstance(value, torch.Tensor) or value.dtype is torch.bool or not value.numel():
        return False
    # Most tensors show with a few elements that they are not.
    for some in (value.flatten()[:_FEW].double(), value.double()):
        if not bool((some == some.round()).all()):
            return False
    if torch.unique(value).numel() < _LEAST:
        return False
    return _near(question, node, lambda one: list(one.all_input_nodes), lambda one: op_name(one) in _COUNTED)


def is_stored(question: Question, node: Node) -> bool:
    """Whether a tensor is a weight, or rows of one that are the same for all inputs: a table of positions."""
    if node.name in question.weights:
        return True
    ends = _made_of(question, node)
    return bool(ends) and ends <= question.stored


def is_of_before(question: Question, node: Node) -> bool:
    """Whether a tensor holds what the step before left, and nothing of this one; before the first step, zeros."""
    own = question.named.get(node.name, node)
    if own.op == "call_function" and "zeros" in op_name(own):
        return True
    ends = _made_of(question, node) or frozenset({node.name})
    return bool(ends & question.kept) and ends <= question.stored | question.kept


def _made_of(question: Question, node: Node) -> frozenset[str]:
    """Return the inputs and weights that a node is made of by few ops; nothing where it is made by more of them."""
    waiting, known = [question.named.get(node.name, node)], set[Node]()
    while waiting and len(known) < _MOST_ABOVE:
        sources = [other for other in waiting.pop().all_input_nodes if other not in known]
        known.update(sources)
        waiting += sources
    return frozenset() if waiting else frozenset(other.name for other in known if other.op == "placeholder")


def is_taken_apart(question: Question, node: Node) -> bool:
    """Whether what is made of a weight is taken apart along its last axis, and not as heads: it is several weights."""
    layer = question.users(node)
    for _ in range(_NEAR):
        sizes = {op: getattr(op.meta.get("val"), "shape", (0,))[-1:] for op in layer}
        for op in layer:
            if any(op_name(user) in _PARTING for user in op.users):
                return True
        layer = [
            user
            for op in layer
            for user in op.users
            if traits_of(user).kind == "reshape" and getattr(user.meta.get("val"), "shape", ())[-1:] == sizes[op]
        ]
    return False


def least_position(value: torch.Tensor) -> int:
    """Return the least of some whole numbers that count places, none of them negative; 0 where they are none."""
    if value.dtype is torch.bool or not value.numel() or not bool(value.isfinite().all()):
        return 0
    least = float(value.min())
    return int(least) if least > 0 and bool((value == value.round()).all()) else 0


def makes_sines(question: Question, node: Node) -> bool:
    """Whether a node makes sines or cosines of positions: with the other sign, they turn the other way."""

    def above(one: Node) -> list[Node]:
        return [] if op_name(one) in _TURNING else list(one.all_input_nodes)

    if not _near(question, node, above, lambda one: op_name(one) in _TURNING):
        return False
    return _near(question, node, lambda one: list(one.all_input_nodes), lambda one: op_name(one) in _COUNTED, _FAR)


def is_of_places(question: Question, node: Node, axes: tuple[int, ...]) -> bool:
    """Whether some axes of what a view reads or makes are rows and columns: of scores, or of what was convolved."""
    source = node.args[0] if node.args else None
    if len(axes) != 2 or not isinstance(source, Node):
        return False
    if _near(question, node, _softened, lambda one: "softmax" in op_name(one)):
        return True
    own = question.named.get(source.name, source)
    rank = getattr(own.meta.get("val"), "ndim", 0)
    return "conv" in op_name(own) and axes == (rank - 2, rank - 1)


def _softened(node: Node) -> list[Node]:
    """Return what reads a node, up to a product: what is multiplied by a matrix is no score any more."""
    return [] if traits_of(node).reads_memory else list(node.users)


def _near(
    question: Question,
    node: Node,
    following: Callable[[Node], list[Node]],
    is_one: Callable[[Node], bool],
    steps: int = _NEAR,
) -> bool:
    layer, known = [question.named.get(node.name, node)], set()
    for _ in range(steps):
        layer = list(dict.fromkeys(other for one in layer for other in following(one) if other not in known))
        known.update(layer)
        if any(is_one(one) for one in layer):
            return True
    return False
