"""Norms and variances that are another one: no mean, n - 1, eps in another place, statistics that are not used."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.graphs.by_name import argument_names
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, bound, literals_of, tensors_of, with_leaves
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Call
from glassengine.program.representation.naming import op_name

_LARGEST_EPS = 1e-2


def other_norms(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield (words, edit) for what a norm may compute instead."""
    is_centered = op_name(node) == "layer_norm"

    def normed(*, center: bool, over: str = "n", eps_outside: bool = False) -> Any:
        def edit(call: Call) -> Any:
            args, _ = bound(node.target, call.args, call.kwargs)
            x, shape, weight = args[:3]
            bias, eps = (args[3], args[4]) if is_centered else (None, args[3] or 1e-6)
            axes = tuple(range(-len(shape), 0))
            x = x - x.mean(axes, keepdim=True) if center else x
            terms = math.prod(shape) - (1 if over == "n - 1" else 0)
            spread = x.square().sum(axes, keepdim=True) / terms
            made = x / (spread.sqrt() + eps if eps_outside else (spread + eps).sqrt())
            made = made if weight is None else made * weight
            return made if bias is None else made + bias

        return edit

    if is_centered:
        yield "the mean is not subtracted: rms_norm instead of layer_norm", normed(center=False)
    else:
        yield "the mean is subtracted: layer_norm instead of rms_norm", normed(center=True)
    yield "the variance is unbiased: of n - 1", normed(center=is_centered, over="n - 1")
    yield "eps is added to the root, not below it", normed(center=is_centered, eps_outside=True)


def over_other_axes(question: Question, node: Node) -> Iterator[Hypothesis]:
    """Yield: the mean of a norm, its spread or both are taken over another axis."""
    args, _ = bound(node.target, node.args, dict(node.kwargs))
    given = question.trial.values.get(args[0]) if isinstance(args[0], Node) else None
    if not isinstance(given, torch.Tensor) or len(args[1]) != 1:
        return
    is_centered = op_name(node) == "layer_norm"
    for axis in range(given.dim() - 1):
        if given.shape[axis] < 2:
            continue
        for means, spreads, what in ((axis, -1, "the mean"), (-1, axis, "the spread"), (axis, axis, "all")):
            if means != -1 and not is_centered:
                continue
            text = f"{op_name(node)}: {what} is over axis {axis} of {given.dim()}, not over the last one"
            yield Hypothesis("transposed", text, {node: _over(means, spreads, is_centered)}, axis=axis)


def _over(means: int, spreads: int, is_centered: bool) -> Any:
    def edit(call: Call) -> Any:
        args, _ = bound(call.node.target, call.args, call.kwargs)
        x, _, weight = args[:3]
        bias, eps = (args[3], args[4]) if is_centered else (None, args[3] or 1e-6)
        x = x - x.mean(means, keepdim=True) if is_centered else x
        made = x / (x.square().mean(spreads, keepdim=True) + eps).sqrt()
        made = made if weight is None else made * weight
        return made if bias is None else made + bias

    return edit


def eps_outside(question: Question, node: Node) -> Iterator[Hypothesis]:
    """An epsilon that is added to a root instead of below it, where a norm is written out."""
    source = node.args[0]
    if not isinstance(source, Node) or op_name(source) != "add" or source not in question.trial.values:
        return
    for literal in literals_of(source):
        if literal.name == "other" and isinstance(literal.value, float) and 0 < literal.value <= _LARGEST_EPS:
            eps, is_turned = literal.value, op_name(node) == "rsqrt"

            def edit(call: Call, eps: float = eps, is_turned: bool = is_turned) -> Any:
                root = (call.args[0] - eps).clamp(min=0).sqrt() + eps
                return 1 / root if is_turned else root

            yield Hypothesis("eps", "eps is added to the root, not below it", {node: edit}, "eps")


def batch_norms(question: Question, node: Node) -> Iterator[Hypothesis]:
    """Statistics of a batch norm that are left out, exchanged, or not what they are taken for."""
    names = argument_names(node.target)
    places = {names[place]: place for place, _ in tensors_of(question.trial, node) if place < len(names)}
    mean, variance = places.get("running_mean"), places.get("running_var")
    if mean is None or variance is None:
        return
    leaves = dict(tensors_of(question.trial, node))
    own = [question.trial.values[leaves[place]] for place in (mean, variance)]
    eps = next((float(item.value) for item in literals_of(node) if item.name == "eps"), 0.0)
    made: dict[str, dict[int, Any]] = {
        "the running mean is not subtracted": {mean: torch.zeros_like(own[0])},
        "it is not divided by the running variance": {variance: torch.ones_like(own[1])},
        "it is divided by the running variance, not by its root": {variance: (own[1] + eps).square() - eps},
        "the running variance is not used, and the mean neither": {
            mean: torch.zeros_like(own[0]),
            variance: torch.ones_like(own[1]),
        },
    }
    for text, changed in made.items():
        yield Hypothesis("other", text, {node: _with(changed)})
    given = question.trial.values.get(node.args[0]) if isinstance(node.args[0], Node) else None
    if isinstance(given, torch.Tensor) and given.dim() > 1:
        axes = [axis for axis in range(given.dim()) if axis != 1]
        changed = {mean: given.mean(axes), variance: given.var(axes, correction=0)}
        text = "statistics of the batch, not those that were learned: a batch norm in training mode"
        yield Hypothesis("other", text, {node: _with(changed)})


def _with(changed: dict[int, Any]) -> Any:
    return lambda call: with_leaves(call, changed)


def variances(question: Question) -> Iterator[Hypothesis]:
    """Yield: n - 1 instead of n, in a variance that is one op or a mean of squares."""
    trial = question.trial
    for node in reversed(trial.ops):
        name = op_name(node)
        tensors = tensors_of(trial, node)
        if not tensors or name not in ("var", "std", "mean", "var_mean"):
            continue
        given, made = trial.values[tensors[0][1]], trial.values[node]
        if not isinstance(made, torch.Tensor) or not made.numel():
            continue
        terms = given.numel() / made.numel()
        if terms <= 1:
            continue
        if name == "mean":
            text = "the mean is of n - 1: the variance is unbiased"
            yield Hypothesis("other", text, {node: _times(terms / (terms - 1))})
        else:
            power = 0.5 if name == "std" else 1.0
            for factor, text in (
                ((terms - 1) / terms, f"{name} is biased in the candidate: it divides by n"),
                (terms / (terms - 1), f"{name} is unbiased in the candidate: it divides by n - 1"),
            ):
                yield Hypothesis("other", text, {node: _times(factor**power)})


def _times(factor: float) -> Any:
    return lambda call: call.value * factor
