"""Non-tensor arguments of ops: epsilons, scales, dimensions, strides, flags, words, numbers written in a sum.

First what the candidate's own ops have, then common values; `solved` has any number that fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.graphs.between import passes_on
from glassengine.judge.hypotheses.mistakes.argument_values import fitting, is_same, is_whole, usual_values
from glassengine.judge.hypotheses.mistakes.argument_words import kind_of, kind_of_op, name_of, text_of
from glassengine.judge.hypotheses.mistakes.meanings import makes_sines
from glassengine.judge.hypotheses.trials.hypothesis import (
    Hypothesis,
    Literal,
    bound,
    constants_of,
    is_as_theirs,
    literals_of,
    shown,
    tensors_of,
)
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Call, Edit
from glassengine.numerics.float64 import retarget
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name

_SKIPPED = frozenset(
    {"layout", "device", "pin_memory", "memory_format", "dtype", "dropout_p", "train", "training", "momentum"}
)
_OF_SUMS = frozenset({"alpha", "beta"})
"""Factors of the terms of a sum, of which more is asked elsewhere; of an activation they are what it is."""


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
            f"{name_of(question, literal)}: {shown(literal.value)} here, {shown(value)}" for literal, value in differing
        )
        several = f"{op_name(node)}: {text} in the candidate"
        text = text_of(question, *differing[0]) if len(differing) == 1 else several
        first, value = differing[0]
        kind = kind_of(question, first, value)
        yield Hypothesis(kind, text, {node: edit}, name_of(question, first), (first.value, value))


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
            # Two products of the same tensors are one that is transposed, which is said of the tensor.
            are_products = traits_of(node).reads_memory and traits_of(theirs).reads_memory
            if len(tensors) == len(places) and not passes_on(node) and not are_products:
                edits = {node: _called_as(theirs.target, leaves, spec, places)}
                yield Hypothesis(kind_of_op(node, theirs), f"{_called(node, theirs)} in the candidate", edits)


def one_for_several(question: Question) -> Iterator[Hypothesis]:
    """Yield: one op of the candidate stands for several at the end of the piece: a softmax for an activation, say."""
    trial, end = question.trial, question.trial.end
    given = {source for _, source in tensors_of(trial, end)}
    replaced = [node for node in trial.ops if not passes_on(node)]
    for theirs in question.theirs:
        leaves, spec = pytree.tree_flatten((theirs.args, dict(theirs.kwargs)))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Node)]
        if len(places) != 1 or passes_on(theirs) or theirs.target is end.target:
            continue
        for source in [*trial.inputs, *trial.ops[:-1]]:
            value = trial.values[source]
            if source in given or not isinstance(value, torch.Tensor) or value.shape != question.right.shape:
                continue
            first = next((node for node in replaced if source in node.all_input_nodes), end)
            calls = _called_as(theirs.target, leaves, spec, places)

            def edit(call: Call, value: torch.Tensor = value, calls: Edit = calls) -> Any:
                return calls(Call(call.node, call.target, (value,), {}, call.value))

            text = f"{op_name(first)} and what follows here, {op_name(theirs)} in the candidate"
            yield Hypothesis(kind_of_op(first, theirs), text, {end: edit})


def _called(node: Node, theirs: Node) -> str:
    """Return the names of both ops, with their own numbers where the name is the same: arange 0 to 9, or 1 to 10."""
    here, there = op_name(node), op_name(theirs)
    if here != there:
        return f"{here} here, {there}"
    own = [", ".join(map(shown, constants_of([op]))) for op in (node, theirs)]
    return f"{here}({own[0]}) here, {there}({own[1]})"


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
    pool = [value for value in question.their_values if not is_whole(value)]
    for literal in literals(question):
        for value in pool:
            value = fitting(literal, value)
            if value is not None:
                yield becoming(question, literal, value)


def usual(question: Question) -> Iterator[Hypothesis]:
    """Yield: one argument has another value of those that people write, or is left out."""
    for literal in literals(question):
        for value in usual_values(question, literal) if not is_whole(literal.value) else ():
            if not is_same(value, literal.value):
                yield becoming(question, literal, value)


def whole(question: Question) -> Iterator[Hypothesis]:
    """Yield the same for dimensions, indices and sizes: there are many, and some of them fit by chance."""
    pool = [value for value in question.their_values if is_whole(value)]
    for literal in literals(question):
        if not is_whole(literal.value):
            continue
        theirs = (fitting(literal, value) for value in pool)
        for value in [*(value for value in theirs if value is not None), *usual_values(question, literal)]:
            if not is_same(value, literal.value):
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
    name = name_of(question, literal)
    edits = {literal.node: literal.becoming(value)}
    kind = kind_of(question, literal, value)
    numbers = isinstance(value, float) and isinstance(literal.value, (int, float))
    if kind == "scale" and numbers and value == -literal.value and makes_sines(question, literal.node):
        kind = "position"
    return Hypothesis(kind, text_of(question, literal, value), edits, name, (literal.value, value))


def _is_asked(literal: Literal) -> bool:
    if literal.name in _OF_SUMS:
        return traits_of(literal.node).kind == "activation"
    return literal.name not in _SKIPPED
