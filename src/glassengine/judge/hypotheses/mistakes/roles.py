"""What the tensors are for that a mistake changes, whatever op it is in: they count positions, or turn by them."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Node

from glassengine.judge.graphs.between import ancestors, origin_of, passes_on
from glassengine.judge.hypotheses.mistakes.meanings import is_counted
from glassengine.judge.hypotheses.mistakes.seen import PLACING
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind

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
