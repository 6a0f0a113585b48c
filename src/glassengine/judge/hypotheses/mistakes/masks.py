"""Attention that sees something else: masks, windows, heads that share keys, caches that are read wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.hypotheses.mistakes.tensor_roles import PLACING
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, bound, reading
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Edit, TrialCall
from glassengine.judge.site_pairs import down
from glassengine.numerics.mask_values import HIDDEN
from glassengine.ops.row import Rounding
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind

_MOST_WINDOWS = 64
MASK, _DROPOUT, _CAUSAL = 3, 4, 5
_NEAR = 10
"""Ops below a mask within which an attention or a choice reads it."""
_MOST_LISTED = 4
_IN_TURN = "heads share keys in turn in the candidate, in groups in the baseline (repeat for repeat_interleave)"


def of_attention(question: Question) -> Iterator[Hypothesis]:
    """Yield: another mask of an attention in one op, its steps in another order, heads that share other keys."""
    for node in reversed(question.trial.ops):
        if traits_of(node).rounding is Rounding.ATTENTION:
            for text, seen in _other_masks(question, node):
                yield Hypothesis("mask", text, {node: masked(seen)})
            for kind, text, made in _written_out(question, node):
                yield Hypothesis(kind, text, {node: made})
            for edit in _heads(question, node):
                yield Hypothesis("permuted", _IN_TURN, {node: edit})


def _other_masks(question: Question, node: Node) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield (words, what is seen) of masks that an attention may have instead; None for all."""
    args, _ = bound(node.target, node.args, node.kwargs)
    rows, columns = (question.trial.values[args[i]].shape[-2] for i in (0, 1))
    mask = question.trial.tensor(args[MASK])

    def below(diagonal: int) -> torch.Tensor:
        return torch.ones(rows, columns, dtype=torch.bool).tril(diagonal)

    seen = seen_by(mask, rows, columns) if mask is not None else below(0) if args[_CAUSAL] else None
    before = columns - rows if seen is None or rows == columns else _before(seen)
    causal = below(before)
    what = "the mask" if mask is not None else "the causal mask"
    if seen is not None:
        yield f"{what} is missing", None
        yield f"{what} is inverted", ~seen
        if rows == columns:
            yield f"{what} is transposed", seen.transpose(-1, -2)
    both = causal if seen is None else seen & causal
    if seen is None or not torch.equal(both, seen.expand(both.shape)):
        yield "a causal mask that the baseline has not", both
        if seen is not None:
            yield f"{what} is missing; there is a causal mask instead", causal
    if seen is not None:
        # The last position of a causal mask sees everything but padding.
        beside = seen[..., -1:, :].expand(seen.shape)
        if not torch.equal(seen, beside) and torch.equal(seen, beside & causal):
            yield "the causal part of the mask is missing", beside
        for by in (-1, 1, columns - rows - before):
            if by:
                text = "sees the next position" if by > 0 else "does not see itself"
                text = f"a position {text}: the causal mask is moved by {by}"
                yield text, below(before + by)
                if mask is not None:
                    yield text, below(before + by) & beside
        if mask is not None and torch.equal(both.expand(seen.shape), seen):
            yield "causal alone: the rest of the mask is missing", causal
    apart = torch.arange(rows)[:, None] + before - torch.arange(columns)[None]
    for window in range(1, min(columns, _MOST_WINDOWS) + 1):
        near = (apart < window) & (apart > -window)
        for base in (causal,) if seen is None else (seen, causal):
            yield f"a window of {window} positions in the candidate", base & near


def _before(seen: torch.Tensor) -> int:
    """Return how many slots lie before the first row: a cache of fixed size has free ones behind the last."""
    rows, columns = seen.shape[-2:]
    used = seen.reshape(-1, rows, columns).any(0)[-1].nonzero().flatten()
    return (int(used[-1]) + 1 if len(used) else columns) - rows


