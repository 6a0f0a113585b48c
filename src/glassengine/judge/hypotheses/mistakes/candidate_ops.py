"""The candidate's own ops and expressions: in place of the baseline's, or done to a tensor as well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.hypotheses.mistakes.argument_words import kind_of_op
from glassengine.judge.hypotheses.mistakes.global_transforms import missing_ops
from glassengine.judge.hypotheses.mistakes.tensor_roles import BENDING
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, called, constants_of, shown, tensors_of
from glassengine.judge.hypotheses.trials.question import Question, TheirRegion
from glassengine.judge.hypotheses.trials.trial import TrialCall
from glassengine.judge.site_pairs import operands_of, origin_of, passes_on, up
from glassengine.numerics.float64 import is_real, retargeted
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
            return own.target(there.value, *own.args[1:], **own.kwargs)

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
            return done([leaf for leaf in call.leaves if isinstance(leaf, Tensor)])

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
    target: Any = theirs.target

    def done(tensors: Sequence[Any]) -> Any:
        given = iter(tensors)
        args, kwargs = torch.fx.node.map_arg((theirs.args, dict(theirs.kwargs)), lambda _: next(given))
        return target(*retargeted(args), **retargeted(kwargs))

    return done, len(operands_of(theirs))


_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**", "matmul": "@", "mm": "@", "bmm": "@"}
_SIGNS |= {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "bitwise_and": "&", "bitwise_or": "|"}
_LONGEST = 60
"""Characters of an expression; a longer one is a list of ops."""
_ROUNDINGS = 8.0
_PARTS = frozenset({"slice", "select", "narrow"})


def expressions(question: Question) -> Iterator[Hypothesis]:
    """Yield: what an op of the baseline makes is what another expression of the candidate makes."""
    trial, there = question.trial, question.there
    if there is None:
        return
    made = ({op: one.values[op] for op in one.ops if not passes_on(op)} for one in (trial, there.trial))
    ours, theirs = ({op: value for op, value in one.items() if isinstance(value, Tensor)} for one in made)
    new = {op: v for op, v in theirs.items() if not any(_is_same(v, one, question.noise) for one in ours.values())}
    ends = origin_of(trial.end), origin_of(there.trial.end)
    for node in trial.inputs:  # something is done to it first
        for other in new:
            read = {there.labels.get(one.name) for one in up(other) if one.op == "placeholder"}
            is_read_alike = {one.target for one in node.users} & {one.target for one in other.users}
            if question.label(node) in read and is_read_alike:
                yield from _instead(question, node, trial.values[node], other, theirs[other])
    for node, value in ours.items():
        if any(_is_same(value, other, question.noise) for other in theirs.values()):
            continue
        for other in (*there.trial.inputs, *new):
            # What goes in may come out; a region is what it makes, which is said of one op alone.
            is_end = other is ends[1] and (len(theirs) > 1 or len(tensors_of(there.trial, other)) > 1)
            if node is not ends[0] or not (is_end or other.op == "placeholder"):
                yield from _instead(question, node, value, other, there.trial.values[other])
    yield from _of_other_sizes(question, there)
    if not theirs:
        yield from _passed_on(question, there)


def _passed_on(question: Question, there: TheirRegion) -> Iterator[Hypothesis]:
    """Yield: the candidate passes a tensor on, perhaps with its axes moved, where the baseline has ops that compute."""
    trial, right = question.trial, there.trial.right
    shared = {question.label(node) for node in trial.inputs} & set(there.labels.values())
    if len(shared) == 1 and isinstance(right, Tensor) and right.shape == trial.right.shape:
        parts = [op_name(op) for op in trial.ops if op_name(op) in _PARTS]
        lost = missing_ops(trial.ops, shared.pop())
        yield Hypothesis("other", lost if not parts else f"{parts[0]}, {lost}", {trial.end: right})


def _of_other_sizes(question: Question, there: TheirRegion) -> Iterator[Hypothesis]:
    """Yield: the same ops read one other tensor, whose sizes are not those of the baseline's."""
    both = (question.trial, question.labels), (there.trial, there.labels)
    ours, theirs = ({labels.get(one.name): one for one in trial.inputs} for trial, labels in both)
    lost, found = list(ours.keys() - theirs.keys()), list(theirs.keys() - ours.keys())
    ops = [Counter(op.target for op in trial.ops if not passes_on(op)) for trial, _ in both]
    if len(lost) == len(found) == 1 and ops[0] == ops[1]:
        node, other = ours[lost[0]], theirs[found[0]]
        is_view = question.maker(question.in_baseline(node)) == found[0]
        if not is_view and question.trial.values[node].shape != there.trial.values[other].shape:
            yield Hypothesis("swapped", f"{found[0]} instead of {lost[0]}", {question.trial.end: there.trial.right})


