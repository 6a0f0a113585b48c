"""Finds the role of a tensor, whatever op it is in: positions, rotations, masks, the state of the step before."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import torch
from torch.fx import Node

from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.site_pairs import ancestors, down, origin_of, passes_on, readers_of, up, walk
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind

_NEAR = 8
"""Steps within which a tensor is counted, or read."""
_LEAST = 3
"""Fewer different numbers are flags."""
_FEW = 64
_MOST_ABOVE = 32
"""Nodes above one that may be of weights alone."""
_PARTING = frozenset({"split", "split_with_sizes", "chunk", "tensor_split"})
_ARANGE = "arange"
_COUNTED = frozenset({_ARANGE, "cumsum"})
BENDING = frozenset({"activation", "softmax", "log_softmax"})
"""Kinds of ops that make other values of each, or of each row: to leave one out is to leave out an activation."""
PLACING = frozenset({"sin", "cos"})
"""What makes rotations and tables of positions."""
_FAR = 24
"""Steps from a sine up to what counts its positions: they are cast, multiplied and joined."""
OF_VALUES: tuple[Kind, ...] = ("position", "other", "scale")
_BY_OP: tuple[Kind, ...] = (*OF_VALUES, "permuted", "transposed", "bias missing", "activation")
"""Kinds by which a mistake goes for the op that it is in, in values and in whole numbers."""
_LOOKED_UP = frozenset({"embedding", "index", "index_select"})
_OF_ORDER: tuple[Kind, ...] = ("permuted", "transposed")
_ABOVE = 7
"""Steps from a factor up to the sine or cosine that it is."""
_BELOW = 9
"""Steps from a number down to the sine that is taken of it."""
_MOST = 48
"""Nodes above a number that are looked at: none of them may have values."""
_OF_HALVES = frozenset({"neg", "cat", "stack", "slice", "select", "getitem", "unbind", "split", "chunk"})
"""Ops that make the other half of what is turned."""


def is_counted(question: Question, node: Node) -> bool:
    """Whether a node makes whole numbers of positions that are counted: their sign and factor is a position."""
    value = question.trial.values.get(node)
    if not isinstance(value, torch.Tensor) or value.dtype is torch.bool or value.is_complex() or not value.numel():
        return False
    # Most tensors show with a few elements that they are not.
    for some in (value.flatten()[:_FEW].double(), value.double()):
        if not bool((some == some.round()).all()):
            return False
    return torch.unique(value).numel() >= _LEAST and any(
        op_name(one) in _COUNTED for one in up(question.in_baseline(node), _NEAR)
    )


def is_stored(question: Question, node: Node) -> bool:
    """Whether a tensor is a weight, or rows of one that are the same for all inputs: a table of positions."""
    ends = frozenset([node.name]) if node.name in question.weights else _made_of(question, node)
    return bool(ends) and ends <= question.weights


def is_of_before(question: Question, node: Node) -> bool:
    """Whether a tensor holds what the step before left, and nothing of this one; before the first step, zeros."""
    if "zeros" in op_name(question.in_baseline(node)):
        return True
    ends = _made_of(question, node) or frozenset({node.name})
    return bool(ends & question.kept) and ends <= question.weights | question.kept


def _made_of(question: Question, node: Node) -> frozenset[str]:
    """Return the inputs and weights that a node is made of by few ops; nothing where it is made by more of them."""
    known = ancestors(question.in_baseline(node))
    return frozenset(one.name for one in known if one.op == "placeholder" and len(known) < _MOST_ABOVE)


def is_taken_apart(question: Question, node: Node) -> bool:
    """Whether what is made of a weight is taken apart along its last axis, and not as heads: it is several weights."""
    own = question.in_baseline(node)

    def following(one: Node) -> list[Node]:
        if one is own:
            return list(one.users)
        views = [user for user in one.users if traits_of(user).kind == "reshape"]
        return [view for view in views if shape_of(view)[-1:] == shape_of(one)[-1:]]

    return any(op_name(user) in _PARTING for one in walk([own], following, _NEAR) for user in one.users)


def module_of(node: Node) -> str:
    """Return the path of the module that calls an op; "" where none is known."""
    return next((path for path, _ in reversed((node.meta.get("nn_module_stack") or {}).values())), "")


def shape_of(node: Node) -> tuple[int, ...]:
    """Return the shape of the tensor that a node makes; () where it makes none."""
    return getattr(node.meta.get("val"), "shape", ())


def least_position(value: torch.Tensor) -> int:
    """Return the least of some whole numbers that count places, none of them negative; 0 where they are none."""
    if value.dtype is torch.bool or not value.numel() or not bool(value.isfinite().all()):
        return 0
    least = float(value.min())
    return int(least) if least > 0 and bool((value == value.round()).all()) else 0


def makes_sines(question: Question, node: Node) -> bool:
    """Whether a node makes sines or cosines of positions: with the other sign, they turn the other way."""
    own = question.in_baseline(node)
    return is_placing(own) and any(op_name(one) in _COUNTED for one in up(own, _FAR))


def is_of_places(question: Question, node: Node, axes: tuple[int, ...]) -> bool:
    """Whether some axes of what a view reads or makes are rows and columns: of scores, or of what was convolved."""
    source = node.args[0] if node.args else None
    if len(axes) != 2 or not isinstance(source, Node):
        return False
    # What is multiplied by a matrix is no score any more.
    below = walk([question.in_baseline(node)], lambda one: () if traits_of(one).reads_memory else one.users, _NEAR)
    if any("softmax" in op_name(one) for one in below):
        return True
    own = question.in_baseline(source)
    rank = len(shape_of(own))
    return "conv" in op_name(own) and axes == (rank - 2, rank - 1)


def heads_or_parts(question: Question, node: Node) -> str:
    """Return what the axes of a tensor are made of: of heads, where an attention reads or makes it, else of parts."""
    own = question.in_baseline(node)
    near = (own, *up(own, _NEAR), *down([own], depth=_NEAR))
    is_of_attention = any(word in op_name(one) for one in near for word in ("softmax", "attention"))
    return "heads" if is_of_attention else "parts"


def only_hides(question: Question, edited: Collection[Node]) -> bool:
    """Whether what some nodes make reaches the end of the piece through conditions alone: it decides what is seen."""
    trial = question.trial

    def is_condition(node: Node) -> bool:
        value = trial.values[node]
        return isinstance(value, torch.Tensor) and value.dtype is torch.bool and value.dim() > 1

    def following(node: Node) -> list[Node]:
        return [] if is_condition(node) else [user for user in node.users if user in trial.values]

    reached = [*edited, *walk(edited, following)]
    conditions = [is_condition(node) for node in reached]
    return any(conditions) and not any(
        node is trial.end and not condition for node, condition in zip(reached, conditions, strict=True)
    )


def are_of_positions(question: Question, edited: Collection[Node], kind: Kind) -> bool:
    """Whether a mistake of another kind is one of positions: in what counts them, turns by them, or is such an angle.

    Args:
        question: With the piece that is changed.
        edited: Nodes of the piece.
        kind: By the op that was changed. Turned around or left out, numbers that are counted are other positions.
    """
    if not edited or kind not in _BY_OP:
        return False
    own = [question.in_baseline(node) for node in edited]
    if kind in _OF_ORDER and all(_is_table_by_positions(question, node) for node in own):
        return True
    if all(is_counted(question, node) or op_name(there) == _ARANGE for node, there in zip(edited, own, strict=True)):
        return True
    return all(is_placed(node, question.weights) or (kind in OF_VALUES and is_of_rotation(node)) for node in own)


def _is_table_by_positions(question: Question, node: Node) -> bool:
    """Whether a node is rows of a stored table that counted positions choose: in another order, they are others'."""
    rows = origin_of(node)
    if op_name(rows) not in _LOOKED_UP or len(rows.all_input_nodes) != 2:
        return False
    table, places = rows.all_input_nodes
    return table.name in question.weights and is_counted_alone(question, places)


