"""Mistakes in operands: exchanged, left out, taken twice, negated, moved by one, or another tensor altogether."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.judge.hypotheses.mistakes.layouts import merges
from glassengine.judge.hypotheses.mistakes.tensor_roles import (
    BENDING,
    heads_or_parts,
    is_counted,
    is_of_before,
    is_stored,
    least_position,
    module_of,
)
from glassengine.judge.hypotheses.trials.hypothesis import (
    Hypothesis,
    constants_of,
    done_by,
    part_of,
    reading,
    shown,
    tensors_of,
    whole_of,
    with_leaves,
)
from glassengine.judge.hypotheses.trials.question import Question, broadcasts_alike
from glassengine.judge.hypotheses.trials.trial import Edit, factor_between
from glassengine.judge.site_pairs import argument_names, origin_of, passes_on, walk
from glassengine.numerics.float64 import double, is_real
from glassengine.numerics.mask_values import is_mask
from glassengine.numerics.orders import kind_of_shift
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind

_MOST_OTHERS = 48
_MOST_AXES = 4
_LEAST_PASSES = 3
_SCALED = 1e-6
"""By how much a tensor that is another one times a number may differ, relative to its largest element."""
_KINDS_OF_MISSING: dict[Kind, frozenset[str]] = {
    "activation": frozenset({"exp", "exp2", "log"}),
    "mask": frozenset({"masked_fill", "tril", "triu"}),
    "permuted": frozenset({"flip", "gather", "index", "index_select", "take_along_dim"}),
    "position": frozenset({"roll"}),
    "scale": frozenset({"neg", "reciprocal"}),
    "stale": frozenset({"index_copy", "index_put", "slice_scatter", "select_scatter"}),
    "transposed": frozenset({"permute", "transpose", "t"}),
}
"""What is not there where the op is left out: of what writes, the new values; of what turns over, a factor."""
_LOGIC = frozenset(f"{kind}{name}" for name in ("and", "or", "xor") for kind in ("__", "bitwise_", "logical_"))


def exchanged(question: Question) -> Iterator[Hypothesis]:
    """Yield: two tensors of one shape have changed places, for one op or for all; parts of others, where joined."""
    trial = question.trial
    for node in trial.inputs:
        part = part_of(question.in_baseline(node))
        for name, found in question.others.items() if whole_of(part) is not None else ():
            taken = part_of(question.sources[name])
            is_beside = taken is not part and taken.args[:1] == part.args[:1] and _are_alike(found, trial.values[node])
            if is_beside and question.are_exchanged(part, taken):
                first, second = sorted([part, taken])
                text = f"{question.maker(first)} and part {second.args[1]} are exchanged"
                yield Hypothesis("swapped", text, {node: double(found)}, made_in=part)
    for node in reversed(trial.ops):
        # Sides that are expanded may change places, too, and parts of other sizes: a token before all others.
        is_any = traits_of(node).kind in ("term", "factor") or argument_names(node.target)[:1] == ["tensors"]
        for (i, a), (j, b) in itertools.combinations(tensors_of(trial, node), 2):
            is_alike = is_any or _are_alike(trial.values[a], trial.values[b])
            if not traits_of(node).commutes and a is not b and is_alike:
                yield _exchanged(question, node, (i, a), (j, b))
    for node in trial.ops:
        parts = [user for user in node.users if op_name(user) == "getitem" and user in trial.values]
        for a, b in itertools.combinations(parts, 2):
            if _are_alike(trial.values[a], trial.values[b]):
                text = f"parts {a.args[1]} and {b.args[1]} of {op_name(node)} are exchanged"
                yield Hypothesis("swapped", text, {a: trial.values[b], b: trial.values[a]})
    for a, b in itertools.combinations(trial.inputs, 2):
        if _are_alike(trial.values[a], trial.values[b]):
            text = _exchanged_inputs(question, a, b)
            yield Hypothesis("swapped", text, {a: trial.values[b], b: trial.values[a]})


def _exchanged(question: Question, node: Node, one: tuple[int, Node], other: tuple[int, Node]) -> Hypothesis:
    (i, a), (j, b) = one, other
    names = argument_names(node.target)
    own = [names[place] for place in (i, j) if place < len(names)]
    if names[:1] == ["tensors"]:
        what = f"parts {i} and {j} of {op_name(node)}"
    elif len(own) == 2 and "self" not in own:
        what = " and ".join(own)
    else:  # the schema has no word for it
        what = f"the operands {question.label(a)} and {question.label(b)} of {op_name(node)}"
    edit = reading({i: question.trial.values[b], j: question.trial.values[a]})
    kind: Kind = "position" if is_counted(question, node) else "swapped"
    return Hypothesis(kind, f"{what} are exchanged", {node: edit}, exchanged=(i, j))


def _exchanged_inputs(question: Question, a: Node, b: Node) -> str:
    names = f"{question.label(a)} and {question.label(b)}"
    for node, other in ((a, b), (b, a)):
        acts = [user for user in node.users if traits_of(user).kind == "activation"]
        if acts and len(node.users) == 1 and not any(traits_of(user).kind == "activation" for user in other.users):
            return f"{op_name(acts[0])} is on the other factor: {names} are exchanged"
    return f"{names} are exchanged"


def left_out(question: Question) -> Iterator[Hypothesis]:
    """Yield: an op, or one of its operands, is missing or counts twice."""
    trial = question.trial
    for node in reversed(trial.ops):
        made = trial.values[node]
        if isinstance(made, Tensor) and made.dtype is torch.bool:
            yield from _conditions(question, node, made)
        if not is_real(made):
            continue
        name, traits = op_name(node), traits_of(node)
        tensors, names = tensors_of(trial, node), argument_names(node.target)
        first = trial.values[tensors[0][1]] if tensors else None
        for place, source in tensors:
            label, what = names[place] if place < len(names) else "", question.label(source)
            if label == "bias" or place == traits.addend:
                text = f"the bias of {name} is missing: {what}"
                yield Hypothesis("bias missing", text, {node: _filled(place, 0.0)}, "bias", (what, None))
            elif traits.kind == "norm" and label == "weight":
                yield Hypothesis("scale", f"the weight of {name} is missing: {what}", {node: _filled(place, 1.0)})
            elif name == "einsum" and len(tensors) > 1:
                yield Hypothesis("scale", f"{what} is not multiplied", {node: _filled(place, 1.0)}, lost=source)
            elif name == "lerp" and place < 2:
                text = f"{what} is not read: zeros stand in its place"
                yield Hypothesis("other", text, {node: _filled(place, 0.0)})
        # What a reversed subtraction is without its second operand is no value of the first.
        if traits.kind in ("term", "factor") and name != "rsub":
            if len(tensors) == 2:
                counts = is_counted(question, node)
                for kind, text, value, lost in _of_two(question, node, *(source for _, source in tensors)):
                    yield Hypothesis("position" if counts else kind, text, {node: value}, lost=lost)
        elif name == "where":
            yield from _choices(question, node, made)
        elif is_real(first) and first.numel() == made.numel():  # what moves axes is missing before a reshape
            found = first.reshape(made.shape)
            if not torch.equal(found, made):
                done = _written(question.in_baseline(node))
                text = f"{done_by(done)} is missing"
                text += "" if first.shape == made.shape else f": {question.label(tensors[0][1])} is read as it is"
                yield Hypothesis(_kind_of_missing(done), text, {node: found}, lost=node)


def _filled(place: int, number: float) -> Edit:
    """Return the edit by which an op reads one number instead of a tensor."""
    return lambda call: with_leaves(call, {place: torch.full_like(call.leaves[place], number)})


def _written(node: Node) -> Node:
    """Return the op that is done to a part of a tensor in its place, `x[1:] /= 2`: the division; else the node."""
    if op_name(node) not in ("slice_scatter", "select_scatter"):
        return node
    done, whole = (origin_of(source) for source in (node.all_input_nodes[1], node.all_input_nodes[0]))
    return done if whole in map(origin_of, done.all_input_nodes) else node


def _of_two(question: Question, node: Node, a: Node, b: Node) -> Iterator[tuple[Kind, str, Tensor, Node | None]]:
    """Yield (kind, words, what is made, what is not read) where one of two operands is left out, or taken otherwise."""
    name, made = op_name(node), question.trial.values[node]
    ours, theirs = ([op.target for op in ops].count(node.target) for ops in (question.trial.ops, question.theirs))
    # The candidate reads something there.
    is_read = theirs >= ours and all(len(op.all_input_nodes) == 2 for op in question.theirs if op.target == node.target)
    for kept, lost in ((a, b), (b, a)):
        one, other = question.trial.values[kept], question.trial.values[lost]
        what, is_sum = question.label(lost), name == "add"
        # A condition that is multiplied is no number that could be added.
        if torch.bool in (one.dtype, other.dtype):
            if name == "mul" and is_real(one):
                yield "mask", f"the mask is not multiplied: {what}", one.expand(made.shape), lost
            continue
        one = one.expand(made.shape)
        if is_sum and is_mask(other):
            yield "mask", f"the mask is not added: {what}", one, lost
        elif traits_of(node).kind == "term":
            if not is_sum and kept is b:
                text = f"zeros instead of {what}" if is_read else f"it is not subtracted from {what}"
                yield "other", text, -one, lost
                continue
            verb, reverse = ("added", "subtracted") if is_sum else ("subtracted", "added")
            is_bias = is_sum and (is_stored(question, lost) or other.dim() < made.dim())
            kind: Kind = "stale" if is_of_before(question, lost) else "bias missing" if is_bias else "other"
            text = f"{what} is not {verb} {'to' if is_sum else 'from'} {question.label(kept)}"
            yield kind, f"zeros instead of {what}: it is not {verb}" if is_read else text, one, lost
            yield "scale", f"{what} is {verb} twice", made + other if is_sum else made - other, None
            text = f"{what} has the other sign" if is_read else f"{what} is {reverse}, not {verb}"
            yield "scale", text, one - other if is_sum else one + other, None
            yield "other", f"{what} is multiplied, not {verb}", one * other, None
        elif name == "mul":
            yield "mask" if _is_of_flags(other) else "scale", f"{what} is not multiplied", one, lost
            is_root = op_name(origin_of(lost)) == "rsqrt"
            twice = "the root is missing: 1 / x instead of rsqrt" if is_root else f"{what} is multiplied twice"
            yield "other" if is_root else "scale", twice, made * other, None
            yield "scale", f"1 + {what} is multiplied, not {what}", made + one, None
            yield "scale", f"{what} - 1 is multiplied, not {what}", made - one, None
            yield "other", f"{what} is added, not multiplied", one + other, None
            yield "scale", f"it is divided by {what}, not multiplied", one / other, None
        elif kept is a:
            yield "scale", f"it is not divided by {what}", one, None
            yield "scale", f"it is multiplied by {what}, not divided", one * other, None


def _kind_of_missing(node: Node) -> Kind:
    """Return the kind of mistake that it is to leave out an op that makes one tensor of another."""
    name = op_name(node)
    if traits_of(node).kind in BENDING:
        return "activation"
    if name == "pow" and node.args[1:] == (-1,):
        return "scale"
    return next((kind for kind, names in _KINDS_OF_MISSING.items() if name in names), "other")


def _conditions(question: Question, node: Node, made: Tensor) -> Iterator[Hypothesis]:
    """Yield: of an op that decides what is hidden, one of two conditions is missing, or it holds everywhere."""
    values, sources = question.trial.values, [source for _, source in tensors_of(question.trial, node)]
    lost: dict[Node, Tensor] = {}
    both = question.trial.ops, question.theirs
    own, theirs = ({op.target for op in ops if op_name(op).rstrip("_") in _LOGIC} for ops in both)
    if node.target in own - theirs and theirs - own:
        return  # the candidate has another one in its place
    if len(sources) == 2 and all(values[source].dtype is torch.bool for source in sources):
        lost = {source: values[kept].expand(made.shape) for source, kept in zip(sources, sources[::-1], strict=True)}
    elif op_name(node) in ("le", "lt", "ge", "gt"):
        lost = {node: torch.ones_like(made)}
    for source, value in lost.items():
        yield Hypothesis("mask", f"a condition of the mask is missing: {question.label(source)}", {node: value})


def _choices(question: Question, node: Node, made: Tensor) -> Iterator[Hypothesis]:
    """Yield: one of the two tensors between which a condition chooses is taken everywhere."""
    condition, *tensors = [source for _, source in tensors_of(question.trial, node)]
    for source in tensors:
        value = question.trial.values[source]
        if value.shape == made.shape and is_real(value):
            text = f"{question.label(source)} is taken everywhere: {question.label(condition)} is not asked"
            kind: Kind = "other" if _is_of_values(question, condition) else "mask"
            yield Hypothesis(kind, text, {node: value}, lost=condition)


def _is_of_values(question: Question, condition: Node) -> bool:
    """Whether a condition compares the values of tensors, as a clamp does: no places are hidden by it."""
    own = question.in_baseline(condition)
    above = walk([own], lambda one: one.all_input_nodes if one is own or _dtype(one) is torch.bool else ())
    return any(dtype is not None and dtype.is_floating_point for dtype in map(_dtype, above))


def _dtype(node: Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def _is_of_flags(value: Tensor) -> bool:
    """Whether a tensor holds zeros and ones, and both: what is multiplied by it is hidden in part."""
    if not value.numel() or not is_real(value):
        return False
    is_zero = value == 0
    return bool((is_zero | (value == 1)).all()) and bool(is_zero.any()) and not bool(is_zero.all())


def altered(question: Question) -> Iterator[Hypothesis]:
    """Yield: one tensor has the other sign, is counted from 1 (or 0), moved by one, turned around or transposed."""
    for node in _operands(question):
        value, name = question.trial.values[node], question.label(node)
        if not isinstance(value, Tensor):
            continue
        if value.dtype is torch.bool:
            yield Hypothesis("mask", f"{name} is inverted", {node: ~value})
        elif not is_real(value):
            for by, how in ((-1, "1 too small"), (1, "1 too large")):
                moved = (value + by).clamp(min=0) if bool((value >= 0).all()) else value + by
                if int(moved.min()) == int(moved.max()):
                    continue  # one number everywhere is no place
                text = f"positions are {how}: {name}" if _is_arange(question, node) else f"{name} is {how}"
                yield Hypothesis("position", text, {node: moved})
        else:
            kind: Kind = "position" if is_counted(question, node) else "scale"
            yield Hypothesis(kind, f"{name} has the other sign", {node: -value})
            if node.name in question.weights:
                yield Hypothesis("scale", f"1 + {name} instead of {name}", {node: value + 1})
                yield Hypothesis("scale", f"{name} - 1 instead of {name}", {node: value - 1})
        if least := least_position(value):
            text = f"{name} begins at 0 in the candidate, at {least} in the baseline: each step counts from 0"
            yield Hypothesis("position", text, {node: value - least}, "position", (least, 0))
        yield from _moved(question, node, value)


def _moved(question: Question, node: Node, value: Tensor) -> Iterator[Hypothesis]:
    name, is_weight = question.label(node), node.name in question.weights
    axes = [axis for axis in range(value.dim()) if value.shape[axis] > 1][-_MOST_AXES:]
    for axis in axes:
        kind: Kind = "mask" if is_mask(value) else kind_of_shift(value.dim(), axis, is_weight=is_weight)
        for by in (1, -1):
            around = value.roll(by, axis)
            with_zeros = around.clone()
            with_zeros.select(axis, 0 if by > 0 else -1).zero_()
            for moved in (around, with_zeros) if value.shape[axis] > 2 else (with_zeros,):
                text = f"{name} is moved by {by} along axis {axis}"
                yield Hypothesis(kind, text, {node: moved}, "shift", (0, by), axis)
        yield Hypothesis("permuted", f"{name} is turned around along axis {axis}", {node: value.flip(axis)}, axis=axis)
    if len(axes) > 1:
        text = f"{name} is turned around along axes {axes[-2:]}{': its kernel is flipped' if is_weight else ''}"
        yield Hypothesis("permuted", text, {node: value.flip(axes[-2:])})
    for a, b in itertools.combinations(axes, 2):
        if value.shape[a] == value.shape[b]:
            text = f"{name} is transposed" if value.dim() == 2 else f"axes {a} and {b} of {name} are transposed"
            is_merged = value.dim() > 3 and merges(question, node, value, a, b)
            text += f": {heads_or_parts(question, node)} are interleaved" if is_merged else ""
            kind = "permuted" if is_merged else "transposed"
            found = Hypothesis(kind, text, {node: value.transpose(a, b)})
            is_matrix = is_weight and value.dim() == 2
            yield dataclasses.replace(found, argument="transposed", values=(False, True)) if is_matrix else found


def another(question: Question) -> Iterator[Hypothesis]:
    """Yield: another tensor of the same shape was read."""
    trial = question.trial
    for node in _operands(question) if not question.is_another else ():
        value = trial.values[node]
        readers = [user for user in node.users if user in trial.values]
        if node.name in question.read and len(readers) == 1:
            continue  # the candidate reads the very tensor
        alike = [item for item in question.others.items() if _may_stand_for(item[1], value)]
        for name, found in alike[:_MOST_OTHERS]:
            trial.budget.spend_passes(2, found)
            other = torch.zeros_like(value) + double(found)  # a row stands for a column
            if torch.equal(other, value):
                continue
            source = question.sources.get(name)
            kind, text = _instead(question, node, source, name)
            factor = factor_between(value, other) if is_real(value) and value.shape == other.shape else 0.0
            if factor and float((value * factor - other).abs().max()) <= _SCALED * float(other.abs().max()):
                made = origin_of(question.in_baseline(node))
                is_missing = source is not None and origin_of(source) in map(origin_of, made.all_input_nodes)
                kind, text = "scale", f"{op_name(made)} is missing: {name} is read as it is"
                if not is_missing:
                    text = f"{question.label(node)} is scaled by {factor:.6g}: it is {name}"
            yield Hypothesis(kind, text, {node: other})
            for reader in readers if len(readers) > 1 else ():
                edit = reading({place: other for place, leaf in tensors_of(trial, reader) if leaf is node})
                yield Hypothesis(kind, f"{text}, where {op_name(reader)} reads it", {reader: edit})


def another_inside(question: Question) -> Iterator[Hypothesis]:
    """Yield: an op reads another tensor that the piece itself makes before it: the norm for what was normed."""
    trial = question.trial
    for place, node in enumerate(trial.ops):
        for at, source in tensors_of(trial, node) if not passes_on(node) else ():
            value = trial.values[source]
            for other in (one for one in trial.ops[:place] if one is not source and not passes_on(one)):
                found = trial.values[other]
                if _are_alike(found, value) and is_real(value) and not torch.equal(found, value):
                    kind, text = _instead(question, source, question.in_baseline(other), question.label(other))
                    yield Hypothesis(kind, text, {node: reading({at: found})})


def another_pass(question: Question) -> Iterator[Hypothesis]:
    """Yield: of a loop over steps or layers, what another pass made is read: a state or a memory that is stale."""
    trial = question.trial
    ours, theirs = (Counter(op.target for op in ops if not passes_on(op)) for ops in (trial.ops, question.theirs))
    if theirs and ours - theirs:
        return  # what the candidate lacks reads nothing else: it is left out
    inside = {question.label(n): (question.in_baseline(n), trial.values[n]) for n in [*trial.inputs, *trial.ops]}
    there = {name: (question.sources.get(name), one) for name, one in question.others.items()}
    made: dict[Any, list[tuple[str, Node, Any]]] = defaultdict(list)
    for name, (node, value) in {**there, **inside}.items():
        if node is not None and (place := _made_at(node)) is not None:
            made[place].append((name, node, value))
    for reader in trial.ops:
        for at, source in tensors_of(trial, reader):
            place, value = _made_at(question.in_baseline(source)), trial.values[source]
            if place is None or source.name in question.read or not is_real(value):
                continue
            own = origin_of(question.in_baseline(source))
            others = [item for item in made[place] if origin_of(item[1]) is not own]  # a part of the same is no pass
            for name, node, other in others[:_MOST_OTHERS]:
                if _are_alike(other, value) and not torch.equal(found := double(other), value):
                    kind, text = _instead(question, source, node, name)
                    yield Hypothesis(kind, text, {reader: reading({at: found})})


def all_of_another_pass(question: Question) -> Iterator[Hypothesis]:
    """Yield: each tensor that is joined is that of the pass before it, or after it: a state before it is changed."""
    values = question.trial.values
    for node in question.trial.ops if question.theirs else ():
        joined = tensors_of(question.trial, node) if argument_names(node.target)[:1] == ["tensors"] else []
        passes = {_made_at(question.in_baseline(source)) for _, source in joined}
        if len(joined) < _LEAST_PASSES or len(passes) > 1 or None in passes:
            continue
        places, made = [place for place, _ in joined], [values[source] for _, source in joined]
        beside = (double(one) for one in question.others.values() if _are_alike(one, made[0]))
        for end in itertools.islice(itertools.chain([torch.zeros_like(made[0])], beside), _MOST_OTHERS):
            for others, which in (([end, *made[:-1]], "before"), ([*made[1:], end], "after")):
                text = f"each part of {op_name(node)} is that of the pass {which}"
                edit = reading(dict(zip(places, others, strict=True)))
                yield Hypothesis("stale" if which == "before" else "position", text, {node: edit})


def _made_at(node: Node) -> tuple[Any, str] | None:
    """Return op and line of what makes a node, the same for all passes of a loop; None where no line is known."""
    origin = origin_of(node)
    line = origin.meta.get("stack_trace")
    return None if origin.op != "call_function" or not line else (origin.target, line)


def _instead(question: Question, node: Node, other: Node | None, name: str) -> tuple[Kind, str]:
    """Return (kind, words) for another node that is read: of the step before, another pass of a loop, another layer."""
    value, text = question.trial.values[node], f"{name} instead of {question.label(node)}"
    if not is_real(value) or other is None:
        return ("swapped" if is_real(value) else "mask" if value.dtype is torch.bool else "position"), text
    own = question.in_baseline(node)
    ours, theirs = origin_of(own), origin_of(other)
    if ours is theirs:  # two views of one tensor
        views = [f"{op_name(one)}({', '.join(map(shown, constants_of([one])))})" for one in (other, own)]
        return "swapped", f"{views[0]} of {question.maker(ours)} instead of {views[1]}"
    if _made_at(ours) is not None and _made_at(ours) == _made_at(theirs):
        if module_of(ours) != module_of(theirs):
            return "swapped", f"that of another layer is read: {text}"
        is_earlier = theirs < ours
        which = "an earlier" if is_earlier else "a later"
        return "stale" if is_earlier else "swapped", f"that of {which} pass of its loop is read: {text}"
    return ("stale" if is_of_before(question, other) and not is_of_before(question, node) else "swapped"), text


def _operands(question: Question) -> list[Node]:
    """Return the inputs of the piece and the positions that it counts itself, those that are read last first.

    Where an op reads both, positions come before the table that they are looked up in, and what is computed before a
    weight that the candidate has as it is.
    """
    order = {node: place for place, node in enumerate(question.trial.ops)}
    counted = [node for node in question.trial.ops if op_name(node) == "arange"]
    found = [*question.trial.inputs, *counted]
    last = {node: max((order.get(user, -1) for user in node.users), default=-1) for node in found}
    return sorted(found, key=lambda node: (-last[node], not _is_arange(question, node), _is_as_stored(question, node)))


def _is_as_stored(question: Question, node: Node) -> bool:
    """Whether a node is a weight that the candidate reads as well, bit for bit."""
    value = question.trial.values[node]
    if node.name not in question.weights or not isinstance(value, Tensor):
        return False
    alike = (one.detach() for one in question.their_weights.values() if one.shape == value.shape)
    return any(torch.equal(one.to(value.dtype), value) for one in alike)


def _is_arange(question: Question, node: Node) -> bool:
    return op_name(question.in_baseline(node)) == "arange"


def _are_alike(a: Any, b: Any) -> bool:
    return _may_stand_for(a, b) and a.shape == b.shape


def _may_stand_for(a: Any, b: Any) -> bool:
    is_known = isinstance(a, Tensor) and isinstance(b, Tensor) and a.numel() > 0
    return is_known and a.is_floating_point() == b.is_floating_point() and broadcasts_alike(a.shape, b.shape)
