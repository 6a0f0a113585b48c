"""Ops of the candidate: instead of an op of the baseline, instead of several, or done to a tensor as well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.graphs.between import passes_on
from glassengine.judge.hypotheses.mistakes.argument_words import kind_of_op
from glassengine.judge.hypotheses.mistakes.tensor_roles import BENDING
from glassengine.judge.hypotheses.trials.hypothesis import (
    Hypothesis,
    constants_of,
    shown,
    tensors_of,
)
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Call, Edit, edited
from glassengine.numerics.float64 import retarget
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind


def extra_op(question: Question) -> Iterator[Hypothesis]:
    """Yield: an op that reads one tensor, and that only the candidate has, is done to a tensor as well."""
    trial = question.trial
    own = {node.target for node in trial.ops}
    for theirs in question.theirs:
        # A number that is multiplied or added is one of scale, or of what is lost, which are asked elsewhere.
        is_number = traits_of(theirs).kind in ("factor", "term")
        if theirs.target in own or is_number or passes_on(theirs) or len(theirs.all_input_nodes) != 1:
            continue
        kind: Kind = "activation" if traits_of(theirs).kind in BENDING else "other"
        for node in reversed([*trial.inputs, *trial.ops]):
            value = trial.values[node]
            is_given = node.op == "placeholder" and node.name in question.weights
            if isinstance(value, torch.Tensor) and value.is_floating_point() and not is_given:
                text = f"{op_name(theirs)} of {question.label(node)} in the candidate, none here"
                yield Hypothesis(kind, text, {node: _done(theirs)})


def _done(theirs: Node) -> Edit:
    leaves, spec = pytree.tree_flatten((theirs.args, dict(theirs.kwargs)))

    target: Any = theirs.target

    def edit(call: Call) -> Any:
        args, kwargs = pytree.tree_unflatten([call.value if isinstance(one, Node) else one for one in leaves], spec)
        return target(*pytree.tree_map(retarget, args), **pytree.tree_map(retarget, kwargs))

    return edit


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
                return edited(Call(call.node, call.target, (value,), {}, call.value), calls)

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
