"""What a tensor is for, whatever op it is in: it counts positions, turns by them, hides, or is of the step before."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch.fx import Node

from glassengine.judge.graphs.between import ancestors, origin_of, passes_on
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind

_NEAR_ABOVE = 6
PLACING = frozenset({"sin", "cos"})
"""What makes rotations and tables of positions."""

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


_OF_VALUES: tuple[Kind, ...] = ("position", "other", "scale")
_BY_OP: tuple[Kind, ...] = (*_OF_VALUES, "permuted", "transposed", "bias missing", "activation")
"""Kinds by which a mistake goes for the op that it is in, in values and in whole numbers."""
_LOOKED_UP = frozenset({"embedding", "index", "index_select"})
_OF_ORDER: tuple[Kind, ...] = ("permuted", "transposed")
_ABOVE = 8
"""Steps from a factor up to the sine or cosine that it is."""
_BELOW = 10
"""Steps from a number down to the sine that is taken of it."""
_MOST = 48
"""Nodes above a number that are looked at: none of them may have values."""
_OF_HALVES = frozenset({"neg", "cat", "stack", "slice", "select", "getitem", "unbind", "split", "chunk"})
"""Ops that make the other half of what is turned."""


def are_of_positions(question: Question, edited: Collection[Node], kind: Kind) -> bool:
    """Whether a mistake of another kind is one of positions: in what counts them, turns by them, or is such an angle.

    Args:
        question: With the piece that is changed.
        edited: Nodes of the piece.
        kind: By the op that was changed. Turned around or left out, numbers that are counted are other positions.
    """
    if not edited or kind not in _BY_OP:
        return False
    own = [question.named.get(node.name, node) for node in edited]
    if kind in _OF_ORDER and all(_is_table_by_positions(question, node) for node in own):
        return True
    if all(is_counted(question, node) or _counts(there) for node, there in zip(edited, own, strict=True)):
        return True
    return all(is_placed(node, question.stored) or (kind in _OF_VALUES and is_of_rotation(node)) for node in own)


def _is_table_by_positions(question: Question, node: Node) -> bool:
    """Whether a node is rows of a stored table that counted positions choose: in another order, they are others'."""
    rows = origin_of(node)
    if rows.op != "call_function" or op_name(rows) not in _LOOKED_UP or len(rows.all_input_nodes) != 2:
        return False
    table, places = rows.all_input_nodes
    return table.name in question.stored and is_counted_alone(question, places)


def is_counted_alone(question: Question, node: Node) -> bool:
    """Whether a node is made of positions that are counted, and of stored numbers: distances, times a slope."""
    own = question.named.get(node.name, node)
    return counts_alone(own, question.stored) and any(map(_counts, {own, *ancestors(own)}))


def _counts(node: Node) -> bool:
    return node.op == "call_function" and op_name(node) == "arange"


def is_of_rotation(node: Node) -> bool:
    """Whether a node is a rotation, one of its two products, or a half that only they read.

    A rotation is a cosine times a tensor, and a sine times the other half of it.
    """
    if _is_rotation(node):
        return True
    if _is_turned(node):
        return any(_is_rotation(reader) for reader in _readers(node))
    readers = _readers(node)
    is_half = node.op == "call_function" and (op_name(node) in _OF_HALVES or _is_signed(node))
    return is_half and bool(readers) and all(is_of_rotation(reader) for reader in readers if reader is not node)


def _is_signed(node: Node) -> bool:
    """Whether a node is a tensor times a number: a half with its sign."""
    return traits_of(node).kind == "factor" and len(node.all_input_nodes) == 1


def is_placed(node: Node, stored: Collection[str]) -> bool:
    """Whether a node is made of positions and stored numbers alone, and sines are taken of it, or it is one."""
    layer, known = [node], set[Node]()
    for _ in range(_BELOW):
        if any(op_name(one) in PLACING for one in layer if one.op == "call_function"):
            break
        layer = list(dict.fromkeys(user for one in layer for user in one.users if user not in known))
        known.update(layer)
    else:
        return False
    return counts_alone(node, stored)


def counts_alone(node: Node, stored: Collection[str]) -> bool:
    """Whether a node is made of whole numbers and stored ones alone, and not of rows that these choose."""
    waiting, above = [node], {node}
    while waiting:
        one = waiting.pop()
        is_row = one.op == "call_function" and op_name(one) == "embedding"
        dtype = getattr(one.meta.get("val"), "dtype", torch.float32)
        if is_row or (one.op == "placeholder" and one.name not in stored and dtype.is_floating_point):
            return False
        new = [source for source in one.all_input_nodes if source not in above]
        above.update(new)
        waiting += new
        if len(above) > _MOST:
            return False
    return True


def _readers(node: Node) -> list[Node]:
    """Return what reads the values of a node, casts and views left out."""
    found: dict[Node, None] = {}
    waiting = list(node.users)
    while waiting:
        one = waiting.pop()
        if one.op == "call_function" and passes_on(one) and op_name(one) not in _OF_HALVES:
            waiting += one.users
        elif one.op == "call_function":
            found[one] = None
    return list(found)


def _is_rotation(node: Node) -> bool:
    if node.op != "call_function" or traits_of(node).kind != "term":
        return False
    sources = [origin_of(source) for source in node.all_input_nodes]
    return len(sources) == 2 and all(map(_is_turned, sources))


def turned_by(node: Node) -> Node | None:
    """Return what a rotation turns: the tensor of which its other product multiplies the other half; None of others."""
    if not _is_rotation(node):
        return None
    products = [origin_of(source) for source in node.all_input_nodes]
    read = [next(one for one in product.all_input_nodes if not _is_placing(one)) for product in products]
    return next((a for a, b in (read, read[::-1]) if origin_of(a) in ancestors(b, _BELOW)), None)


def _is_turned(node: Node) -> bool:
    """Whether a node multiplies something by sines or cosines."""
    if node.op != "call_function" or traits_of(node).kind != "factor" or len(node.all_input_nodes) != 2:
        return False
    return sum(map(_is_placing, node.all_input_nodes)) == 1


def _is_placing(node: Node) -> bool:
    layer, known = [node], set[Node]()
    for _ in range(_ABOVE):
        if any(op_name(one) in PLACING for one in layer if one.op == "call_function"):
            return True
        known.update(layer)
        layer = [source for one in layer if not _makes(one) for source in one.all_input_nodes if source not in known]
    return False


def _makes(node: Node) -> bool:
    """Whether a node makes values of tokens, of images: a product, rows of a table, a norm."""
    return node.op == "call_function" and (traits_of(node).reads_memory or traits_of(node).kind == "norm")


def only_hides(question: Question, edited: Collection[Node]) -> bool:
    """Whether what some nodes make reaches the end of the piece through conditions alone: it decides what is seen."""
    waiting, known, has_condition = list(edited), set(edited), False
    while waiting:
        node = waiting.pop()
        value = question.trial.values.get(node)
        if isinstance(value, torch.Tensor) and value.dtype is torch.bool and value.dim() > 1:
            has_condition = True
        elif node is question.trial.end:
            return False
        else:
            following = [user for user in node.users if user in question.trial.values and user not in known]
            known.update(following)
            waiting += following
    return has_condition


def comes_from(question: Question, node: Node, names: frozenset[str]) -> bool:
    """Whether a node is one of some ops, or made by one a few ops above."""
    layer, known = {question.named.get(node.name, node)}, set[Node]()
    for _ in range(_NEAR_ABOVE):
        if any(op_name(other) in names for other in layer if other.op == "call_function"):
            return True
        known |= layer
        layer = {source for other in layer for source in other.all_input_nodes} - known
    return False
