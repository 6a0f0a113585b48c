"""Words for an argument of an op and for a mistake in it: an operand of a sum below a root is an epsilon."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.judge.hypotheses.mistakes.tensor_roles import BENDING, is_counted
from glassengine.judge.hypotheses.trials.hypothesis import Literal, called, done_by, shown
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.ops.row import Rounding
from glassengine.ops.traits import named, traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind

_TINY = 1e-3
"""What is added to something and is no larger keeps it from zero, whatever reads it."""
_MASKS = frozenset({"is_causal", "diagonal", "ignore_index"})
_PLACES = frozenset({"arange", "linspace", "logspace", "roll"})
"""Ops that number places, or move them."""


def text_of(question: Question, literal: Literal, value: Any) -> str:
    """Return how the mistake is reported that this argument has another value."""
    op, name, own = op_name(literal.node), name_of(question, literal), literal.value
    kind, verb = named(op).kind, "added" if op == "add" else "subtracted"
    if kind == "factor" and value == 1 and own != 1:
        return f"{done_by(literal.node, own)} is missing"
    if kind == "term" and value == 0 and own:
        return f"{shown(own)} is not {verb}"
    if kind == "term" and isinstance(own, (int, float)) and isinstance(value, (int, float)) and name != "eps":
        return f"{shown(own)} is {verb} in the baseline, {shown(value)} in the candidate"
    if op == "getitem":
        source = literal.node.args[0]
        of = f" of {op_name(source)}" if isinstance(source, Node) and source.op == "call_function" else ""
        return f"item {shown(own)}{of} is taken in the baseline, item {shown(value)} in the candidate"
    if op == "clamp" and value is None:
        return f"the clamp has no {name}: {shown(own)} in the baseline"
    default = "1 / sqrt(head width)" if literal.name == "scale" else "default"
    here, there = (default if one is None else shown(one) for one in (own, value))
    return f"{name} of {called(op)}: {here} in the baseline, {there} in the candidate"


def name_of(question: Question, literal: Literal) -> str:
    """Return what an argument is to people: the operand of a sum below a root is an epsilon."""
    if is_epsilon(question, literal):
        return "eps"
    if literal.name in ("other", "value", "1") and traits_of(literal.node).kind == "factor":
        return "factor" if op_name(literal.node) == "mul" else "divisor"
    if op_name(literal.node) == "pow" and literal.name == "self":
        return "base"
    return literal.name


def kind_of(question: Question, literal: Literal, value: Any) -> Kind:
    """Return the kind of the mistake that this argument has a value."""
    name, op, own, node = literal.name, op_name(literal.node), literal.value, literal.node
    kind = named(op).kind
    if is_epsilon(question, literal):
        return "eps"
    if name == "pad" and _is_moved(own, value):
        return "position"
    if name == "equation" and isinstance(value, str):
        return _kind_of_equation(str(own), value)
    if name == "scale" or (kind == "factor" and isinstance(own, (int, float))):
        return "position" if is_counted(question, node) else "scale"
    if name in _MASKS or (op == "masked_fill" and name == "value"):
        return "mask"
    if name == "reduction":
        return "scale"
    if name == "approximate" or kind == "activation":
        return "activation"
    # What an argument means is the op's own: no trait says it, and only a hint depends on it.
    traits = traits_of(node)
    goes_along = traits.choice is not None or traits.rounding in (Rounding.SUMS, Rounding.COMPOSITE)
    if op in ("permute", "transpose", "view", "reshape") or (name.startswith("dim") and goes_along):
        return "transposed"  # along another axis, what sums, norms or chooses takes columns for rows
    if op in ("flip", "getitem"):
        return "permuted" if op == "flip" else "swapped"
    if op in ("slice", "select", "narrow") and name in ("start", "end", "index", "length"):
        return "swapped" if _is_one_of_several(question, node) else "position"
    if op in _PLACES or (op == "pow" and name == "self"):
        return "position"
    return _kind_of_term(question, node) if op in ("add", "sub", "rsub") and isinstance(own, int) else "other"


def _kind_of_equation(here: str, there: str) -> Kind:
    """Return the kind of the mistake that a sum over axes is another: operands exchanged, or axes of one transposed."""
    terms = [text.replace(" ", "").replace("->", ",").split(",") for text in (here, there)]
    if terms[0] != terms[1] and sorted(terms[0][:-1]) == sorted(terms[1][:-1]) and terms[0][-1] == terms[1][-1]:
        return "swapped"
    return "transposed" if [sorted(term) for term in terms[0]] == [sorted(term) for term in terms[1]] else "other"


def _is_moved(here: Any, there: Any) -> bool:
    """Whether both sides pad each axis by as much, at other ends of it: what is between is moved."""
    if not isinstance(here, (list, tuple)) or not isinstance(there, (list, tuple)) or len(here) != len(there):
        return False
    one, other = ([first + last for first, last in zip(p[::2], p[1::2], strict=False)] for p in (here, there))
    return one == other


def _kind_of_term(question: Question, node: Node) -> Kind:
    """Return the kind of the mistake that another number is added: to positions, to a factor (1 + gain), to values."""
    value = question.trial.values.get(node)
    if not isinstance(value, Tensor) or not value.is_floating_point() or torch.equal(value, value.round()):
        return "position"
    users = question.in_baseline(node).users
    return "scale" if any(named(op_name(user)).kind == "factor" for user in users) else "other"


def kind_of_op(node: Node, theirs: Node) -> Kind:
    """Return the kind of the mistake that another op, or another form of it, stands instead of this one."""
    ops, kinds = {op_name(node), op_name(theirs)}, {traits_of(node).kind, traits_of(theirs).kind}
    if traits_of(node).kind == "activation" or kinds <= BENDING:
        return "activation"
    if op_name(node) in ("tril", "triu", "masked_fill") or kinds <= {"comparison", "logic"}:
        return "mask"
    if kinds in ({"factor"}, {"term"}) or ops == {"mean", "sum"}:
        return "scale"  # what is turned over, a sign, a number of terms
    return "position" if op_name(node) in _PLACES else "other"


def _is_one_of_several(question: Question, node: Node) -> bool:
    """Whether a tensor is taken apart into this piece and others that have nothing in common with it."""
    source, extent = node.args[0], _extent(node)
    if not isinstance(source, Node) or extent is None:
        return False
    others = [_extent(user) for user in question.in_baseline(source).users if user.target is node.target]
    axis, start, end = extent
    return any(one is not None and one[0] == axis and (one[1] >= end or one[2] <= start) for one in others)


def _extent(node: Node) -> tuple[int, int, int] | None:
    """Return (axis, start, end) of what a slice or an index takes; None where they are not whole numbers."""
    given, numbers = node.args[0], [arg for arg in node.args[1:] if isinstance(arg, int)]
    if not numbers or len(numbers) < len(node.args) - 1 or not isinstance(given, Node):
        return None
    size, axis = getattr(given.meta.get("val"), "shape", ()), numbers[0]
    if not -len(size) <= axis < len(size) or not isinstance(size[axis], int):
        return None
    start = numbers[1] if len(numbers) > 1 else 0
    end = numbers[2] if len(numbers) > 2 else None
    if op_name(node) == "select":
        end = start + 1 or None  # the last one ends where the axis does
    return axis % len(size), *slice(start, end).indices(size[axis])[:2]


def is_epsilon(question: Question, literal: Literal) -> bool:
    """Whether an argument keeps a divisor, a root or a logarithm away from zero."""
    value, is_written = literal.value, op_name(literal.node) in ("add", "clamp", "clamp_min")  # how people write it
    if literal.name in ("eps", "epsilon"):
        return True
    if not isinstance(value, float) or not 0 < value <= 1e-2 or not is_written or literal.name not in ("other", "min"):
        return False
    return value <= _TINY or any(traits_of(user).domain for user in question.in_baseline(literal.node).users)
