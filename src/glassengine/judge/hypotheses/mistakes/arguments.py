"""Non-tensor arguments of ops: epsilons, scales, dimensions, strides, flags, words, numbers written in a sum.

First what the candidate's own ops have, then common values; `fitted_constants` has any number that fits.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.hypotheses.mistakes.argument_words import is_epsilon, kind_of, name_of, text_of
from glassengine.judge.hypotheses.mistakes.tensor_roles import counts_alone, makes_sines
from glassengine.judge.hypotheses.trials.hypothesis import (
    Hypothesis,
    Literal,
    becoming,
    is_as_theirs,
    literals_of,
)
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.ops.traits import named, traits_of
from glassengine.program.representation.naming import op_name

_SKIPPED = frozenset(
    {"layout", "device", "pin_memory", "memory_format", "dtype", "dropout_p", "train", "training", "momentum"}
)
_OF_SUMS = frozenset({"alpha", "beta"})
"""Factors of the terms of a sum, of which more is asked elsewhere; of an activation they are what it is."""
_EPSILONS = (0.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-12)
BASES = (1e2, 1e3, 1e4, 2e4, 5e4, 1e5, 1.5e5, 2e5, 5e5, 1e6, 5e6, 1e7)
_SLOPES = (0.01, 0.1, 0.2, 0.3)
_LEAST_PLACES = 3
_WORDS = {"approximate": ("none", "tanh"), "rounding_mode": ("floor", "trunc")}


def same_op(question: Question) -> Iterator[Hypothesis]:
    """Yield: all arguments as the candidate's op of the same name has them, several at once."""
    for node, differing in _differing(question):
        first, value = differing[0]
        text = _text_of_all(question, differing)
        kind = kind_of(question, first, value)
        if len(differing) > 1:  # no line is corrected by one of them
            yield Hypothesis(kind, text, {node: becoming(differing)})
        else:
            yield Hypothesis(kind, text, {node: becoming(differing)}, name_of(question, first), (first.value, value))


def same_ops(question: Question) -> Iterator[Hypothesis]:
    """Yield: the arguments of several ops as the candidate has them: a padding that goes with a dilation."""
    several = dict(_differing(question))
    if len(several) > 1:
        everything = [one for differing in several.values() for one in differing]
        edits = {node: becoming(differing) for node, differing in several.items()}
        yield Hypothesis(kind_of(question, *everything[-1]), _text_of_all(question, everything), edits)


def _text_of_all(question: Question, differing: Sequence[tuple[Literal, Any]]) -> str:
    return "; ".join(text_of(question, one, other) for one, other in differing)


def _differing(question: Question) -> Iterator[tuple[Node, list[tuple[Literal, Any]]]]:
    """Yield the ops whose arguments are others in the candidate's op of the same name, with these and their values."""
    for node in question.trial.ops:
        there = _in_its_place(question, node)
        if there is None:
            continue
        ours = {literal.place: literal for literal in literals_of(node)}
        read = there.args[0].meta.get("val") if there.args and isinstance(there.args[0], Node) else None
        ranks = _rank(next(iter(question.trial.call(node).args), None)), _rank(read)
        differing = [
            (ours[literal.place], literal.value)
            for literal in literals_of(there)
            if literal.place in ours and not is_as_theirs(ours[literal.place], literal, ranks) and _is_asked(literal)
        ]
        if differing:
            yield node, _that_count(question, node, differing)


def _that_count(question: Question, node: Node, differing: list[tuple[Literal, Any]]) -> list[tuple[Literal, Any]]:
    """Return the arguments that change the result beside the others: a pad by zero is one without a value."""

    def made(but: object = None) -> torch.Tensor | None:
        return question.trial.changed({node: becoming([one for one in differing if one is not but])})

    of_all = made() if len(differing) > 1 else None
    if of_all is None:
        return differing
    return [one for one in differing if (rest := made(one)) is None or not torch.equal(rest, of_all)] or differing


def _in_its_place(question: Question, node: Node) -> Node | None:
    """Return the candidate's op of the same name: the only one, the last of both, or of as many that in its place."""
    there = [theirs for theirs in question.theirs if theirs.target == node.target]
    here = [op for op in question.trial.ops if op.target == node.target]
    if len(there) == len(here):
        return there[here.index(node)]
    is_last = bool(there) and node is question.trial.end and there[-1] is question.theirs[-1]
    return there[-1] if len(there) == 1 or is_last else None


def _rank(value: Any) -> int | None:
    return value.dim() if isinstance(value, torch.Tensor) else None


