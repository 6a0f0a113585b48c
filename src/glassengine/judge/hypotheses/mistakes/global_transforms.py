"""What the candidate made, described as a whole or in part: scaled, in another order, zero, cut off, dropped."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from glassengine.judge.hypotheses.mistakes.tensor_roles import PLACING, comes_from
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, tensors_of, with_leaves
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Edit
from glassengine.numerics.float64 import double
from glassengine.numerics.mask_values import sentinel
from glassengine.numerics.metrics.orders import called, kind_of_shift, order_between
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind

_ORDERED = 1e-3
_PASSES_OF_ORDER = 12
"""How often a tensor is read where its slices are looked for in another one."""
_LEAST_OPS = 3
"""Fewer ops that are done twice have names: a factor, a sum, an activation."""
_ONE = 1e-5
"""A factor nearer to one is none that anybody writes."""


def another_tensor(question: Question) -> Iterator[Hypothesis]:
    """Yield: what was made is another tensor of the model, or an input of the op itself."""
    end = question.trial.end
    if question.is_another:
        return
    has_product = any(traits_of(node).reads_memory for node in question.trial.ops)
    # What a product takes comes out of it by the wrong pair alone.
    read = [] if has_product else question.trial.inputs
    inputs = {question.label(node): question.trial.values[node] for node in read}
    # Tensors of one model are near each other: what another op of another kind makes is so by the wrong pair.
    alike = {n: v for n, v in question.others.items() if n.rpartition("/")[2].partition(".")[0] == op_name(end)}
    for name, value in {**alike, **inputs}.items():
        if isinstance(value, torch.Tensor) and value.shape == question.actual.shape:
            if name in inputs:
                # What goes in comes out: all that is made of it is missing.
                yield Hypothesis(_kind_of_all(question, name), f"nothing is done: it is {name}", {end: value})
            else:
                yield Hypothesis("stale", f"it is {name}", {end: double(value)})


def done_twice(question: Question) -> Iterator[Hypothesis]:
    """Yield: what is made is put in once more: it is rotated or normed twice."""
    trial, right = question.trial, question.right
    if len(trial.ops) < _LEAST_OPS and traits_of(trial.end).kind != "norm":
        return
    for node in trial.inputs:
        value = trial.values[node]
        is_alike = isinstance(value, torch.Tensor) and value.shape == right.shape and value.is_floating_point()
        if is_alike and node.name not in question.weights and right.is_floating_point():
            made = trial.changed_between(node, right, trial.end)
            if made is not None:
                label = question.label(node)
                text = f"it is done twice: what is made of {label} takes its place once more"
                yield Hypothesis(_kind_of_all(question, label), text, {trial.end: made})


def _kind_of_all(question: Question, name: str) -> Kind:
    """Return the kind of the mistake that all that is done to a tensor is not, or twice: positions may be put in."""
    others = [node for node in question.trial.inputs if question.label(node) != name]
    is_turned = any(comes_from(question, node, PLACING) for node in others)
    is_turned = is_turned or any(op_name(node) in PLACING for node in question.trial.ops)
    return "position" if is_turned else "other"


def rearranged(question: Question) -> Iterator[Hypothesis]:
    """Yield: the right values, in another order along one axis, or with two axes exchanged."""
    right, actual, end = question.right, question.actual, question.trial.end
    if not actual.is_floating_point() or right.shape != actual.shape:
        return
    for axis in reversed(range(right.dim())):
        question.trial.budget.spend_passes(_PASSES_OF_ORDER, right)
        order = order_between(right.double(), actual.double(), axis, max(16 * question.noise, _ORDERED))
        if order is not None:
            kind, how = called(order)
            size = right.shape[axis]
            text = f"the right values {how}, along axis {axis} (of {size})"
            if kind == "position":
                kind = kind_of_shift(right.dim(), axis, is_weight=False)
            yield Hypothesis(kind, text, {end: _taken(axis, order)}, axis=axis)
    for a in range(right.dim()):
        for b in range(a):
            if right.shape[a] == right.shape[b] > 1:
                text = f"the right values with axes {b} and {a} transposed"
                yield Hypothesis("transposed", text, {end: right.transpose(a, b)})


def scaled(question: Question) -> Iterator[Hypothesis]:
    """Yield: the right values times a number, or plus one."""
    right, actual, end = question.right, question.actual, question.trial.end
    if not actual.is_floating_point() or right.shape != actual.shape or not right.is_floating_point():
        return
    keep = (right.abs() < sentinel(right.dtype)) & (actual.abs() < sentinel(actual.dtype))
    keep = keep if question.valid is None else keep & question.valid
    a, b = right[keep], actual.double()[keep]
    if a.numel() < 4:
        return
    power = float(a.square().sum())
    factor = float((a * b).sum()) / power if power else 1.0
    if abs(factor - 1) > _ONE and factor:  # what makes zeros of all values is no factor that anybody wrote
        sign = abs(factor + 1) < 1e-6
        text = "the right values with the other sign" if sign else f"{factor:.6g} times the right values"
        factor = -1.0 if sign else factor
        yield Hypothesis("scale", text, {end: right * factor}, "factor", (1.0, factor))
    offset = float((b - a).mean())
    text = f"the right values plus {offset:.6g}"
    if abs(offset) > _ONE * float(a.square().mean().sqrt()):
        yield Hypothesis("other", text, {end: right + offset}, "offset", (0.0, offset))


def _taken(axis: int, order: torch.Tensor) -> Edit:
    return lambda call: call.value.index_select(axis, order)


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
        yield Hypothesis(kind, text, {end: changed}, "factor", (1.0, 0.0 if is_zero else factor), axis)


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
        yield Hypothesis("other", text, {end: made}, "clamp", (None, [least, most]))


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
        yield Hypothesis("scale", text, {end: made}, "factor", (1.0, factor))
    elif factor > 1:
        text = f"a dropout is on: {share:.1%} of the elements are zero, the others {factor:.4g} times"
        yield Hypothesis("other", text, {end: made}, "p", (0.0, 1 - 1 / factor))


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
