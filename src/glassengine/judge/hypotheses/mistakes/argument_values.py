"""Values that an argument of an op may have instead: common ones, and those of the candidate that fit in its place."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.hypotheses.mistakes.argument_words import is_epsilon
from glassengine.judge.hypotheses.mistakes.roles import counts_alone
from glassengine.judge.hypotheses.trials.hypothesis import Literal, literals_of
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.ops.traits import named
from glassengine.program.representation.naming import op_name

_EPSILONS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-12, 0.0)
BASES = (1e2, 1e3, 1e4, 2e4, 5e4, 1e5, 1.5e5, 2e5, 5e5, 1e6, 5e6, 1e7)
_SLOPES = (0.01, 0.1, 0.2, 0.3)
_LEAST_PLACES = 3
_WORDS = {"approximate": ("none", "tanh"), "rounding_mode": ("floor", "trunc")}


def fitting(literal: Literal, value: Any) -> Any:
    """Return a value of the candidate as this argument would have it; None where it is no such value, or the same."""
    own = literal.value
    if isinstance(own, bool) or isinstance(value, bool) or value is None:
        fits = isinstance(own, bool) and isinstance(value, bool)
    elif isinstance(own, float) or (own is None and literal.name == "scale"):
        fits = isinstance(value, (int, float))
        value = float(value) if fits else value
    elif isinstance(own, int):
        fits = isinstance(value, int)
    elif isinstance(own, (list, tuple)):
        fits = isinstance(value, (list, tuple)) and len(value) == len(own)
    else:
        fits = isinstance(own, str) and isinstance(value, str)
    return value if fits and not is_same(value, own) else None


def usual_values(question: Question, literal: Literal) -> Iterator[Any]:
    """Yield values that people write in place of the one that an argument has."""
    own, name, op = literal.value, literal.name, op_name(literal.node)
    is_calculated = named(op).kind in ("factor", "term") or op == "pow"
    if isinstance(own, bool):
        yield not own
    elif isinstance(own, str):
        yield from _WORDS.get(name, ())
    elif name == "scale" and "attention" in op:
        yield from _scales(question, literal.node)
    elif isinstance(own, float) or (is_calculated and name in ("other", "self")):
        yield from _numbers(question, literal)
    elif isinstance(own, int):
        yield from _integers(question, literal)
    elif isinstance(own, (list, tuple)):
        yield from _lists(question, literal)
    if op == "clamp" and own is not None:
        yield None


def _numbers(question: Question, literal: Literal) -> Iterator[Any]:
    own = literal.value
    if own is None:
        return
    if is_epsilon(question, literal):
        yield from _EPSILONS
        return
    op = op_name(literal.node)
    if named(op).kind == "factor":
        yield 1.0
        if own > 0:
            yield from (own * own, math.sqrt(own), 1 / own if own else 1.0)
        yield from (-own, 2 * own, own / 2)
        yield from _by_one(question, literal)
    elif named(op).kind == "term":
        yield 0
        yield from (own + 1, own - 1, -own, 2 * own, own / 2)
    elif op == "pow" and literal.name == "self":
        yield from BASES
    elif op == "pow":
        yield from (own + 1, own - 1, -own, own / 2, 2 * own)
    else:
        yield from (*_SLOPES, -own, 1.0, 0.0)


def _by_one(question: Question, literal: Literal) -> Iterator[float]:
    """Yield a step between places as it is where one place more, or one less, is counted: 1 / n for 1 / (n - 1)."""
    node = question.named.get(literal.node.name, literal.node)
    size = getattr(question.trial.values[literal.node], "shape", (0,))[-1:]
    if not size or size[0] < _LEAST_PLACES or not counts_alone(node, question.stored):
        return
    for there in (size[0] - 1, size[0] + 1):
        yield from (literal.value * there / size[0], literal.value * size[0] / there)


def _scales(question: Question, node: Node) -> Iterator[float]:
    query = question.trial.values[node.args[0]]  # type: ignore[index]
    width, heads = query.shape[-1], query.shape[-3] if query.dim() > 2 else 1
    own = next((item.value for item in literals_of(node) if item.name == "scale"), None)
    if own is None:
        own = width**-0.5
    yield from (width**-0.5, 1.0, own * own, math.sqrt(own), 1 / width, math.sqrt(width), 1 / own)
    yield from ((width * heads) ** -0.5, own * 2, own / 2)


def _integers(question: Question, literal: Literal) -> Iterator[int]:
    own, name = literal.value, literal.name
    if name.startswith("dim"):
        first = _first_tensor(question, literal.node)
        rank = first.dim() if first is not None else 0
        yield from (axis for axis in range(rank) if rank and axis != own % rank)
        return
    if name == "groups" or name == "num_groups":
        yield from (n for n in (1, 2, 4, 8, 16, 32, own * 2, own // 2) if n > 0)
        return
    if name == "correction":
        yield from (0, 1)
        return
    yield from (own - 1, own + 1, own - 2, own + 2)


def _lists(question: Question, literal: Literal) -> Iterator[list[Any]]:
    own = list(literal.value)
    if literal.name == "dims" and sorted(own) == list(range(len(own))) and len(own) <= 5:
        yield from (list(order) for order in itertools.permutations(own))
    elif literal.name.startswith("dim"):
        first = _first_tensor(question, literal.node)
        if first is not None:
            yield from (list(dims) for dims in itertools.combinations(range(first.dim()), len(own)))
    elif literal.name == "pad":
        yield [item for pair in zip(own[1::2], own[::2], strict=False) for item in pair]
    elif literal.name in ("stride", "padding", "dilation", "kernel_size", "output_padding"):
        for step in (-1, 1):
            yield [max(0, item + step) for item in own]
        yield own[::-1]


def _first_tensor(question: Question, node: Node) -> torch.Tensor | None:
    sources = [question.trial.values.get(source) for source in node.all_input_nodes]
    return next((value for value in sources if isinstance(value, torch.Tensor)), None)


def is_whole(value: Any) -> bool:
    """Whether a literal is a whole number, or a list of such: a dimension, an index, a size."""
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, int) for item in value)
    return isinstance(value, int) and not isinstance(value, bool)


def is_same(a: Any, b: Any) -> bool:
    """Whether two literals are equal, and a flag is no number."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return list(a) == list(b)
    if isinstance(a, (int, float)) and isinstance(b, (int, float)) and not isinstance(a, bool):
        return bool(a == b)
    return bool(type(a) is type(b) and a == b)
