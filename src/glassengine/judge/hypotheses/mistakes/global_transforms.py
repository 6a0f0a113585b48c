"""Mistakes in whole tensors: scaled, in another order, zero, cut off, dropped, rounded to a dtype with fewer bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.judge.hypotheses.mistakes.tensor_roles import PLACING, is_placing
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, called, reading, tensors_of, with_leaves
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Edit, TrialCall, factor_between
from glassengine.judge.site_pairs import maker_of, passes_on
from glassengine.numerics.float64 import double, is_real
from glassengine.numerics.mask_values import sentinel
from glassengine.numerics.orders import called as called_order
from glassengine.numerics.orders import kind_of_shift, order_between
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind

_ORDERED = 1e-3
_PASSES_OF_ORDER = 12
"""How often a tensor is read where its slices are looked for in another one."""
_LEAST_OPS = 3
"""Fewer ops that are done twice have names: a factor, a sum, an activation."""
_ONE = 1e-5
"""A factor nearer to one is none that anybody writes."""
_LEAST = 8
"""Elements below which a part is no evidence."""
_MOST_DROPPED = 0.75
_MOST_NAMES = 3
_WRITES = ("index_copy", "index_put", "slice_scatter", "select_scatter", "scatter", "copy")
"""Ops that put new values beside old ones."""
FILLING = ("masked_fill", "where")
_APART = 16.0
"""Slices are wrong that are this many roundings away."""


def another_tensor(question: Question) -> Iterator[Hypothesis]:
    """Yield: what was made is another tensor of the model, or an input of the op itself."""
    trial, end = question.trial, question.trial.end
    if question.is_another:
        return
    # What a product takes comes out of it by the wrong pair alone.
    read = [] if any(traits_of(node).reads_memory for node in trial.ops) else trial.inputs
    inputs = {question.label(node): trial.values[node] for node in read}
    # Tensors of one model are near each other: what another op of another kind makes is so by the wrong pair.
    alike = {n: v for n, v in question.others.items() if n.rpartition("/")[2].partition(".")[0] == op_name(end)}
    for name, value in {**alike, **inputs}.items():
        if isinstance(value, Tensor) and value.shape == question.actual.shape:
            if name in inputs:
                # What goes in comes out.
                yield Hypothesis(_kind_of_all(question, name), missing_ops(trial.ops, name), {end: value})
            else:
                yield Hypothesis("stale", f"{name} instead of {question.label(end)}", {end: double(value)})


def missing_ops(ops: Sequence[Node], name: str) -> str:
    """Return that ops are missing, so that what they read takes the place of what they make."""
    names = list(dict.fromkeys(called(op_name(op)) for op in ops if not passes_on(op) and maker_of(op) not in ops))
    if not names:
        return f"it is {name}"
    if len(names) > _MOST_NAMES:
        return f"{len(names)} ops from {names[0]} to {names[-1]} are missing: {name} is passed on as it is"
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} missing: {name} is passed on as it is"


def done_twice(question: Question) -> Iterator[Hypothesis]:
    """Yield: what is made is put in once more: it is rotated or normed twice."""
    trial, right = question.trial, question.right
    if not is_real(right) or (len(trial.ops) < _LEAST_OPS and traits_of(trial.end).kind != "norm"):
        return
    for node in trial.inputs:
        value = trial.values[node]
        if is_real(value) and value.shape == right.shape and node.name not in question.weights:
            made = trial.changed({node: right})
            if made is not None:
                label = question.label(node)
                text = f"it is done twice: what is made of {label} takes its place once more"
                yield Hypothesis(_kind_of_all(question, label), text, {trial.end: made})


def _kind_of_all(question: Question, name: str) -> Kind:
    """Return the kind of the mistake that all that is done to a tensor is not, or twice: positions may be put in."""
    others = [node for node in question.trial.inputs if question.label(node) != name]
    is_turned = any(is_placing(question.in_baseline(node)) for node in others)
    return "position" if is_turned or any(op_name(node) in PLACING for node in question.trial.ops) else "other"


def rearranged(question: Question) -> Iterator[Hypothesis]:
    """Yield: the right values, in another order along one axis, or with two axes exchanged."""
    right, actual, end = question.right, question.actual, question.trial.end
    if not _is_comparable(question, 2, is_finite=False):
        return
    for axis in reversed(range(right.dim())):
        question.trial.budget.spend_passes(_PASSES_OF_ORDER, right)
        order = order_between(right.double(), actual.double(), axis, max(16 * question.noise, _ORDERED))
        if order is not None:
            kind, how = called_order(order)
            kind = kind_of_shift(right.dim(), axis, is_weight=False) if kind == "position" else kind
            text = f"the right values {how}, along axis {axis} (of {right.shape[axis]})"
            yield Hypothesis(kind, text, {end: right.index_select(axis, order)}, axis=axis)
    for a in range(right.dim()):
        for b in range(a):
            if right.shape[a] == right.shape[b] > 1:
                text = f"the right values with axes {b} and {a} transposed"
                yield Hypothesis("transposed", text, {end: right.transpose(a, b)})


def scaled(question: Question) -> Iterator[Hypothesis]:
    """Yield: the right values times a number, or plus one."""
    right, actual, end = question.right, question.actual, question.trial.end
    if not _is_comparable(question, 4, is_finite=False):
        return
    keep = (right.abs() < sentinel(right.dtype)) & (actual.abs() < sentinel(actual.dtype))
    keep = keep if question.valid is None else keep & question.valid
    a, b = right[keep], actual.double()[keep]
    if a.numel() < 4:
        return
    factor = factor_between(a, b, 1.0)
    if abs(factor - 1) > _ONE and factor:  # what makes zeros of all values is no factor that anybody wrote
        sign = abs(factor + 1) < 1e-6
        text = "the right values with the other sign" if sign else f"{factor:.6g} times the right values"
        factor = -1.0 if sign else factor
        yield Hypothesis("scale", text, {end: right * factor}, "factor", (1.0, factor))
    offset = float((b - a).mean())
    if abs(offset) > _ONE * float(a.square().mean().sqrt()):
        yield Hypothesis("other", f"the right values plus {offset:.6g}", {end: right + offset}, "offset", (0.0, offset))


def _is_comparable(question: Question, least: int, *, is_finite: bool) -> bool:
    """Whether enough numbers were made, of the right shape."""
    right, actual = question.right, question.actual
    if right.shape != actual.shape or not is_real(right) or not is_real(actual) or right.numel() < least:
        return False
    return not is_finite or bool(actual.isfinite().all())


def parts(question: Question) -> Iterator[Hypothesis]:
    """Yield: some indices of one axis are zero, or the right values times a number; the others are right."""
    right, actual, end = question.right, question.actual, question.trial.end
    if not _is_comparable(question, _LEAST, is_finite=True):
        return
    error = (actual - right).abs()
    error = error if question.valid is None else torch.where(question.valid, error, 0.0)
    size = float(right[right.abs() < sentinel(right.dtype)].square().mean().sqrt())
    is_wrong = error > _APART * question.noise * max(size, 1e-300)
    for axis in range(right.dim()):
        where = is_wrong.movedim(axis, 0).flatten(1).any(1) if right.dim() > 1 else is_wrong
        count = int(where.sum())
        if not 0 < count <= right.shape[axis] // 2:
            continue
        index = where.nonzero().flatten()
        a, b = right.index_select(axis, index), actual.index_select(axis, index)
        is_zero = not bool(b.any())
        factor = 0.0 if is_zero else factor_between(a, b)
        text = f"index {int(index[0])} of axis {axis} is " if count == 1 else ""
        text = text or f"{count} of {right.shape[axis]} indices of axis {axis} are "
        text += "zero" if is_zero else f"{factor:.6g} times the right values"
        kind: Kind = "stale" if op_name(end) in _WRITES else "other" if is_zero else "scale"
        changed = right.clone().index_copy_(axis, index, a * factor)
        yield Hypothesis(kind, text, {end: changed}, "factor", (1.0, factor), axis)


def cut_off(question: Question) -> Iterator[Hypothesis]:
    """Yield: the right values, cut off at a number below, above or both."""
    right, actual, end = question.right, question.actual, question.trial.end
    if not _is_comparable(question, _LEAST, is_finite=True):
        return
    low, high = float(actual.min()), float(actual.max())
    # One number everywhere is nothing of the right values.
    for least, most in ((low, high), (None, high), (low, None)) if low != high else ():
        made = right.clamp(least, most)
        beyond = (right - made).abs() > _APART * question.noise * made.abs()
        below, above = right[beyond & (right < made)], right[beyond & (right > made)]
        # One number is the fill of a mask, which nothing cuts off.
        outside = torch.cat([below, above])
        is_one_number = not len(outside) or bool(outside.min() == outside.max())
        if is_one_number or (least is not None and not len(below)) or (most is not None and not len(above)):
            continue
        ends = (("below", least), ("above", most))
        said = " and ".join(f"{word} {value:.6g}" for word, value in ends if value is not None)
        what = "the result" if traits_of(end).kind == "reshape" else f"the result of {op_name(end)}"
        yield Hypothesis("other", f"{what} is cut off {said}", {end: made}, "clamp", (None, [least, most]))


def filled(question: Question) -> Iterator[Hypothesis]:
    """Yield: what a mask hides is filled with another number."""
    right, actual, end = question.right, question.actual, question.trial.end
    has_mask = any(op_name(node) in FILLING for node in question.trial.ops)
    if not has_mask or not _is_comparable(question, _LEAST, is_finite=False):
        return
    least = right.min()
    hidden = right == least
    if int(hidden.sum()) < 2 or bool(hidden.all()):
        return
    found = actual[hidden].max()
    if bool(found == least) or bool(found != actual[hidden].min()):
        return
    text = f"what the mask hides is {float(found):.6g} in the candidate, {float(least):.6g} in the baseline"
    changed = {end: right.masked_fill(hidden, float(found))}
    yield Hypothesis("mask", text, changed, "value", (float(least), float(found)))


def dropped(question: Question) -> Iterator[Hypothesis]:
    """Yield: some elements are zero, wherever they are, and the others scaled up: a dropout that was left on."""
    right, actual, end = question.right, question.actual, question.trial.end
    if not _is_comparable(question, 4 * _LEAST, is_finite=False):
        return
    lost = (actual == 0) & (right != 0)
    share = float(lost.double().mean())
    if not 0 < share <= _MOST_DROPPED:
        return
    kept = ~lost & (right.abs() < sentinel(right.dtype))
    factor = factor_between(right[kept], actual.double()[kept])
    if abs(factor - 1) <= 0.01 or not math.isfinite(factor):
        return  # an activation that cuts off makes zeros as well, but scales nothing
    made = torch.where(lost, 0.0, right * factor)
    if lost.shape[0] > 1 and bool((lost == lost[:1]).all()):
        # Chance does not choose the same elements in every row.
        text = f"{factor:.6g} times the right values, where a mask does not make zeros of them"
        yield Hypothesis("scale", text, {end: made}, "factor", (1.0, factor))
    elif factor > 1:
        text = f"a dropout is on: {share:.1%} of the elements are zero, the others {factor:.4g} times"
        yield Hypothesis("other", text, {end: made}, "p", (0.0, 1 - 1 / factor))


def zeroed(question: Question) -> Iterator[Hypothesis]:
    """Yield: the first or the last slice of what a product reads is zero: a position that was never written."""
    trial = question.trial
    for node in reversed(trial.ops):
        for place, source in tensors_of(trial, node) if traits_of(node).reads_memory else ():
            value = trial.values[source]
            if not is_real(value) or source.name in question.weights:
                continue
            for axis in range(1, value.dim() - 1):
                for index, which in ((0, "first"), (-1, "last")) if value.shape[axis] > 1 else ():
                    changed = value.clone()
                    changed.select(axis, index).zero_()
                    text = f"the {which} of axis {axis} of {question.label(source)} is zero"
                    yield Hypothesis("other", text, {node: reading({place: changed})}, axis=axis)


_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
_TF32 = 1 << 11
"""Steps of a mantissa between a half and one."""

Rounding = Callable[[Tensor], Tensor]


def coarser(question: Question) -> Iterator[Hypothesis]:
    """Yield: an operand, all operands or the result of an op is rounded to a dtype with fewer bits."""
    trial = question.trial
    for node, _ in trial.real_ops():
        if traits_of(node).kind == "reshape":
            continue
        tensors = [(place, source) for place, source in tensors_of(trial, node) if is_real(trial.values[source])]
        every = [place for place, _ in tensors]
        name = op_name(node)
        for word, rounded in _roundings(question):
            result = {node: lambda call, rounded=rounded: rounded(call.value)}
            yield Hypothesis("dtype", f"the result of {name} is rounded to {word}", result, "dtype")
            computed = {node: _of_operands(every, rounded, rounded)}
            yield Hypothesis("dtype", f"{name} is computed in {word}", computed, "dtype")
            chosen = [(question.label(source), [place]) for place, source in tensors]
            for what, places in chosen if len(chosen) == 1 else [*chosen, ("what it reads", every)]:
                text = f"{what} is rounded to {word} before {name}"
                yield Hypothesis("dtype", text, {node: _of_operands(places, rounded)}, "dtype")


def in_its_own_dtype(question: Question) -> Iterator[Hypothesis]:
    """Yield: what the baseline computes in a finer dtype is computed in the candidate's own."""
    if question.native is not None:
        text = "computed in the dtype of the model: the baseline casts to a finer one first"
        yield Hypothesis("dtype", text, {question.trial.end: question.native})


def _of_operands(places: list[int], rounded: Rounding, finished: Rounding = lambda made: made) -> Edit:
    def edit(call: TrialCall) -> Any:
        return finished(with_leaves(call, {place: rounded(call.leaves[place]) for place in places}))

    return edit


def _roundings(question: Question) -> Iterator[tuple[str, Rounding]]:
    """Yield (name, function) of the dtypes that are coarser than the rounding of the piece."""
    for dtype in _DTYPES:
        if torch.finfo(dtype).eps > 2 * question.noise:
            yield str(dtype).removeprefix("torch."), partial(_through, dtype=dtype)
    if 2 * question.noise < 2.0**-10:
        yield "TensorFloat-32", lambda value: to_tf32(value, torch.round)
        yield "TensorFloat-32, towards zero", lambda value: to_tf32(value, torch.trunc)


def _through(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.float().to(dtype).double()


def to_tf32(value: Tensor, rounded: Rounding = torch.round) -> Tensor:
    """Return numbers as TensorFloat-32 has them: with ten bits of the mantissa."""
    mantissa, exponent = torch.frexp(value)
    return torch.ldexp(rounded(mantissa * _TF32) / _TF32, exponent)
