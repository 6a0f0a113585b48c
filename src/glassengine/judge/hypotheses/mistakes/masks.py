"""Masks that are another one: causal or not, windows, heads that share keys; which positions see which others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.hypotheses.mistakes.tensor_roles import PLACING
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, bound
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Call, Edit
from glassengine.numerics.mask_values import HIDDEN
from glassengine.ops.row import Rounding
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind

_MOST_WINDOWS = 64
_MASK, _DROPOUT, _CAUSAL = 3, 4, 5


def of_attention(question: Question) -> Iterator[Hypothesis]:
    """Yield: another mask of an attention in one op."""
    for node in reversed(question.trial.ops):
        if traits_of(node).rounding is Rounding.ATTENTION:
            yield from _masks(question, node)
            yield from _written_out(question, node)
            yield from _heads(question, node)


def _masks(question: Question, node: Node) -> Iterator[Hypothesis]:
    args, _ = bound(node.target, node.args, node.kwargs)
    query, key = (question.trial.values[args[i]] for i in (0, 1))
    rows, columns = query.shape[-2], key.shape[-2]
    mask = question.trial.values.get(args[_MASK]) if isinstance(args[_MASK], Node) else None
    causal = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
    from_start = torch.ones(rows, columns, dtype=torch.bool).tril()
    seen = _seen(mask, rows, columns) if mask is not None else from_start if args[_CAUSAL] else None
    what = "the mask" if mask is not None else "the causal mask"
    if seen is not None:
        yield Hypothesis("mask", f"{what} is missing", {node: _masked(None)})
        yield Hypothesis("mask", f"{what} is inverted", {node: _masked(~seen)})
        if rows == columns:
            yield Hypothesis("mask", f"{what} is transposed", {node: _masked(seen.transpose(-1, -2))})
    both = causal if seen is None else seen & causal
    if seen is None or not torch.equal(both, seen.expand(both.shape)):
        yield Hypothesis("mask", "a causal mask that the baseline has not", {node: _masked(both)})
        if seen is not None:
            yield Hypothesis("mask", f"{what} is missing; there is a causal mask instead", {node: _masked(causal)})
    if seen is not None:
        # The last position of a causal mask sees everything but padding.
        beside = seen[..., -1:, :].expand(seen.shape)
        if not torch.equal(seen, beside) and torch.equal(seen, beside & causal):
            yield Hypothesis("mask", "the causal part of the mask is missing", {node: _masked(beside)})
        for by in (-1, 1, columns - rows):
            if by:
                moved = torch.ones(rows, columns, dtype=torch.bool).tril(by)
                text = "sees the next position" if by > 0 else "does not see itself"
                text = f"a position {text}: the causal mask is moved by {by}"
                yield Hypothesis("mask", text, {node: _masked(moved)})
                if mask is not None:
                    yield Hypothesis("mask", text, {node: _masked(moved & beside)})
        every = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        if torch.equal((seen & every).expand(seen.shape), seen) and mask is not None:
            yield Hypothesis("mask", "causal alone: the rest of the mask is missing", {node: _masked(every)})
    apart = torch.arange(rows)[:, None] + (columns - rows) - torch.arange(columns)[None]
    for window in range(1, min(columns, _MOST_WINDOWS) + 1):
        base = causal if seen is None else seen
        near = (apart < window) & (apart > -window)
        text = f"a window of {window} positions in the candidate"
        yield Hypothesis("mask", text, {node: _masked(base & near)})
        if seen is not None:
            yield Hypothesis("mask", text, {node: _masked(causal & near)})


def _written_out(question: Question, node: Node) -> Iterator[Hypothesis]:
    """An attention with its steps in another order, or one of them along another axis."""
    args, kwargs = bound(node.target, node.args, dict(node.kwargs))
    query, key, value = (question.trial.values[args[i]] for i in range(3))
    if kwargs.get("enable_gqa") or query.dim() < 3:
        return
    rows, columns = query.shape[-2], key.shape[-2]
    mask = question.trial.values.get(args[_MASK]) if isinstance(args[_MASK], Node) else None
    seen = _seen(mask, rows, columns) if mask is not None else torch.ones(rows, columns, dtype=torch.bool)
    if args[_CAUSAL]:
        seen = seen.tril()
    scale = kwargs.get("scale")
    plain = query @ key.transpose(-1, -2)
    scores = plain * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None and mask.is_floating_point():
        scores = scores + torch.where(mask > HIDDEN, mask, 0.0)
    lowest = torch.finfo(torch.float32).min
    hidden = scores.masked_fill(~seen, lowest)
    made: list[tuple[Kind, str, torch.Tensor]] = [
        ("transposed", "softmax is over the queries (dim -2), not over the keys", hidden.softmax(-2) @ value),
        ("mask", "the mask is inverted", scores.masked_fill(seen, lowest).softmax(-1) @ value),
        ("other", "softmax is missing", scores.masked_fill(~seen, 0.0) @ value),
        ("activation", "sigmoid instead of softmax", hidden.sigmoid() @ value),
        ("mask", "the mask is multiplied after the softmax", (scores.softmax(-1) * seen) @ value),
        ("mask", "hidden scores are zero, not minus infinity", scores.masked_fill(~seen, 0.0).softmax(-1) @ value),
        (
            "scale",
            "the scores are scaled after the softmax",
            (plain.masked_fill(~seen, lowest).softmax(-1) * scores / plain) @ value,
        ),
    ]
    if rows == columns:
        gathered = hidden.softmax(-1).transpose(-1, -2) @ value
        made.append(("transposed", "the weights are transposed: each key gathers the values", gathered))
    for kind, text, result in made:
        yield Hypothesis(kind, text, {node: result})


def _heads(question: Question, node: Node) -> Iterator[Hypothesis]:
    args, _ = bound(node.target, node.args, node.kwargs)
    query, key = (question.trial.values[args[i]] for i in range(2))
    if query.dim() != 4 or key.dim() != 4:
        return
    heads, shared = query.shape[1], key.shape[1]
    if shared < heads and heads % shared == 0 and shared > 1:
        text = "heads share keys in turn in the candidate, in groups here (repeat for repeat_interleave)"

        def edit(call: Call) -> Any:
            own, kwargs = bound(call.node.target, call.args, call.kwargs)
            spread = [t.repeat(1, heads // shared, 1, 1) for t in own[1:3]]
            return call.target(own[0], *spread, *own[3:], **{**kwargs, "enable_gqa": False})

        yield Hypothesis("permuted", text, {node: edit})
    elif shared == heads:
        yield from _spread(node, heads)


def _spread(node: Node, heads: int) -> Iterator[Hypothesis]:
    """Keys that were repeated before the attention: each group of heads has the same."""
    for group in range(2, heads):
        if heads % group:
            continue
        order = torch.arange(heads).reshape(-1, group).T.reshape(-1)

        def edit(call: Call, order: torch.Tensor = order, group: int = group) -> Any:
            key, value = call.args[1], call.args[2]
            alike = key.reshape(key.shape[0], -1, group, *key.shape[2:])
            if not torch.equal(alike, alike[:, :, :1].expand_as(alike)):
                raise ValueError("heads do not share keys")
            return call.target(call.args[0], key[:, order], value[:, order], *call.args[3:], **call.kwargs)

        text = "heads share keys in turn in the candidate, in groups here (repeat for repeat_interleave)"
        yield Hypothesis("permuted", text, {node: edit})


def _seen(mask: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    found = mask if mask.dtype is torch.bool else mask > HIDDEN
    return found.expand(*found.shape[:-2], rows, columns) if found.dim() >= 2 else found.expand(rows, columns)


def _masked(seen: torch.Tensor | None) -> Edit:
    def edit(call: Call) -> Any:
        args, kwargs = bound(call.node.target, call.args, call.kwargs)
        found = [*args[:_MASK], seen, args[_DROPOUT], False, *args[_CAUSAL + 1 :]]
        return call.target(*found, **kwargs)

    return edit


_NEAR_BELOW = 10
"""Ops below a mask within which an attention or a choice reads it."""
_MOST_LISTED = 4


def mask_pairs(question: Question) -> Iterator[Hypothesis]:
    """Yield: what is seen through a mask is other pairs of positions; the words say which."""
    right, actual, end = question.right, question.actual, question.trial.end
    pairs = pairs_between(question, actual)
    if pairs is not None:
        made = actual if actual.dtype is right.dtype else actual.to(right.dtype)
        yield Hypothesis("mask", pairs, {end: made})


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
    yield Hypothesis("position", text, {end: made}, "position", (here, there))


def _is_counted(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32)


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