def is_counted_alone(question: Question, node: Node) -> bool:
    """Whether a node is made of positions that are counted, and of stored numbers: distances, times a slope."""
    own = question.in_baseline(node)
    return counts_alone(own, question.weights) and any(op_name(one) == _ARANGE for one in (own, *up(own)))


def is_of_rotation(node: Node) -> bool:
    """Whether a node is a rotation, one of its two products, or a half that only they read.

    A rotation is a cosine times a tensor, and a sine times the other half of it.
    """
    if _is_rotation(node):
        return True
    readers = readers_of(node, lambda one: passes_on(one) and op_name(one) not in _OF_HALVES)
    if _is_turned(node):
        return any(map(_is_rotation, readers))
    is_signed = traits_of(node).kind == "factor" and len(node.all_input_nodes) == 1  # a half with its sign
    is_half = node.op == "call_function" and (op_name(node) in _OF_HALVES or is_signed)
    return is_half and bool(readers) and all(map(is_of_rotation, readers))


def is_placed(node: Node, stored: Collection[str]) -> bool:
    """Whether a node is made of positions and stored numbers alone, and sines are taken of it, or it is one."""
    return any(op_name(one) in PLACING for one in (node, *down([node], depth=_BELOW))) and counts_alone(node, stored)


def counts_alone(node: Node, stored: Collection[str]) -> bool:
    """Whether a node is made of whole numbers and stored ones alone, and not of rows that these choose."""
    for number, one in enumerate((node, *up(node))):
        dtype = getattr(one.meta.get("val"), "dtype", torch.float32)
        is_value = one.op == "placeholder" and one.name not in stored and dtype.is_floating_point
        if is_value or op_name(one) == "embedding" or number == _MOST:
            return False
    return True


