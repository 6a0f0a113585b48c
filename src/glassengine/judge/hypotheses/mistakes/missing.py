"""Ops that are missing, and what kind of mistake that is: a condition, a choice, an activation, an order."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from glassengine.judge.hypotheses.mistakes.meanings import BENDING
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, tensors_of
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import giving
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind

_BY_NAME: dict[Kind, frozenset[str]] = {
    "activation": frozenset({"exp", "exp2", "log"}),
    "mask": frozenset({"masked_fill", "tril", "triu"}),
    "permuted": frozenset({"flip", "gather", "index", "index_select", "take_along_dim"}),
    "position": frozenset({"roll"}),
    "scale": frozenset({"neg", "reciprocal"}),
    "stale": frozenset({"index_copy", "index_put", "slice_scatter", "select_scatter"}),
    "transposed": frozenset({"permute", "transpose", "t"}),
}
"""What is not there where the op is left out: of what writes, the new values; of what turns over, a factor."""


def of_missing(node: Node) -> Kind:
    """Return the kind of mistake that it is to leave out an op that makes one tensor of another."""
    name = op_name(node)
    if traits_of(node).kind in BENDING:
        return "activation"
    if name == "pow" and node.args[1:] == (-1,):
        return "scale"
    return next((kind for kind, names in _BY_NAME.items() if name in names), "other")


def conditions(question: Question, node: Node, made: torch.Tensor) -> Iterator[Hypothesis]:
    """Yield: of an op that decides what is hidden, one of two conditions is missing, or it holds everywhere."""
    trial, name = question.trial, op_name(node)
    tensors = [(place, source) for place, source in tensors_of(trial, node)]
    both = len(tensors) == 2 and all(trial.values[source].dtype is torch.bool for _, source in tensors)
    for i, (_, source) in enumerate(tensors if both else ()):
        kept = trial.values[tensors[1 - i][1]]
        if kept.shape != made.shape:
            kept = kept.expand(made.shape)
        text = f"a condition of the mask is missing: {question.label(source)}"
        yield Hypothesis("mask", text, {node: giving(kept)})
    if not both and name in ("le", "lt", "ge", "gt"):
        text = f"a condition of the mask is missing: {question.label(node)}"
        yield Hypothesis("mask", text, {node: giving(torch.ones_like(made))})


def choices(question: Question, node: Node, made: torch.Tensor) -> Iterator[Hypothesis]:
    """Yield: one of the two tensors between which a condition chooses is taken everywhere."""
    trial = question.trial
    condition, *tensors = [source for _, source in tensors_of(trial, node)]
    for source in tensors:
        value = trial.values[source]
        if value.shape == made.shape and value.is_floating_point():
            text = f"{question.label(source)} is taken everywhere: {question.label(condition)} is not asked"
            kind: Kind = "other" if _is_of_values(question, condition) else "mask"
            yield Hypothesis(kind, text, {node: giving(value)}, lost=condition)


def _is_of_values(question: Question, condition: Node) -> bool:
    """Whether a condition compares the values of tensors, as a clamp does: no places are hidden by it."""
    waiting, known = [question.named.get(condition.name, condition)], set[Node]()
    while waiting:
        for source in waiting.pop().all_input_nodes:
            value = source.meta.get("val")
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return True
            if isinstance(value, torch.Tensor) and value.dtype is torch.bool and source not in known:
                known.add(source)
                waiting.append(source)
    return False


def is_of_flags(value: torch.Tensor) -> bool:
    """Whether a tensor holds zeros and ones, and both: what is multiplied by it is hidden in part."""
    if not value.numel() or not value.is_floating_point():
        return False
    is_zero = value == 0
    return bool((is_zero | (value == 1)).all()) and bool(is_zero.any()) and not bool(is_zero.all())