def _written_out(question: Question, node: Node) -> Iterator[tuple[Kind, str, torch.Tensor]]:
    """Yield what an attention makes with its steps in another order, or one of them along another axis."""
    args, kwargs = bound(node.target, node.args, dict(node.kwargs))
    query, key, value = (question.trial.values[args[i]] for i in range(3))
    if kwargs.get("enable_gqa") or query.dim() < 3:
        return
    rows, columns = query.shape[-2], key.shape[-2]
    mask = question.trial.tensor(args[MASK])
    seen = seen_by(mask, rows, columns) if mask is not None else torch.ones(rows, columns, dtype=torch.bool)
    seen = seen.tril() if args[_CAUSAL] else seen
    scale = kwargs.get("scale")
    plain = query @ key.transpose(-1, -2)
    scores = plain * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None and mask.is_floating_point():
        scores = scores + torch.where(mask > HIDDEN, mask, 0.0)
    lowest = torch.finfo(torch.float32).min
    hidden = scores.masked_fill(~seen, lowest)
    yield "transposed", "softmax is over the queries (dim -2), not over the keys", hidden.softmax(-2) @ value
    yield "mask", "the mask is inverted", scores.masked_fill(seen, lowest).softmax(-1) @ value
    yield "other", "softmax is missing", scores.masked_fill(~seen, 0.0) @ value
    yield "activation", "sigmoid instead of softmax", hidden.sigmoid() @ value
    yield "mask", "the mask is multiplied after the softmax", (scores.softmax(-1) * seen) @ value
    zeros = scores.masked_fill(~seen, 0.0)
    yield "mask", "hidden scores are zero, not minus infinity", zeros.softmax(-1) @ value
    scaled = plain.masked_fill(~seen, lowest).softmax(-1) * scores / plain
    yield "scale", "the scores are scaled after the softmax", scaled @ value
    if rows == columns:
        gathered = hidden.softmax(-1).transpose(-1, -2) @ value
        yield "transposed", "the weights are transposed: each key gathers the values", gathered


def _heads(question: Question, node: Node) -> Iterator[Edit]:
    """Yield attention whose heads share keys in turn; keys may have been repeated before, for each group of heads."""
    args, _ = bound(node.target, node.args, node.kwargs)
    query, key = (question.trial.values[args[i]] for i in range(2))
    if query.dim() != 4 or key.dim() != 4:
        return
    heads, shared = query.shape[1], key.shape[1]
    if 1 < shared < heads and heads % shared == 0:
        yield _with_heads(torch.arange(heads) % shared)
    for group in range(2, heads) if shared == heads else ():
        alike = key.reshape(key.shape[0], -1, group, *key.shape[2:]) if heads % group == 0 else None
        if alike is not None and torch.equal(alike, alike[:, :, :1].expand_as(alike)):
            yield _with_heads(torch.arange(heads).reshape(-1, group).T.reshape(-1))


def _with_heads(order: torch.Tensor) -> Edit:
    """Return the edit by which each head reads other keys and values, and none is shared."""

    def edit(call: TrialCall) -> Any:
        args, kwargs = bound(call.node.target, call.args, call.kwargs)
        kwargs.pop("enable_gqa", None)
        return call.target(args[0], *(one[:, order] for one in args[1:3]), *args[3:], **kwargs)

    return edit


