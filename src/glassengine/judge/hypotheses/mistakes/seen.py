"""A mask that is another one: which positions see which others, where the two differ."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch.fx import Node

from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.numerics.mask_values import HIDDEN
from glassengine.ops.row import Rounding
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name

_NEAR_BELOW = 10
"""Ops below a mask within which an attention or a choice reads it."""
_MOST_LISTED = 4
_NEAR_ABOVE = 6
PLACING = frozenset({"sin", "cos"})
"""What makes rotations and tables of positions."""


def seen_pairs(question: Question) -> Iterator[Hypothesis]:
    """Yield: what is seen through a mask is other pairs of positions; the words say which."""
    right, actual, end = question.right, question.actual, question.trial.end
    pairs = pairs_between(question, actual)
    if pairs is not None:
        made = actual if actual.dtype is right.dtype else actual.to(right.dtype)
        yield Hypothesis("mask", pairs, {end: lambda call: made})


def pairs_between(question: Question, made: torch.Tensor) -> str | None:
    """Return how a mistake changes which positions are seen, whatever op it is in; None where it does not."""
    right, end = question.right, question.trial.end
    if right.shape != made.shape or right.dim() < 2 or right.shape[-1] < 2:
        return None
    seen = [_unhidden(tensor) for tensor in (right, made)]
    if seen[0] is None or seen[1] is None or torch.equal(seen[0], seen[1]) or not _hides(question, end):
        return None
    is_hidden = right.dtype is torch.bool and any(op_name(user) == "masked_fill" for user in question.users(end))
    return described(~seen[0], ~seen[1]) if is_hidden else described(seen[0], seen[1])


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


def counted(question: Question) -> Iterator[Hypothesis]:
    """Yield: positions are others, where whole numbers are made from which sines or rows of a table are taken."""
    right, actual, end = question.right, question.actual, question.trial.end
    if right.shape != actual.shape or not right.numel() or right.dtype is torch.bool:
        return
    whole = [bool((tensor == tensor.round()).all()) for tensor in (right.double(), actual.double())]
    sources = [question.named.get(node.name, node) for node in [*question.trial.ops, *question.trial.inputs]]
    is_counted = any(_is_counted(node) for node in sources)
    if not all(whole) or not is_counted or not _reaches(question, end, PLACING):
        return
    apart = (right != actual).flatten().nonzero().flatten()
    place = int(apart[0])
    here, there = (int(tensor.flatten()[place]) for tensor in (right, actual))
    text = f"position {here} is {there} in the candidate ({len(apart)} of {right.numel()} are others)"
    made = actual.to(right.dtype)
    yield Hypothesis("position", text, {end: lambda call: made}, "position", (here, there))


def _is_counted(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32)


def comes_from(question: Question, node: Node, names: frozenset[str]) -> bool:
    """Whether a node is one of some ops, or made by one a few ops above."""
    layer, known = {question.named.get(node.name, node)}, set[Node]()
    for _ in range(_NEAR_ABOVE):
        if any(op_name(other) in names for other in layer if other.op == "call_function"):
            return True
        known |= layer
        layer = {source for other in layer for source in other.all_input_nodes} - known
    return False


def _reaches(question: Question, end: Node, names: frozenset[str]) -> bool:
    """Whether one of some ops is a few ops below a node."""
    known: set[Node] = set()
    layer = {question.named.get(end.name, end)}
    for _ in range(_NEAR_BELOW):
        layer = {user for node in layer for user in node.users} - known
        known |= layer
        if any(op_name(node) in names for node in layer):
            return True
    return False


def _unhidden(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return which elements of a mask are seen; None if it does not hide."""
    if tensor.dtype is torch.bool:
        return tensor
    if not tensor.is_floating_point() or not bool((tensor <= HIDDEN).any()):
        return None
    return tensor > HIDDEN


def _hides(question: Question, end: Node) -> bool:
    """Whether what reads a tensor hides elements by it."""
    waiting, known = [(question.named.get(end.name, end), 0)], set()
    while waiting:
        node, depth = waiting.pop()
        for user in node.users:
            value = node.meta.get("val")
            is_choice = op_name(user) in ("masked_fill", "where") and getattr(value, "dtype", None) is torch.bool
            if traits_of(user).rounding is Rounding.ATTENTION or is_choice or "softmax" in op_name(user):
                return True
            if user not in known and depth < _NEAR_BELOW:
                known.add(user)
                waiting.append((user, depth + 1))
    return False


def described(right: torch.Tensor, actual: torch.Tensor) -> str:
    """Return how two masks differ.

    Args:
        right: True where seen, [..., rows, columns].
        actual: The candidate's.
    """
    if torch.equal(actual, ~right):
        return "the mask is inverted"
    more, fewer = actual & ~right, right & ~actual
    said = []
    for found, verb in ((more, "sees"), (fewer, "does not see")):
        if bool(found.any()):
            said.append(f"{verb} {_which(found, right)}")
    return f"a position {' and '.join(said)}"


def _which(found: torch.Tensor, right: torch.Tensor) -> str:
    rows, columns = found.shape[-2:]
    any_of = found.reshape(-1, rows, columns).any(0)
    row, column = any_of.nonzero().unbind(1)
    # The last row is the last position, whatever was there before.
    apart = sorted(set((column - row - (columns - rows)).tolist()))
    whole = any_of.any(0)
    if apart == [1]:
        return "the next one"
    if apart == [0]:
        return "itself"
    if min(apart) > 0:
        return "later ones" if len(apart) > 1 else f"the one {apart[0]} later"
    if max(apart) < 0 and len(apart) < columns - 1 and -max(apart) > 1:
        return f"those {-max(apart)} and more before it"
    listed = whole.nonzero().flatten().tolist()
    if len(listed) <= _MOST_LISTED:
        return f"position {', '.join(map(str, listed))}"
    return f"{int(found.sum())} of {found.numel()} others"
