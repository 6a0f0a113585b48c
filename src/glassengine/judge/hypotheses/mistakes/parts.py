"""Only some of what was made is wrong: a part is zero or scaled, values are cut off, a dropout was left on."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, tensors_of, with_leaves
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Edit, giving
from glassengine.numerics.mask_values import sentinel
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind

_LEAST = 8
"""Elements below which a part is no evidence."""
_MOST_DROPPED = 0.75
_WRITES = ("index_copy", "index_put", "slice_scatter", "select_scatter", "scatter", "copy")
"""Ops that put new values beside old ones."""
_APART = 16.0
"""Slices are wrong that are this many roundings away."""


def parts(question: Question) -> Iterator[Hypothesis]:
    """Yield: some indices of one axis are zero, or the right values times a number; the others are right."""
    right, actual, end = question.right, question.actual, question.trial.end
    if right.shape != actual.shape or not right.is_floating_point() or right.numel() < _LEAST:
        return
    if not bool(actual.isfinite().all()):
        return
    error = (actual - right).abs()
    error = error if question.valid is None else torch.where(question.valid, error, 0.0)
    size = float(right[right.abs() < sentinel(right.dtype)].square().mean().sqrt())
    is_wrong = error > _APART * question.noise * max(size, 1e-300)
    written = op_name(end) in _WRITES
    for axis in range(right.dim()):
        others = [other for other in range(right.dim()) if other != axis]
        where = is_wrong.any(others) if len(others) > 1 else is_wrong.any(others[0]) if others else is_wrong
        count = int(where.sum())
        if not 0 < count <= right.shape[axis] // 2:
            continue
        index = where.nonzero().flatten()
        a, b = right.index_select(axis, index).flatten(), actual.index_select(axis, index).flatten()
        power = float(a.square().sum())
        factor = float((a * b).sum()) / power if power else 0.0
        is_zero = not bool(b.any())
        named = f"index {int(index[0])}" if count == 1 else f"{count} of {right.shape[axis]} indices"
        text = f"{named} of axis {axis} {'is' if count == 1 else 'are'} "
        text += "zero" if is_zero else f"{factor:.6g} times the right values"
        changed = right.clone()
        changed.index_copy_(axis, index, right.index_select(axis, index) * (0.0 if is_zero else factor))
        kind: Kind = "stale" if written else "other" if is_zero else "scale"
        yield Hypothesis(kind, text, {end: giving(changed)}, "factor", (1.0, 0.0 if is_zero else factor), axis)


def cut_off(question: Question) -> Iterator[Hypothesis]:
    """Yield: the right values, cut off at a number below, above or both."""
    right, actual, end = question.right, question.actual, question.trial.end
    if right.shape != actual.shape or not right.is_floating_point() or right.numel() < _LEAST:
        return
    if not bool(actual.isfinite().all()):
        return
    low, high = float(actual.min()), float(actual.max())
    if low == high:
        return  # one number everywhere is nothing of the right values
    for least, most in ((low, high), (None, high), (low, None)):
        made = right.clamp(least, most)
        if int((made != right).sum()) < 2:
            continue
        said = " and ".join(
            f"{word} {value:.6g}" for word, value in (("below", least), ("above", most)) if value is not None
        )
        text = f"{article_of(question)} is cut off {said}"
        yield Hypothesis("other", text, {end: giving(made)}, "clamp", (None, [least, most]))


def dropped(question: Question) -> Iterator[Hypothesis]:
    """Yield: some elements are zero, wherever they are, and the others scaled up: a dropout that was left on."""
    right, actual, end = question.right, question.actual, question.trial.end
    if right.shape != actual.shape or not right.is_floating_point() or right.numel() < 4 * _LEAST:
        return
    lost = (actual == 0) & (right != 0)
    share = float(lost.double().mean())
    if not 0 < share <= _MOST_DROPPED:
        return
    kept = ~lost & (right.abs() < sentinel(right.dtype))
    power = float(right[kept].square().sum())
    factor = float((right[kept] * actual.double()[kept]).sum()) / power if power else 0.0
    if abs(factor - 1) <= 0.01 or not math.isfinite(factor):
        return  # an activation that cuts off makes zeros as well, but scales nothing
    made = torch.where(lost, 0.0, right * factor)
    if lost.shape[0] > 1 and bool((lost == lost[:1]).all()):
        # Chance does not choose the same elements in every row.
        text = f"{factor:.6g} times the right values, where a mask does not make zeros of them"
        yield Hypothesis("scale", text, {end: giving(made)}, "factor", (1.0, factor))
    elif factor > 1:
        text = f"a dropout is on: {share:.1%} of the elements are zero, the others {factor:.4g} times"
        yield Hypothesis("other", text, {end: giving(made)}, "p", (0.0, 1 - 1 / factor))


def zeroed(question: Question) -> Iterator[Hypothesis]:
    """Yield: the first or the last slice of what a product reads is zero: a position that was never written."""
    trial = question.trial
    for node in reversed(trial.ops):
        for place, source in tensors_of(trial, node) if traits_of(node).reads_memory else ():
            value = trial.values[source]
            if not value.is_floating_point() or source.name in question.weights:
                continue
            for axis in range(1, value.dim() - 1):
                for index, which in ((0, "first"), (-1, "last")) if value.shape[axis] > 1 else ():
                    changed = value.clone()
                    changed.select(axis, index).zero_()
                    text = f"the {which} of axis {axis} of {question.label(source)} is zero"
                    yield Hypothesis("other", text, {node: _read(place, changed)}, axis=axis)


def article_of(question: Question) -> str:
    """Return what the result of a piece is called: by its op, or where that only passes on, as the result."""
    end = question.trial.end
    return "the result" if traits_of(end).kind == "reshape" else f"the result of {op_name(end)}"


def _read(place: int, value: torch.Tensor) -> Edit:
    return lambda call: with_leaves(call, {place: value})