def _instead(question: Question, node: Node, value: Any, other: Node, found: Any) -> Iterator[Hypothesis]:
    is_alike = isinstance(value, Tensor) and isinstance(found, Tensor) and found.shape == value.shape
    if is_alike and question.there and found.is_floating_point() == value.is_floating_point():
        ours, theirs = question.labels, question.there.labels
        here, there = _both_written(node, ours, other, theirs)
        if here == there:  # the same ops, too many to be written: what they read is another
            one, another = _apart(node, ours, other, theirs)
            here, there = _both_written(one, ours, another, theirs)
            if here == there:
                return
        text = f"{here} in the baseline, {there} in the candidate"
        if other.op == "placeholder":
            is_passed_on = there in {question.label(one) for one in up(node)}
            short = question.label(node) if len(_written(node, question.labels)) > _LONGEST else here
            text = missing_ops(_ops(node), there) if is_passed_on else f"{there} instead of {short}"
            if there == short:
                return  # two layers have an op of this name: no words
        is_op = node.target is other.target and constants_of([node]) == constants_of([other])
        factors = {_written(arg, question.there.labels, is_operand=True) for arg in other.args}
        is_alone = _written(node, question.labels, is_operand=True) in factors
        is_scaled = is_alone and traits_of(other).kind == "factor" and bool(constants_of([other]))
        kind = "swapped" if is_op else "scale" if is_scaled else kind_of_op(next(iter(_ops(node)), node), other)
        yield Hypothesis(kind, text, {node: found})


def _is_same(one: Tensor, other: Tensor, noise: float) -> bool:
    if one.shape != other.shape or not (one.is_floating_point() and other.is_floating_point()):
        return one.shape == other.shape and torch.equal(one, other)
    return float((one - other).norm()) <= _ROUNDINGS * noise * float(one.norm())


def _both_written(node: Node, ours: Mapping[str, str], other: Node, theirs: Mapping[str, str]) -> list[str]:
    """Return two expressions down to tensors that have names; a long one is a list of the ops that the other lacks."""
    texts = _written(node, ours), _written(other, theirs)
    here, there = (Counter(called(op_name(one)) for one in _ops(end)) for end in (node, other))
    alone = (here - there, there - here) if here - there and there - here else (here, there)
    lists = (", ".join(f"{n} x {op}" if n > 1 else op for op, n in ops.items()) for ops in alone)
    return [text if len(text) <= _LONGEST else listed for text, listed in zip(texts, lists, strict=True)]


def _apart(node: Node, ours: Mapping[str, str], other: Node, theirs: Mapping[str, str]) -> tuple[Node, Node]:
    """Return the operands in which two calls of one op differ, where that is one of each; else the two themselves."""
    while True:
        node, other = origin_of(node), origin_of(other)
        both = [pytree.tree_leaves((one.args, dict(one.kwargs))) for one in (node, other)]
        if node.target is not other.target or len(both[0]) != len(both[1]):
            return node, other
        differing = [(a, b) for a, b in zip(*both, strict=True) if _written(a, ours) != _written(b, theirs)]
        if len(differing) != 1 or not all(isinstance(one, Node) for one in differing[0]):
            return node, other
        ((node, other),) = differing


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
