"""Non-tensor arguments of ops: epsilons, scales, dimensions, strides, flags, words, numbers written in a sum.

First what the candidate's own ops have, then common values; `solved` has any number that fits.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.graphs.between import passes_on
from glassengine.judge.hypotheses.trials.hypothesis import (
    Hypothesis,
    Literal,
    bound,
    is_as_theirs,
    literals_of,
    shown,
    tensors_of,
)
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Call, Edit
from glassengine.numerics.float64 import retarget
from glassengine.ops.traits import named, traits_of
from glassengine.program.representation.naming import op_name

_EPSILONS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-12, 0.0)
BASES = (1e2, 1e3, 1e4, 2e4, 5e4, 1e5, 1.5e5, 2e5, 5e5, 1e6, 5e6, 1e7)
_SLOPES = (0.01, 0.1, 0.2, 0.3)
_WORDS = {"approximate": ("none", "tanh"), "rounding_mode": ("floor", "trunc")}
_SKIPPED = frozenset(
    {"layout", "device", "pin_memory", "memory_format", "dtype", "dropout_p", "train", "training", "momentum"}
)
_OF_SUMS = frozenset({"alpha", "beta"})
"""Factors of the terms of a sum, of which more is asked elsewhere; of an activation they are what it is."""
_MASKS = frozenset({"is_causal", "diagonal"})
_POSITIONS = frozenset({"start", "end", "step", "index", "shifts", "dims"})


def same_op(question: Question) -> Iterator[Hypothesis]:
    """Yield: all arguments as the candidate's op of the same name has them, several at once."""
    for node in question.trial.ops:
        there = _in_its_place(question, node)
        if there is None:
            continue
        ours = {literal.place: literal for literal in literals_of(node)}
        ranks = _rank(next(iter(question.trial.call(node).args), None)), _rank(_read_first(there))
        differing = [
            (ours[literal.place], literal.value)
            for literal in literals_of(there)
            if literal.place in ours and not is_as_theirs(ours[literal.place], literal, ranks) and _is_asked(literal)
        ]
        if not differing:
            continue

        def edit(call: Any, differing: Any = differing) -> Any:
            args, kwargs = bound(call.node.target, call.args, call.kwargs)
            positional = list(args)
            for literal, value in differing:
                if isinstance(literal.place, str):
                    kwargs = {**kwargs, literal.place: value}
                else:
                    positional[literal.place] = value
            return call.target(*positional, **kwargs)

        text = "; ".join(
            f"{_named(question, literal)}: {shown(literal.value)} here, {shown(value)}" for literal, value in differing
        )
        several = f"{op_name(node)}: {text} in the candidate"
        text = _text(question, *differing[0]) if len(differing) == 1 else several
        yield Hypothesis(_kind(question, differing[0][0]), text, {node: edit})


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


def _read_first(node: Node) -> Any:
    return node.args[0].meta.get("val") if node.args and isinstance(node.args[0], Node) else None


def another_op(question: Question) -> Iterator[Hypothesis]:
    """Yield: an op of the candidate, with its own numbers, instead of one of the baseline's."""
    own = {node.target for node in question.trial.ops}
    for theirs in question.theirs:
        if theirs.target in own or passes_on(theirs):
            continue
        leaves, spec = pytree.tree_flatten((theirs.args, dict(theirs.kwargs)))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Node)]
        for node in reversed(question.trial.ops):
            tensors = [source for _, source in tensors_of(question.trial, node)]
            if len(tensors) == len(places) and not passes_on(node):
                kind = "activation" if traits_of(node).kind == "activation" else "other"
                text = f"{op_name(node)} here, {op_name(theirs)} in the candidate"
                yield Hypothesis(kind, text, {node: _called_as(theirs.target, leaves, spec, places)})


def _called_as(target: Any, leaves: list[Any], spec: Any, places: list[int]) -> Edit:
    def edit(call: Call) -> Any:
        given = [leaf for leaf in pytree.tree_leaves((call.args, dict(call.kwargs))) if isinstance(leaf, torch.Tensor)]
        filled = list(leaves)
        for place, tensor in zip(places, given, strict=True):
            filled[place] = tensor
        args, kwargs = pytree.tree_unflatten(filled, spec)
        made = target(*pytree.tree_map(retarget, args), **pytree.tree_map(retarget, kwargs))
        # A largest value comes with its index.
        is_several = isinstance(made, (tuple, list)) and isinstance(call.value, torch.Tensor)
        return made[0] if is_several else made

    return edit


def as_theirs(question: Question) -> Iterator[Hypothesis]:
    """Yield: one argument has a value that the candidate's own ops have somewhere in their counterpart of the piece."""
    pool = [value for value in question.their_values if not _is_whole(value)]
    for literal in literals(question):
        for value in pool:
            value = _fitting(literal, value)
            if value is not None:
                yield becoming(question, literal, value)


def usual(question: Question) -> Iterator[Hypothesis]:
    """Yield: one argument has another value of those that people write, or is left out."""
    for literal in literals(question):
        for value in _usual(question, literal) if not _is_whole(literal.value) else ():
            if not _is_same(value, literal.value):
                yield becoming(question, literal, value)