def _is_rotation(node: Node) -> bool:
    if node.op != "call_function" or traits_of(node).kind != "term":
        return False
    products = _products(node)
    return len(products) == 2 and all(map(_is_turned, products))


def _products(node: Node) -> list[Node]:
    """Return what a sum adds, without numbers that it is multiplied by."""
    found = [origin_of(source) for source in node.all_input_nodes]
    for place, one in enumerate(found):
        while traits_of(one).kind == "factor" and len(one.all_input_nodes) == 1:
            one = origin_of(one.all_input_nodes[0])
        found[place] = one
    return found


def turned_by(node: Node) -> Node | None:
    """Return what a rotation turns: the tensor of which its other product multiplies the other half; None of others."""
    products = _products(node) if traits_of(node).kind == "term" else []
    if len(products) != 2 or any(traits_of(one).kind != "factor" for one in products):
        return None
    for one, other in (products, products[::-1]):
        for a, b in itertools.product(one.all_input_nodes, other.all_input_nodes):
            if {a, origin_of(a)} & ancestors(b, _BELOW + 1) and (_is_rotation(node) or _is_turned_over(b)):
                return a
    return None


def _is_turned_over(node: Node) -> bool:
    """Whether a node joins halves of a tensor, one of them with the other sign: stored tables need not be sines."""
    joined = origin_of(node)
    halves = [op_name(origin_of(one)) for one in joined.all_input_nodes]
    return op_name(joined) in ("cat", "stack") and len(halves) == 2 and halves.count("neg") == 1


def _is_turned(node: Node) -> bool:
    """Whether a node multiplies something by sines or cosines."""
    if node.op != "call_function" or traits_of(node).kind != "factor" or len(node.all_input_nodes) != 2:
        return False
    return sum(map(is_placing, node.all_input_nodes)) == 1


def is_placing(node: Node) -> bool:
    """Whether a sine or cosine is near above, with nothing between that makes values of tokens or of images."""

    def following(one: Node) -> list[Node]:
        is_value = one.op == "call_function" and (traits_of(one).reads_memory or traits_of(one).kind == "norm")
        return [] if is_value else one.all_input_nodes

    return any(op_name(one) in PLACING for one in (node, *walk([node], following, _ABOVE)))
