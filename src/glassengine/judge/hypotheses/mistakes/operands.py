"""What ops read: exchanged, left out, taken twice, negated, moved by one, or another tensor altogether."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.graphs.between import passes_on
from glassengine.judge.graphs.by_name import argument_names
from glassengine.judge.hypotheses.mistakes.layouts import merges
from glassengine.judge.hypotheses.mistakes.tensor_roles import (
    BENDING,
    is_counted,
    is_of_before,
    is_stored,
    least_position,
)
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, article, tensors_of, with_leaves
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Call
from glassengine.numerics.float64 import double
from glassengine.numerics.mask_values import is_mask
from glassengine.numerics.metrics.orders import kind_of_shift
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind

_MOST_OTHERS = 48
_MOST_AXES = 4
_SCALED = 1e-6
"""By how much a tensor that is another one times a number may differ, relative to its largest element."""


def exchanged(question: Question) -> Iterator[Hypothesis]:
    """Yield: two tensors of one shape have changed places, for one op or for all."""
    trial = question.trial
    for node in reversed(trial.ops):
        if traits_of(node).commutes:
            continue
        tensors = tensors_of(trial, node)
        for (i, a), (j, b) in itertools.combinations(tensors, 2):
            if a is b or not _are_alike(trial.values[a], trial.values[b]):
                continue

            def edit(call: Call, i: int = i, j: int = j, a: Node = a, b: Node = b) -> Any:
                return with_leaves(call, {i: trial.values[b], j: trial.values[a]})

            text = f"{_of_op(question, node, i, a, j, b)} are exchanged"
            yield Hypothesis("swapped", text, {node: edit}, exchanged=(i, j))
    yield from _parts(question)
    yield from _joined(question)
    for a, b in itertools.combinations(trial.inputs, 2):
        if _are_alike(trial.values[a], trial.values[b]):
            edits = {a: trial.values[b], b: trial.values[a]}
            yield Hypothesis("swapped", _exchange(question, a, b), edits)


def _exchange(question: Question, a: Node, b: Node) -> str:
    names = f"{question.label(a)} and {question.label(b)}"
    for node, other in ((a, b), (b, a)):
        acts = [user for user in node.users if traits_of(user).kind == "activation"]
        if acts and len(node.users) == 1 and not any(traits_of(user).kind == "activation" for user in other.users):
            return f"{op_name(acts[0])} is on the other factor: {names} are exchanged"
    return f"{names} are exchanged"


def _parts(question: Question) -> Iterator[Hypothesis]:
    """Parts of one split that have changed places."""
    trial = question.trial
    for node in trial.ops:
        parts = [user for user in node.users if op_name(user) == "getitem" and user in trial.values]
        for a, b in itertools.combinations(parts, 2):
            if _are_alike(trial.values[a], trial.values[b]):
                edits = {a: trial.values[b], b: trial.values[a]}
                text = f"parts {a.args[1]} and {b.args[1]} of {op_name(node)} are exchanged"
                yield Hypothesis("swapped", text, edits)


def _joined(question: Question) -> Iterator[Hypothesis]:
    """Parts of other sizes that are put together in the other order: a token before all others, what is kept before."""
    trial = question.trial
    for node in reversed(trial.ops):
        tensors = tensors_of(trial, node)
        if len(tensors) == 2 and argument_names(node.target)[:1] == ["tensors"]:
            (i, a), (j, b) = tensors
            if a is not b and trial.values[a].shape != trial.values[b].shape:
                edit = _with({i: trial.values[b], j: trial.values[a]})
                text = f"{_of_op(question, node, i, a, j, b)} are exchanged"
                yield Hypothesis("swapped", text, {node: edit}, exchanged=(i, j))


def left_out(question: Question) -> Iterator[Hypothesis]:
    """Yield: an op, or one of its operands, is missing or counts twice."""
    trial = question.trial
    for node in reversed(trial.ops):
        made = trial.values[node]
        if isinstance(made, torch.Tensor) and made.dtype is torch.bool:
            yield from conditions(question, node, made)
        if not isinstance(made, torch.Tensor) or not made.is_floating_point():
            continue
        name, traits = op_name(node), traits_of(node)
        tensors = tensors_of(trial, node)
        names = argument_names(node.target)
        for place, source in tensors:
            label = names[place] if place < len(names) else ""
            value = trial.values[source]
            if label == "bias" or place == traits.addend:
                text = f"the bias of {name} is missing: {question.label(source)}"
                edits = {node: _with({place: torch.zeros_like(value)})}
                yield Hypothesis("bias missing", text, edits, "bias", (question.label(source), None))
            elif traits.kind == "norm" and label == "weight":
                text = f"the weight of {name} is missing: {question.label(source)}"
                yield Hypothesis("scale", text, {node: _with({place: torch.ones_like(value)})})
        if name == "einsum" and len(tensors) > 1:
            for place, source in tensors:
                ones = torch.ones_like(trial.values[source])
                text = f"{question.label(source)} is not multiplied"
                yield Hypothesis("scale", text, {node: _with({place: ones})}, lost=source)
        # What a reversed subtraction is without its second operand is no value of the first.
        if traits.kind in ("term", "factor") and name != "rsub":
            if len(tensors) == 2:
                counts = is_counted(question, node)
                for found in _of_two(question, node, tensors):
                    yield dataclasses.replace(found, kind="position") if counts else found
        elif name == "where":
            yield from choices(question, node, made)
        elif tensors and trial.values[tensors[0][1]].shape == made.shape:
            first = trial.values[tensors[0][1]]
            if first.is_floating_point() and not torch.equal(first, made):
                yield Hypothesis(of_missing(node), f"{article(node)} is missing", {node: first})


def _of_two(question: Question, node: Node, tensors: list[tuple[int, Node]]) -> Iterator[Hypothesis]:
    trial = question.trial
    name, made = op_name(node), trial.values[node]
    (_, a), (_, b) = tensors
    for kept, lost in ((a, b), (b, a)):
        one, other = trial.values[kept], trial.values[lost]
        # A condition that is multiplied is no number that could be added.
        if one.shape != made.shape or torch.bool in (one.dtype, other.dtype):
            continue
        what = question.label(lost)
        is_bias = name == "add" and (is_stored(question, lost) or other.dim() < made.dim())
        if name == "add" and is_mask(other):
            yield Hypothesis("mask", f"the mask is not added: {what}", {node: one}, lost=lost)
        elif traits_of(node).kind == "term":
            verb = "added" if name == "add" else "subtracted"
            kind: Kind = "stale" if is_of_before(question, lost) else "bias missing" if is_bias else "other"
            yield Hypothesis(kind, f"{what} is not {verb}", {node: one}, lost=lost)
            yield Hypothesis(
                "scale",
                f"{what} is {verb} twice",
                {node: made + other if name == "add" else made - other},
            )
            yield Hypothesis(
                "scale",
                f"{what} is {'subtracted' if name == 'add' else 'added'}",
                {node: one - other if name == "add" else one + other},
            )
            yield Hypothesis("other", f"{what} is multiplied, not {verb}", {node: one * other})
        elif name == "mul":
            kind = "mask" if is_of_flags(other) else "scale"
            yield Hypothesis(kind, f"{what} is not multiplied", {node: one.expand(made.shape)}, lost=lost)
            yield Hypothesis("scale", f"{what} is multiplied twice", {node: made * other})
            yield Hypothesis("scale", f"1 + {what} is multiplied, not {what}", {node: made + one})
            yield Hypothesis("scale", f"{what} - 1 is multiplied, not {what}", {node: made - one})
            yield Hypothesis("other", f"{what} is added, not multiplied", {node: one + other})
            yield Hypothesis("scale", f"it is divided by {what}, not multiplied", {node: one / other})
        elif kept is a:
            yield Hypothesis("scale", f"it is not divided by {what}", {node: one})
            yield Hypothesis("scale", f"it is multiplied by {what}, not divided", {node: one * other})


def altered(question: Question) -> Iterator[Hypothesis]:
    """Yield: one tensor has the other sign, is counted from 1 (or 0), moved by one, turned around or transposed."""
    trial = question.trial
    for node in _operands(question):
        value = trial.values[node]
        name = question.label(node)
        if not isinstance(value, torch.Tensor):
            continue
        if value.dtype is torch.bool:
            yield Hypothesis("mask", f"{name} is inverted", {node: ~value})
        elif not value.is_floating_point():
            for by in (-1, 1):
                moved = (value + by).clamp(min=0) if bool((value >= 0).all()) else value + by
                how = f"1 too {'small' if by < 0 else 'large'}"
                text = f"positions are {how}: {name}" if _is_arange(question, node) else f"{name} is {how}"
                yield Hypothesis("position", text, {node: moved})
        else:
            kind: Kind = "position" if is_counted(question, node) else "scale"
            yield Hypothesis(kind, f"{name} has the other sign", {node: -value})
            if node.name in question.weights:
                yield Hypothesis("scale", f"1 + {name} instead of {name}", {node: value + 1})
                yield Hypothesis("scale", f"{name} - 1 instead of {name}", {node: value - 1})
        least = least_position(value)
        if least:
            text = f"{name} begins at 0 in the candidate, at {least} here: each step counts from 0"
            yield Hypothesis("position", text, {node: value - least}, "position", (least, 0))
        yield from _moved(question, node, value)


def _moved(question: Question, node: Node, value: torch.Tensor) -> Iterator[Hypothesis]:
    name, is_weight = question.label(node), node.name in question.weights
    axes = [axis for axis in range(value.dim()) if value.shape[axis] > 1][-_MOST_AXES:]
    for axis in axes:
        kind = "mask" if is_mask(value) else kind_of_shift(value.dim(), axis, is_weight=is_weight)
        for by in (1, -1):
            text = f"{name} is moved by {by} along axis {axis}"
            for moved in (value.roll(by, axis), _shifted(value, by, axis)):
                yield Hypothesis(kind, text, {node: moved}, "shift", (0, by), axis)
        text = f"{name} is turned around along axis {axis}"
        yield Hypothesis("permuted", text, {node: value.flip(axis)}, axis=axis)
    if len(axes) > 1:
        text = f"{name} is turned around along axes {axes[-2:]}{': its kernel is flipped' if is_weight else ''}"
        yield Hypothesis("permuted", text, {node: value.flip(axes[-2:])})
    for a, b in itertools.combinations(axes, 2):
        if value.shape[a] == value.shape[b]:
            text = f"{name} is transposed" if value.dim() == 2 else f"axes {a} and {b} of {name} are transposed"
            is_merged = value.dim() > 3 and merges(question, node, value, a, b)
            kind, text = ("permuted", f"{text}: heads are interleaved") if is_merged else ("transposed", text)
            found = Hypothesis(kind, text, {node: value.transpose(a, b)})
            is_matrix = is_weight and value.dim() == 2
            yield dataclasses.replace(found, argument="transposed", values=(False, True)) if is_matrix else found


def _shifted(value: torch.Tensor, by: int, axis: int) -> torch.Tensor:
    """Move by one and let zeros come in."""
    moved = value.roll(by, axis)
    moved.select(axis, 0 if by > 0 else -1).zero_()
    return moved


def another(question: Question) -> Iterator[Hypothesis]:
    """Yield: another tensor of the same shape was read."""
    trial = question.trial
    if question.is_another:
        return
    for node in _operands(question):
        value = trial.values[node]
        if node.name in question.read and sum(user in trial.values for user in node.users) == 1:
            continue  # the candidate reads the very tensor
        alike = [item for item in question.others.items() if _are_alike(item[1], value)]
        for name, found in alike[:_MOST_OTHERS]:
            trial.budget.spend_passes(2, found)
            other = double(found)
            if torch.equal(other, value):
                continue
            kind: Kind = "swapped" if value.is_floating_point() else "mask" if value.dtype is torch.bool else "position"
            text = f"{name} instead of {question.label(node)}"
            factor = _factor(value, other)
            if factor is not None:
                kind, text = "scale", f"{question.label(node)} is scaled by {factor:.6g}: it is {name}"
            elif _is_old(question, name, node):
                kind = "stale"
            yield Hypothesis(kind, text, {node: other})
            readers = [user for user in node.users if user in trial.values]
            for reader in readers if len(readers) > 1 else ():
                places = [place for place, leaf in tensors_of(trial, reader) if leaf is node]
                edit = _with(dict.fromkeys(places, other))
                yield Hypothesis(kind, f"{text}, where {op_name(reader)} reads it", {reader: edit})


def _is_old(question: Question, name: str, node: Node) -> bool:
    """Whether another tensor holds what the step before left, and what should have been read does not."""
    other = question.named.get(question.sources.get(name, ""))
    return other is not None and is_of_before(question, other) and not is_of_before(question, node)


def another_inside(question: Question) -> Iterator[Hypothesis]:
    """Yield: an op reads another tensor that the piece itself makes before it: the norm for what was normed."""
    trial = question.trial
    for place, node in enumerate(trial.ops):
        if passes_on(node):
            continue
        for at, source in tensors_of(trial, node):
            value = trial.values[source]
            for other in (one for one in trial.ops[:place] if one is not source and not passes_on(one)):
                found = trial.values[other]
                if _are_alike(found, value) and value.is_floating_point() and not torch.equal(found, value):
                    text = f"{question.label(other)} instead of {question.label(source)}"
                    is_old = is_of_before(question, other) and not is_of_before(question, source)
                    yield Hypothesis("stale" if is_old else "swapped", text, {node: _with({at: found})})


def _factor(value: torch.Tensor, other: torch.Tensor) -> float | None:
    """Return the number that makes one tensor the other; None where none does."""
    power = float(value.square().sum()) if value.is_floating_point() else 0.0
    factor = float((value * other).sum()) / power if power and math.isfinite(power) else 0.0
    is_scaled = factor and float((value * factor - other).abs().max()) <= _SCALED * float(other.abs().max())
    return factor if is_scaled else None


def _operands(question: Question) -> list[Node]:
    """Return the inputs of the piece and the positions that it counts itself, those that are read last first.

    Where an op reads both, positions come before the table that they are looked up in.
    """
    order = {node: place for place, node in enumerate(question.trial.ops)}
    counted = [node for node in question.trial.ops if op_name(node) == "arange"]
    found = [*question.trial.inputs, *counted]
    last = {node: max((order.get(user, -1) for user in node.users), default=-1) for node in found}
    return sorted(found, key=lambda node: (-last[node], not _is_arange(question, node)))


def _is_arange(question: Question, node: Node) -> bool:
    return op_name(question.named.get(node.name, node)) == "arange"


def _of_op(question: Question, node: Node, i: int, a: Node, j: int, b: Node) -> str:
    names = argument_names(node.target)
    if names[:1] == ["tensors"]:
        return f"parts {i} and {j} of {op_name(node)}"
    own = [names[place] for place in (i, j) if place < len(names)]
    if len(own) == 2 and "self" not in own:
        return " and ".join(own)
    # The schema has no word for it.
    return f"the operands {question.label(a)} and {question.label(b)} of {op_name(node)}"


def _are_alike(a: Any, b: Any) -> bool:
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return both and a.shape == b.shape and a.is_floating_point() == b.is_floating_point() and a.numel() > 0


def _with(changed: dict[int, Any]) -> Any:
    return lambda call: with_leaves(call, changed)


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
        yield Hypothesis("mask", text, {node: kept})
    if not both and name in ("le", "lt", "ge", "gt"):
        text = f"a condition of the mask is missing: {question.label(node)}"
        yield Hypothesis("mask", text, {node: torch.ones_like(made)})


def choices(question: Question, node: Node, made: torch.Tensor) -> Iterator[Hypothesis]:
    """Yield: one of the two tensors between which a condition chooses is taken everywhere."""
    trial = question.trial
    condition, *tensors = [source for _, source in tensors_of(trial, node)]
    for source in tensors:
        value = trial.values[source]
        if value.shape == made.shape and value.is_floating_point():
            text = f"{question.label(source)} is taken everywhere: {question.label(condition)} is not asked"
            kind: Kind = "other" if _is_of_values(question, condition) else "mask"
            yield Hypothesis(kind, text, {node: value}, lost=condition)


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
