"""What the candidate made as a whole: the right result times something, in another order, or another tensor."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from glassengine.judge.hypotheses.mistakes.seen import PLACING, comes_from
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Edit, giving
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
                yield Hypothesis(_kind_of_all(question, name), f"nothing is done: it is {name}", {end: giving(value)})
            else:
                yield Hypothesis("stale", f"it is {name}", {end: giving(double(value))})


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
                yield Hypothesis(_kind_of_all(question, label), text, {trial.end: giving(made)})


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
                yield Hypothesis("transposed", text, {end: giving(right.transpose(a, b))})


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
        yield Hypothesis("scale", text, {end: giving(right * factor)}, "factor", (1.0, factor))
    offset = float((b - a).mean())
    text = f"the right values plus {offset:.6g}"
    if abs(offset) > _ONE * float(a.square().mean().sqrt()):
        yield Hypothesis("other", text, {end: giving(right + offset)}, "offset", (0.0, offset))


def _taken(axis: int, order: torch.Tensor) -> Edit:
    return lambda call: call.value.index_select(axis, order)


def in_its_own_dtype(question: Question) -> Iterator[Hypothesis]:
    """Yield: what the baseline computes in a finer dtype is computed in the candidate's own."""
    if question.native is not None:
        text = "computed in the dtype of the model: the baseline casts to a finer one first"
        yield Hypothesis("dtype", text, {question.trial.end: giving(question.native)})
