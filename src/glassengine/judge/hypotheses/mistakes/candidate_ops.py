"""Ops of the candidate: instead of an op of the baseline, or done to a tensor as well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.hypotheses.mistakes.argument_words import kind_of_op
from glassengine.judge.hypotheses.mistakes.tensor_roles import BENDING
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, called, constants_of, shown, tensors_of
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import TrialCall
from glassengine.judge.site_pairs import passes_on
from glassengine.numerics.float64 import is_real, retarget
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind


def extra_op(question: Question) -> Iterator[Hypothesis]:
    """Yield: an op that reads one tensor, and that only the candidate has, is done to a tensor as well."""
    trial = question.trial
    own = {node.target for node in trial.ops}
    for theirs in question.theirs:
        # A number that is multiplied or added is one of scale, which other families have; none of them has 0.
        is_number = traits_of(theirs).kind in ("factor", "term") and 0 not in constants_of([theirs])
        if theirs.target in own or is_number or passes_on(theirs) or len(theirs.all_input_nodes) != 1:
            continue
        kind: Kind = "activation" if traits_of(theirs).kind in BENDING else "other"
        done, number = _called_with(theirs)

        def edit(call: TrialCall, done: Callable[..., Any] = done, number: int = number) -> Any:
            return done([call.value] * number)

        for node in reversed([*trial.inputs, *trial.ops]):
            value = trial.values[node]
            is_of_numbers = is_real(value) or (isinstance(value, Tensor) and value.is_complex())
            if is_of_numbers and node.name not in question.weights:
                label = question.label(node)
                text = f"{called(op_name(theirs))} of {label} in the candidate, none in the baseline"
                text = f"{label} is multiplied by 0" if traits_of(theirs).kind == "factor" else text
                yield Hypothesis(kind, text, {node: edit}, values=(None, called(op_name(theirs))))


def moved_op(question: Question) -> Iterator[Hypothesis]:
    """Yield: an op that reads one tensor is done to another one instead: before a norm, not after it."""
    trial = question.trial
    for node in trial.ops:
        (source, *others), call = node.all_input_nodes or [None], trial.call(node)
        if source is None or others or passes_on(node) or not all(map(is_real, (call.value, trial.values[source]))):
            continue
        if call.value.shape != trial.values[source].shape or traits_of(node).kind in ("factor", "term"):
            continue

        def edit(there: TrialCall, own: TrialCall = call) -> Any:
            return own.rerun(there.value, *own.args[1:], **own.kwargs)

        kind: Kind = "activation" if traits_of(node).kind in BENDING else "other"
        for other in [*trial.ops, *trial.inputs]:
            if other not in (node, source) and is_real(trial.values[other]) and other.name not in question.weights:
                text = f"{called(op_name(node))} is done to {question.label(other)}, not to {question.label(source)}"
                yield Hypothesis(kind, text, {node: lambda passed: passed.args[0], other: edit})


def another_op(question: Question) -> Iterator[Hypothesis]:
    """Yield: an op of the candidate, with its own numbers, instead of one of the baseline's."""
    own, there = (Counter(node.target for node in nodes) for nodes in (question.trial.ops, question.theirs))
    for theirs in question.theirs:
        if theirs.target in own or passes_on(theirs):
            continue
        done, number = _called_with(theirs)

        def edit(call: TrialCall, done: Callable[..., Any] = done) -> Any:
            leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
            return in_place_of(call, done([leaf for leaf in leaves if isinstance(leaf, Tensor)]))

        for node in reversed(question.trial.ops):
            if there[node.target] >= own[node.target]:
                continue  # the candidate has it, too
            # Two products of the same tensors are one that is transposed, which is said of the tensor.
            are_products = traits_of(node).reads_memory and traits_of(theirs).reads_memory
            if len(tensors_of(question.trial, node)) == number and not passes_on(node) and not are_products:
                text = f"{_named(node, theirs)} in the candidate"
                yield Hypothesis(kind_of_op(node, theirs), text, {node: edit})


def _named(node: Node, theirs: Node) -> str:
    """Return the names of both ops, with their own numbers where the name is the same: arange 0 to 9, or 1 to 10."""
    here, there = op_name(node), op_name(theirs)
    if here != there:
        return f"{here} in the baseline, {there}"
    own = [", ".join(map(shown, constants_of([op]))) for op in (node, theirs)]
    return f"{here}({own[0]}) in the baseline, {there}({own[1]})"


def _called_with(theirs: Node) -> tuple[Callable[[Sequence[Any]], Any], int]:
    """Return what calls an op of the candidate, with its own numbers, on other tensors, and how many these are."""
    leaves, spec = pytree.tree_flatten((theirs.args, dict(theirs.kwargs)))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Node)]
    target: Any = theirs.target

    def done(tensors: Sequence[Any]) -> Any:
        filled = [*leaves]
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        args, kwargs = pytree.tree_map(retarget, pytree.tree_unflatten(filled, spec))
        return target(*args, **kwargs)

    return done, len(places)


def in_place_of(call: TrialCall, made: Any) -> Any:
    """Return what stands for the result of a call: a largest value comes with its place, which is left as it is."""
    if isinstance(made, (tuple, list)) == isinstance(call.value, (tuple, list)):
        return made
    return made[0] if isinstance(made, (tuple, list)) else (made, *call.value[1:])
