"""What an attention may see: causal or not, other masks, windows, heads that share keys in another order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, bound
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Call, Edit, giving
from glassengine.numerics.mask_values import HIDDEN
from glassengine.ops.row import Rounding
from glassengine.ops.traits import traits_of
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
        yield Hypothesis(kind, text, {node: giving(result)})


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