def seen_by(mask: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return what is seen through a mask, [..., rows, columns]."""
    found = mask if mask.dtype is torch.bool else mask > HIDDEN
    return found.expand(*found.shape[:-2], rows, columns)


def masked(seen: torch.Tensor | None) -> Edit:
    """Return the edit by which an attention sees something else."""

    def edit(call: TrialCall) -> Any:
        args, kwargs = bound(call.node.target, call.args, call.kwargs)
        return call.target(*args[:MASK], seen, args[_DROPOUT], False, *args[_CAUSAL + 1 :], **kwargs)

    return edit


def mask_pairs(question: Question) -> Iterator[Hypothesis]:
    """Yield: what is seen through a mask is other pairs of positions; the words say which."""
    pairs = pairs_between(question, question.actual)
    if pairs is not None:
        yield Hypothesis("mask", pairs, {question.trial.end: question.actual.to(question.right.dtype)})


def pairs_between(question: Question, made: torch.Tensor) -> str | None:
    """Return how a mistake changes which positions are seen, whatever op it is in; None where it does not."""
    right, end = question.right, question.trial.end
    if right.shape != made.shape or right.dim() < 2 or right.shape[-1] < 2:
        return None
    here, there = _unhidden(right), _unhidden(made)
    if here is None or there is None or torch.equal(here, there) or not _hides(question, end):
        return None
    is_hidden = not right.is_floating_point() and _marks_hidden(question.in_baseline(end))
    return _described(~here, ~there) if is_hidden else _described(here, there)


def _marks_hidden(node: Node, depth: int = _NEAR) -> bool:
    """Whether what is true in a condition is hidden by its readers, after the ops that turn it over."""
    for user in node.users:
        if op_name(user) == "masked_fill":
            return True
        if depth and getattr(user.meta.get("val"), "dtype", None) is torch.bool:
            is_zero = op_name(user) == "eq" and user.args[1:] in ((0,), (False,))
            return _marks_hidden(user, depth - 1) != (is_zero or op_name(user) in ("bitwise_not", "logical_not"))
    return False


def counted(question: Question) -> Iterator[Hypothesis]:
    """Yield: positions are others, where whole numbers are made from which sines or rows of a table are taken."""
    right, actual, trial = question.right, question.actual, question.trial
    if right.shape != actual.shape or not right.numel() or right.dtype is torch.bool:
        return
    are_whole = all(bool((tensor == tensor.round()).all()) for tensor in (right.double(), actual.double()))
    dtypes = {getattr(question.in_baseline(one).meta.get("val"), "dtype", None) for one in [*trial.ops, *trial.inputs]}
    below = down([question.in_baseline(trial.end)], depth=_NEAR)
    if are_whole and dtypes & {torch.int64, torch.int32} and any(op_name(one) in PLACING for one in below):
        apart = (right != actual).flatten().nonzero().flatten()
        here, there = (int(tensor.flatten()[int(apart[0])]) for tensor in (right, actual))
        text = f"position {here} is {there} in the candidate ({len(apart)} of {right.numel()} are others)"
        yield Hypothesis("position", text, {trial.end: actual.to(right.dtype)}, "position", (here, there))


def _unhidden(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return which elements of a mask are seen; None if it does not hide."""
    if not tensor.is_floating_point():  # also a mask of whole numbers, which is compared with one of them later
        return tensor.bool() if tensor.dtype is torch.bool or bool(((tensor == 0) | (tensor == 1)).all()) else None
    return tensor > HIDDEN if bool((tensor <= HIDDEN).any()) else None


def _hides(question: Question, end: Node) -> bool:
    """Whether what reads a tensor hides elements by it."""
    own = question.in_baseline(end)
    for node in (own, *down([own], depth=_NEAR)):
        is_bool = getattr(node.meta.get("val"), "dtype", None) is torch.bool
        for user in node.users:
            is_choice = is_bool and op_name(user) in ("masked_fill", "where")
            if traits_of(user).rounding is Rounding.ATTENTION or is_choice or "softmax" in op_name(user):
                return True
    return False


def _described(right: torch.Tensor, actual: torch.Tensor) -> str:
    """Return how two masks [..., rows, columns] differ, true where seen."""
    if torch.equal(actual, ~right):
        return "the mask is inverted"
    more, fewer = actual & ~right, right & ~actual
    said = [f"{verb} {_which(a)}" for a, verb in ((more, "sees"), (fewer, "does not see")) if bool(a.any())]
    return f"a position {' and '.join(said)}"


def _which(found: torch.Tensor) -> str:
    rows, columns = found.shape[-2:]
    any_of = found.reshape(-1, rows, columns).any(0)
    row, column = any_of.nonzero().unbind(1)
    # The last row is the last position, whatever was there before.
    apart = sorted(set((column - row - (columns - rows)).tolist()))
    if apart == [1]:
        return "the next one"
    if apart == [0]:
        return "itself"
    if min(apart) > 0:
        return "later ones" if len(apart) > 1 else f"the one {apart[0]} later"
    if apart[0] == 1 - columns and -apart[-1] > 1 and len(apart) < columns - 1:
        return f"those {-max(apart)} and more before it"
    listed = any_of.any(0).nonzero().flatten().tolist()
    if len(listed) <= _MOST_LISTED:
        return f"position {', '.join(map(str, listed))}"
    return f"{int(found.sum())} of {found.numel()} others"


_MOST_LOST = 32
_KEY, _VALUE = 1, 2
_WHICH = {"keys and values": (_KEY, _VALUE), "keys": (_KEY,), "values": (_VALUE,)}
IN_8_BITS = "the {} are cached in 8 bits, with a scale for each row"


def of_caches(question: Question) -> Iterator[Hypothesis]:
    """Yield: an attention behind a cache that reads something else for the tokens of earlier steps."""
    for node in reversed(question.trial.ops):
        if op_name(node) == "index_copy":
            yield Hypothesis("dtype", IN_8_BITS.format("keys or values"), {node: lambda call: _in_8_bits(call.value)})
        if traits_of(node).rounding is not Rounding.ATTENTION:
            continue
        args, _ = bound(node.target, node.args, node.kwargs)
        mask = question.trial.tensor(args[MASK])
        query, key, value = (question.trial.values[args[place]] for place in range(3))
        rows, columns = query.shape[-2], key.shape[-2]
        seen = torch.ones(rows, columns, dtype=torch.bool) if mask is None else seen_by(mask, rows, columns)
        slots = seen.reshape(-1, columns).any(0).nonzero().flatten()
        if len(slots) <= rows or key.shape != value.shape:
            continue  # nothing comes from a cache
        for lost in [*range(1, min(len(slots) - rows, _MOST_LOST)), len(slots) - rows]:
            kept = seen.clone()
            kept[..., slots[len(slots) - rows - lost : len(slots) - rows]] = False
            tokens = "tokens" if lost > 1 else "token"
            text = f"the cache lacks the last {lost} {tokens} of the {len(slots) - rows} from earlier steps"
            yield Hypothesis("stale", text, {node: masked(kept)})
        both = (_changes(slots, rows, one) for one in (key, value))
        for (kind, text, of_key), (_, _, of_value) in zip(*both, strict=True):
            changed = {_KEY: of_key, _VALUE: of_value}
            for which, places in _WHICH.items():
                edit = reading({place: changed[place] for place in places})
                yield Hypothesis(kind, text.format(which), {node: edit})
        joined_values = {_KEY: _joined(value, key, slots, rows), _VALUE: _joined(key, value, slots, rows)}
        text = "keys and values of earlier steps are exchanged in the cache"
        yield Hypothesis("swapped", text, {node: reading(joined_values)})


def _changes(slots: torch.Tensor, rows: int, one: torch.Tensor) -> Iterator[tuple[Kind, str, torch.Tensor]]:
    """Yield the kind and the words for a change of keys or of values [..., L, D], and what becomes of them."""
    newest, before = slots[-rows:], slots[-rows - 1 : -1]
    for by in (1, -1):
        text = f"the {{}} in the cache are moved by {by} slot"
        yield "position", text, _put(one, slots, one[..., slots.roll(by), :])
    text = "the {} of the newest token are not written to the cache"
    yield "stale", text, _put(one, newest, one[..., before, :])
    text = "the {} of the newest token overwrite those before it"
    yield "position", text, _put(one, before, one[..., newest, :])
    yield "other", "the {} of the newest token are zero in the cache", one.index_fill(-2, newest, 0.0)
    for dim, text in ((0, "of another row of the batch"), (1, "of another head")):
        if one.dim() == 4 and one.shape[dim] > 1:
            numbers = torch.arange(one.shape[dim])
            for order in (numbers.flip(0), numbers.roll(1)):
                moved = _joined(one.index_select(dim, order), one, slots, rows)
                yield "permuted", f"the {{}} of earlier steps are those {text}", moved
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        yield "dtype", f"the {{}} are cached in {str(dtype).removeprefix('torch.')}", one.to(dtype).to(one.dtype)
    yield "dtype", IN_8_BITS, _in_8_bits(one)


def _in_8_bits(one: torch.Tensor) -> torch.Tensor:
    scale = one.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (one / scale).round() * scale, one)


def _put(one: torch.Tensor, slots: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    found = one.clone()
    found[..., slots, :] = made
    return found


def _joined(earlier: torch.Tensor, now: torch.Tensor, slots: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a tensor with the earlier slots of one and all others of another."""
    return _put(now, slots[:-rows], earlier[..., slots[:-rows], :])