def as_theirs(question: Question) -> Iterator[Hypothesis]:
    """Yield: one argument has a value that the candidate's own ops have somewhere in their counterpart of the piece."""
    pool = [value for value in question.their_values if not is_whole(value)]
    for literal in literals(question):
        for value in pool:
            value = fitting(literal, value)
            if value is not None:
                yield with_value(question, literal, value)


def usual(question: Question) -> Iterator[Hypothesis]:
    """Yield: one argument has another value of those that people write, or is left out."""
    for literal in literals(question):
        for value in usual_values(question, literal) if not is_whole(literal.value) else ():
            if not is_same(value, literal.value):
                yield with_value(question, literal, value)


def whole(question: Question) -> Iterator[Hypothesis]:
    """Yield the same for dimensions, indices and sizes: there are many, and some of them fit by chance."""
    pool = [value for value in question.their_values if is_whole(value)]
    for literal in literals(question):
        theirs = _axes_there(question, literal) if literal.name.startswith("dim") else pool
        theirs = [fitting(literal, value) for value in theirs if is_whole(literal.value)]
        usual = usual_values(question, literal) if is_whole(literal.value) else ()
        for value in [*(value for value in theirs if value is not None), *usual]:
            if not is_same(value, literal.value):
                yield with_value(question, literal, value)


def _axes_there(question: Question, literal: Literal) -> list[Any]:
    """Return the axes that the candidate's ops of this name have, and those that make what these ops read."""
    near = dict.fromkeys(one for op in question.theirs for one in (op, *op.all_input_nodes))
    alike = (op for op in near if op.target == literal.node.target)
    return [one.value for op in alike for one in literals_of(op) if one.place == literal.place]


def literals(question: Question) -> Iterator[Literal]:
    """Yield the non-tensor arguments of all ops of the piece, last ops first.

    Numbers and flags that the candidate's op has as well are left out. Axes stay: other axes before the op come to the
    same.
    """
    for node in reversed(question.trial.ops):
        there = _in_its_place(question, node)
        theirs = {} if there is None else {literal.place: literal.value for literal in literals_of(there)}
        calculates = traits_of(node).kind in ("factor", "term")
        for literal in literals_of(node):
            is_number = isinstance(literal.value, (float, bool)) or (calculates and isinstance(literal.value, int))
            is_theirs = is_number and is_same(theirs.get(literal.place), literal.value)
            if _is_asked(literal) and not is_theirs:
                # Numbers of an activation have whole ones as defaults, and need not be whole.
                is_real = traits_of(node).kind == "activation" and type(literal.value) is int
                yield dataclasses.replace(literal, value=float(literal.value)) if is_real else literal


def with_value(question: Question, literal: Literal, value: Any) -> Hypothesis:
    """Return the hypothesis that one argument has another value."""
    name, kind = name_of(question, literal), kind_of(question, literal, value)
    is_negated = isinstance(value, float) and isinstance(literal.value, (int, float)) and value == -literal.value
    if kind == "scale" and is_negated and makes_sines(question, literal.node):
        kind = "position"
    edits = {literal.node: becoming([(literal, value)])}
    return Hypothesis(kind, text_of(question, literal, value), edits, name, (literal.value, value))


def _is_asked(literal: Literal) -> bool:
    if literal.name in _OF_SUMS:
        return traits_of(literal.node).kind == "activation"
    return literal.name not in _SKIPPED


def fitting(literal: Literal, value: Any) -> Any:
    """Return a value of the candidate as this argument would have it; None where it is no such value, or the same."""
    own = literal.value
    if isinstance(own, bool) or isinstance(value, bool) or value is None:
        fits = isinstance(own, bool) and isinstance(value, bool)
    elif isinstance(own, float) or (own is None and literal.name == "scale"):
        fits = isinstance(value, (int, float))
        value = float(value) if fits else value
    elif isinstance(own, (list, tuple)):
        fits = isinstance(value, (list, tuple)) and len(value) == len(own)
    else:
        fits = isinstance(own, (int, str)) and isinstance(value, int if isinstance(own, int) else str)
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
    node = question.in_baseline(literal.node)
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
        yield from (axis for axis in range(rank) if axis != own % rank)
    elif name in ("groups", "num_groups"):
        yield from (n for n in (1, 2, 4, 8, 16, 32, own * 2, own // 2) if n > 0)
    else:
        yield from (0, 1) if name == "correction" else (own - 1, own + 1, own - 2, own + 2)


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