def whole(question: Question) -> Iterator[Hypothesis]:
    """Yield the same for dimensions, indices and sizes: there are many, and some of them fit by chance."""
    pool = [value for value in question.their_values if _is_whole(value)]
    for literal in literals(question):
        if not _is_whole(literal.value):
            continue
        theirs = (_fitting(literal, value) for value in pool)
        for value in [*(value for value in theirs if value is not None), *_usual(question, literal)]:
            if not _is_same(value, literal.value):
                yield becoming(question, literal, value)


def literals(question: Question) -> Iterator[Literal]:
    """Yield the non-tensor arguments of all ops of the piece, last ops first."""
    for node in reversed(question.trial.ops):
        for literal in literals_of(node):
            if _is_asked(literal):
                # Numbers of an activation have whole ones as defaults, and need not be whole.
                is_real = traits_of(node).kind == "activation" and type(literal.value) is int
                yield dataclasses.replace(literal, value=float(literal.value)) if is_real else literal


def becoming(question: Question, literal: Literal, value: Any) -> Hypothesis:
    """Return the hypothesis that one argument has another value."""
    return Hypothesis(
        _kind(question, literal), _text(question, literal, value), {literal.node: literal.becoming(value)}
    )


def _text(question: Question, literal: Literal, value: Any) -> str:
    op, name = op_name(literal.node), _named(question, literal)
    if named(op).kind == "factor" and value == 1 and literal.value != 1:
        verb = "multiplication" if op == "mul" else "division"
        return f"the {verb} by {shown(literal.value)} is missing"
    if named(op).kind == "term" and value == 0 and literal.value:
        return f"{shown(literal.value)} is not {'added' if op == 'add' else 'subtracted'}"
    if named(op).kind == "term" and isinstance(literal.value, int) and isinstance(value, (int, float)):
        verb = "added" if op == "add" else "subtracted"
        return f"{shown(literal.value)} is {verb} here, {shown(value)} in the candidate"
    if op == "getitem":
        source = literal.node.args[0]
        of = f" of {op_name(source)}" if isinstance(source, Node) and source.op == "call_function" else ""
        return f"item {shown(literal.value)}{of} is taken here, item {shown(value)} in the candidate"
    if op == "clamp" and value is None:
        return f"the clamp has no {name}: {shown(literal.value)} here"
    return f"{op}: {name}: {_shown(literal, literal.value)} here, {_shown(literal, value)} in the candidate"


def _shown(literal: Literal, value: Any) -> str:
    if value is None:
        return "1 / sqrt(head width)" if literal.name == "scale" else "default"
    return shown(value)


def _named(question: Question, literal: Literal) -> str:
    """Return what an argument is to people: the operand of a sum below a root is an epsilon."""
    if _is_epsilon(question, literal):
        return "eps"
    if literal.name in ("other", "value", "1") and traits_of(literal.node).kind == "factor":
        return "factor" if op_name(literal.node) == "mul" else "divisor"
    if op_name(literal.node) == "pow" and literal.name == "self":
        return "base"
    return literal.name


def _kind(question: Question, literal: Literal) -> str:
    if _is_epsilon(question, literal):
        return "eps"
    name, op = literal.name, op_name(literal.node)
    if name == "scale" or (named(op).kind == "factor" and isinstance(literal.value, float)):
        return "scale"
    if name in _MASKS:
        return "mask"
    if name == "approximate" or op in ("leaky_relu", "elu", "hardtanh", "softplus", "celu"):
        return "activation"
    if op in ("permute", "transpose", "view", "reshape"):
        return "transposed"
    if op in ("arange", "roll") or (op == "pow" and name == "self"):
        return "position"
    if op in ("add", "sub") and isinstance(literal.value, int):
        return "position"
    return "other"


def _is_asked(literal: Literal) -> bool:
    if literal.name in _OF_SUMS:
        return traits_of(literal.node).kind == "activation"
    return literal.name not in _SKIPPED


def _is_epsilon(question: Question, literal: Literal) -> bool:
    if literal.name in ("eps", "epsilon"):
        return True
    value = literal.value
    if (
        not isinstance(value, float)
        or not 0 < value <= 1e-2
        or op_name(literal.node) not in ("add", "clamp", "clamp_min")
    ):
        return False
    return literal.name in ("other", "min") and any(traits_of(user).domain for user in question.users(literal.node))


def _fitting(literal: Literal, value: Any) -> Any:
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
    return value if fits and not _is_same(value, own) else None


def _usual(question: Question, literal: Literal) -> Iterator[Any]:
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
    if _is_epsilon(question, literal):
        yield from _EPSILONS
        return
    op = op_name(literal.node)
    if named(op).kind == "factor":
        yield 1.0
        if own > 0:
            yield from (own * own, math.sqrt(own), 1 / own if own else 1.0)
        yield from (-own, 2 * own, own / 2)
    elif named(op).kind == "term":
        yield 0
        yield from (own + 1, own - 1, -own, 2 * own, own / 2)
    elif op == "pow" and literal.name == "self":
        yield from BASES
    elif op == "pow":
        yield from (own + 1, own - 1, -own, own / 2, 2 * own)
    else:
        yield from (*_SLOPES, -own, 1.0, 0.0)


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


def _is_whole(value: Any) -> bool:
    """Whether a literal is a whole number, or a list of such: a dimension, an index, a size."""
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, int) for item in value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return list(a) == list(b)
    if isinstance(a, (int, float)) and isinstance(b, (int, float)) and not isinstance(a, bool):
        return bool(a == b)
    return bool(type(a) is type(b) and a == b)
