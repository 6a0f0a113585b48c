"""The candidate's own expression in place of the baseline's: the smallest part in which their regions differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.judge.graphs.between import origin_of, passes_on
from glassengine.judge.hypotheses.mistakes.argument_words import kind_of_op
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, called, shown
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Trial
from glassengine.program.representation.naming import op_name

_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**", "matmul": "@", "mm": "@", "bmm": "@"}
_SIGNS |= {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "bitwise_and": "&", "bitwise_or": "|"}
_LONGEST = 60
"""Characters of an expression; a longer one is a list of ops."""
_ROUNDINGS = 8.0


def expressions(question: Question) -> Iterator[Hypothesis]:
    """Yield: what an op of the baseline makes is what another expression of the candidate makes."""
    trial, there = question.trial, question.there
    if there is None:
        return
    ours, theirs = (_made(one) for one in (trial, there.trial))
    ends = origin_of(trial.end), origin_of(there.trial.end)
    for node, value in ours.items():
        if any(_is_same(value, other, question.noise) for other in theirs.values()):
            continue
        for other, found in theirs.items():
            if (
                (node, other) == ends
                or found.shape != value.shape
                or found.dtype.is_floating_point != value.dtype.is_floating_point
            ):
                continue
            if not any(_is_same(found, one, question.noise) for one in ours.values()):
                text = (
                    f"{written(node, question.labels)} in the baseline, {written(other, there.labels)} in the candidate"
                )
                yield Hypothesis(kind_of_op(node, other), text, {node: found})


def _made(trial: Trial) -> dict[Node, Tensor]:
    """Return what the ops that compute make, in order."""
    return {op: value for op in trial.ops if not passes_on(op) and isinstance(value := trial.values[op], Tensor)}


def _is_same(one: Tensor, other: Tensor, noise: float) -> bool:
    if one.shape != other.shape or not (one.is_floating_point() and other.is_floating_point()):
        return one.shape == other.shape and torch.equal(one, other)
    return float((one - other).norm()) <= _ROUNDINGS * noise * float(one.norm())


def written(node: Node, labels: Mapping[str, str]) -> str:
    """Return an expression as people write it, down to tensors of which `labels` has the names."""
    text = _written(node, labels)
    return text if len(text) <= _LONGEST else ", ".join(called(op_name(one)) for one in _ops(node))


def _ops(node: Node) -> list[Node]:
    found = {one: None for source in node.all_input_nodes if source.op == "call_function" for one in _ops(source)}
    return [*found, *([] if passes_on(node) else [node])]


def _written(item: Any, labels: Mapping[str, str], *, is_operand: bool = False) -> str:
    if not isinstance(item, Node):
        return (
            f"[{', '.join(_written(one, labels) for one in item)}]" if isinstance(item, (list, tuple)) else shown(item)
        )
    if item.op != "call_function":
        return labels.get(item.name, item.name)
    if passes_on(item) and item.args:
        return _written(item.args[0], labels, is_operand=is_operand)
    name = op_name(item)
    sign, args = _SIGNS.get("sub" if name == "rsub" else name), item.args[:2]
    if sign is None or len(args) < 2:
        given = [_written(arg, labels) for arg in item.args if arg is not None]
        return f"{called(name)}({', '.join(given)})"
    one, other = (_written(arg, labels, is_operand=True) for arg in (args[::-1] if name == "rsub" else args))
    return f"({one} {sign} {other})" if is_operand else f"{one} {sign} {other}"
