"""Other ops instead of an op: sums, trigonometry, norms and variances, convolutions, resizing.

Ops are named here, as nowhere else in the judge: which op people take for which is no trait of either.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from glassengine.judge.hypotheses.mistakes.activations import Pointwise
from glassengine.judge.hypotheses.mistakes.candidate_ops import in_place_of
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, bound, literals_of, reading, tensors_of
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Edit, TrialCall, edited
from glassengine.judge.site_pairs import argument_names
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind

_PAIRS = (("sin", "cos"), ("mean", "sum"), ("amax", "mean"), ("amin", "amax"), ("std", "var"), ("sqrt", "rsqrt"))
_COMPARED = (("lt", "le"), ("gt", "ge"), ("lt", "gt"), ("le", "ge"), ("eq", "ne"))
_KINDS_OF_PAIRS: dict[tuple[str, str], Kind] = {
    **dict.fromkeys(_COMPARED, "mask"),
    ("sin", "cos"): "position",
    ("mean", "sum"): "scale",  # by a number of terms
}
_PADDING = ("reflect", "replicate", "circular")
_MODES: dict[int, tuple[tuple[str, bool | None], ...]] = {
    1: (("nearest", None), ("linear", False), ("linear", True)),
    2: (
        ("nearest", None),
        ("nearest-exact", None),
        ("bilinear", False),
        ("bilinear", True),
        ("bicubic", False),
        ("bicubic", True),
        ("area", None),
    ),
    3: (("nearest", None), ("trilinear", False), ("trilinear", True)),
}
_LARGEST_EPS = 1e-2

Other = tuple[Kind, str, Edit]
"""Kind of a mistake, its words, and what the op makes instead."""


def other_ops(question: Question) -> Iterator[Hypothesis]:
    """Yield: the op that people confuse with this one."""
    for node in reversed(question.trial.ops):
        for kind, text, edit in _other_ops(question, node):
            yield Hypothesis(kind, text, {node: edit})
        name = op_name(node)
        if name in ("sqrt", "rsqrt"):
            yield from _eps_outside(question, node)
        if name in ("layer_norm", "rms_norm"):
            yield from _over_other_axes(question, node)


def _has_the_same(question: Question, name: str, other: str) -> bool:
    """Whether the candidate's program has an op as often as the baseline's, and the one confused with it no oftener."""
    if not question.theirs or not question.named:
        return False
    programs = question.theirs[-1].graph.nodes, question.named.values()
    there, here = (Counter(op_name(node) for node in nodes if node.op == "call_function") for nodes in programs)
    return there[name] >= here[name] and there[other] <= here[other]


def _other_ops(question: Question, node: Node) -> Iterator[Other]:
    name = op_name(node)
    for pair in (*_PAIRS, *_COMPARED):
        other = pair[name == pair[0]]
        if name in pair and not _has_the_same(question, name, other):
            yield _KINDS_OF_PAIRS.get(pair, "other"), f"{other} instead of {name}", _by_name(other)
    if name in ("max", "min") and isinstance(question.trial.values[node], (tuple, list)):
        for other in ("mean", "min" if name == "max" else "max"):
            yield "other", f"{other} instead of {name}", _along(other)
    if name in ("layer_norm", "rms_norm"):
        yield from _other_norms(node)
    if "batch_norm" in name:
        yield from _batch_norms(question, node)
    if name.startswith("constant_pad"):
        for mode in _PADDING:
            yield "other", f"padding by {mode} in the candidate, by a constant in the baseline", _padded(mode)
    if name in ("conv1d", "conv2d", "conv3d"):
        yield from _convolutions(question, node)
    if re.fullmatch("(adaptive_)?(max|avg)_pool[123]d", name):
        other = name.replace("max", "avg") if "max" in name else name.replace("avg", "max")
        yield "other", f"{other} instead of {name}", lambda call: getattr(F, other)(call.args[0], *call.args[1:4])
    if "upsample" in name:
        yield from _resized(question, node)


def _along(name: str) -> Edit:
    return lambda call: in_place_of(call, getattr(torch, name)(*call.args, **call.kwargs))


def _by_name(name: str) -> Edit:
    def edit(call: TrialCall) -> Any:
        return getattr(torch, name)(*call.args, **{key: value for key, value in call.kwargs.items() if key != "dtype"})

    return edit


def _padded(mode: str) -> Edit:
    def edit(call: TrialCall) -> Any:
        given, pad = call.args[0], list(call.args[1])
        # Modes but the constant one need each axis, from the last one on.
        while len(pad) > 2 and not any(pad[-2:]):
            pad = pad[:-2]
        lead = given.dim() - len(pad) // 2
        flat = given.reshape(-1, 1, *given.shape[lead:]) if lead != 2 else given
        made = F.pad(flat, pad, mode=mode)
        return made.reshape(*given.shape[:lead], *made.shape[-(given.dim() - lead) :])

    return edit


def _convolutions(question: Question, node: Node) -> Iterator[Other]:
    args, _ = bound(node.target, node.args, node.kwargs)
    padding = args[4] if len(args) > 4 else 0
    weight = question.trial.values.get(args[1])
    if weight is None or isinstance(padding, str):
        return
    axes, name = tuple(range(2, weight.dim())), question.label(args[1])
    if any(weight.shape[axis] > 1 for axis in axes):
        yield "permuted", f"the kernel {name} is flipped", _with_weight(lambda w: w.flip(axes))
    if len(axes) == 2 and weight.shape[2] == weight.shape[3]:
        text = f"height and width of the kernel {name} are transposed"
        yield "transposed", text, _with_weight(lambda w: w.transpose(2, 3))
    if weight.shape[0] == weight.shape[1]:
        text = f"input and output of the kernel {name} are transposed"
        yield "transposed", text, _with_weight(lambda w: w.transpose(0, 1))
    sizes = _each(padding, len(axes))
    if not any(sizes):
        return
    for mode in _PADDING:
        both = [(size, size) for size in sizes]
        yield "other", f"padding by {mode} in the candidate, by zeros in the baseline", _padded_before(both, mode)
    if any(size > 1 for size in args[3]):
        yield "other", "padding as TensorFlow's SAME: no more before than behind", _padded_as_same
    if len(axes) == 1:
        for sides, where in (((2 * sizes[0], 0), "left"), ((0, 2 * sizes[0]), "right")):
            yield "position", f"all padding is on the {where} side", _padded_before([sides], "constant")


def _each(sizes: int | Sequence[int], number: int) -> list[int]:
    """Return a size for each of some axes, where one may stand for all."""
    return [sizes] * number if isinstance(sizes, int) else list(sizes) * (number // len(sizes))


def _with_weight(change: Pointwise) -> Edit:
    return lambda call: call.target(call.args[0], change(call.args[1]), *call.args[2:], **call.kwargs)


def _padded_before(sizes: Sequence[tuple[int, int]], mode: str) -> Edit:
    def edit(call: TrialCall) -> Any:
        args, kwargs = bound(call.node.target, call.args, call.kwargs)
        given = F.pad(args[0], [side for pair in reversed(sizes) for side in pair], mode=mode)
        return call.target(given, *args[1:4], [0] * len(sizes), *args[5:], **kwargs)

    return edit


def _padded_as_same(call: TrialCall) -> Any:
    """Pad so that there are as many results as strides in what is given, and what is odd comes behind."""
    args, _ = bound(call.node.target, call.args, call.kwargs)
    shapes = args[0].shape[2:], args[1].shape[2:]
    sizes = []
    for size, kernel, stride, step in zip(
        *shapes, *(_each(a, len(shapes[1])) for a in (args[3], args[5])), strict=True
    ):
        missing = max((math.ceil(size / stride) - 1) * stride + (kernel - 1) * step + 1 - size, 0)
        sizes.append((missing // 2, missing - missing // 2))
    return edited(call, _padded_before(sizes, "constant"))


def _resized(question: Question, node: Node) -> Iterator[Other]:
    made, given = question.trial.tensor(node), question.trial.tensor(node.args[0])
    if made is None or given is None or given.dim() < 3:
        return
    size = tuple(made.shape[2:])
    for mode, corners in _MODES.get(len(size), ()):
        corner = "" if corners is None else f", align_corners={corners}"
        text = f"the candidate resizes by {mode}{corner}, the baseline by {op_name(node)}"
        yield "other", text, _interpolated(size, mode, corners)


def _interpolated(size: tuple[int, ...], mode: str, corners: bool | None) -> Edit:
    return lambda call: F.interpolate(call.args[0], size, mode=mode, align_corners=corners)


def _other_norms(node: Node) -> Iterator[Other]:
    """Yield what a norm may compute instead."""
    is_centered = op_name(node) == "layer_norm"
    if is_centered:
        yield "other", "the mean is not subtracted: rms_norm instead of layer_norm", _norm(node, is_centered=False)
    else:
        yield "other", "the mean is subtracted: layer_norm instead of rms_norm", _norm(node, is_centered=True)
    yield "other", "the variance is unbiased: of n - 1", _norm(node, is_centered=is_centered, is_unbiased=True)
    yield "eps", "eps is added to the root, not below it", _norm(node, is_centered=is_centered, is_eps_outside=True)


def _over_other_axes(question: Question, node: Node) -> Iterator[Hypothesis]:
    """Yield: the mean of a norm, its spread or both are taken over another axis."""
    args, _ = bound(node.target, node.args, dict(node.kwargs))
    given = question.trial.tensor(args[0])
    is_centered = op_name(node) == "layer_norm"
    for axis in range(given.dim() - 1) if given is not None and len(args[1]) == 1 else ():
        if given is None or given.shape[axis] < 2:
            continue
        for means, spreads, what in ((axis, -1, "the mean"), (-1, axis, "the spread"), (axis, axis, "all")):
            if means == -1 or is_centered:
                text = f"{op_name(node)}: {what} is over axis {axis} of {given.dim()}, not over the last one"
                edit = _norm(node, (means, spreads), is_centered=is_centered)
                yield Hypothesis("transposed", text, {node: edit}, axis=axis)


def _norm(
    node: Node, over: Sequence[Any] = (), *, is_centered: bool, is_unbiased: bool = False, is_eps_outside: bool = False
) -> Edit:
    """Return a norm with its mean and its spread `over` other axes than those of the node, or computed otherwise."""

    def edit(call: TrialCall) -> Any:
        args, _ = bound(call.node.target, call.args, call.kwargs)
        x, shape, weight = args[:3]
        bias, eps = (args[3], args[4]) if op_name(node) == "layer_norm" else (None, args[3] or 1e-6)
        means, spreads = over or [tuple(range(-len(shape), 0))] * 2
        x = x - x.mean(means, keepdim=True) if is_centered else x
        squares = x.square()
        terms = squares.numel() // squares.sum(spreads).numel() - is_unbiased
        spread = squares.sum(spreads, keepdim=True) / terms
        made = x / (spread.sqrt() + eps if is_eps_outside else (spread + eps).sqrt())
        made = made if weight is None else made * weight
        return made if bias is None else made + bias

    return edit


def _eps_outside(question: Question, node: Node) -> Iterator[Hypothesis]:
    """Yield an epsilon that is added to a root instead of below it, where a norm is written out."""
    source = node.args[0]
    if not isinstance(source, Node) or op_name(source) != "add" or source not in question.trial.values:
        return
    for literal in literals_of(source):
        if literal.name == "other" and isinstance(literal.value, float) and 0 < literal.value <= _LARGEST_EPS:

            def edit(call: TrialCall, eps: float = literal.value) -> Any:
                root = (call.args[0] - eps).clamp(min=0).sqrt() + eps
                return 1 / root if op_name(node) == "rsqrt" else root

            yield Hypothesis("eps", "eps is added to the root, not below it", {node: edit}, "eps")


def _batch_norms(question: Question, node: Node) -> Iterator[Other]:
    """Yield statistics of a batch norm that are left out, exchanged, or not what they are taken for."""
    names, leaves = argument_names(node.target), dict(tensors_of(question.trial, node))
    places = {names[place]: place for place in leaves if place < len(names)}
    mean, variance = places.get("running_mean"), places.get("running_var")
    if mean is None or variance is None:
        return
    of_mean, of_variance = (question.trial.values[leaves[place]] for place in (mean, variance))
    eps = next((float(item.value) for item in literals_of(node) if item.name == "eps"), 0.0)
    zeros, ones = {mean: torch.zeros_like(of_mean)}, {variance: torch.ones_like(of_variance)}
    yield "other", "the running mean is not subtracted", reading(zeros)
    yield "other", "it is not divided by the running variance", reading(ones)
    squared = {variance: (of_variance + eps).square() - eps}
    yield "other", "it is divided by the running variance, not by its root", reading(squared)
    yield "other", "the running variance is not used, and the mean neither", reading(zeros | ones)
    given = question.trial.tensor(node.args[0])
    if given is not None and given.dim() > 1:
        axes = [axis for axis in range(given.dim()) if axis != 1]
        text = "statistics of the batch, not those that were learned: a batch norm in training mode"
        yield "other", text, reading({mean: given.mean(axes), variance: given.var(axes, correction=0)})


def variances(question: Question) -> Iterator[Hypothesis]:
    """Yield: n - 1 instead of n, in a variance that is one op or a mean of squares."""
    trial = question.trial
    for node in reversed(trial.ops):
        name, tensors, made = op_name(node), tensors_of(trial, node), trial.tensor(node)
        if not tensors or made is None or not made.numel() or name not in ("var", "std", "mean", "var_mean"):
            continue
        terms = trial.values[tensors[0][1]].numel() / made.numel()
        if terms <= 1:
            continue
        if name == "mean":
            factors = {"the mean is of n - 1: the variance is unbiased": terms / (terms - 1)}
        else:
            power = 0.5 if name == "std" else 1.0
            factors = {
                f"{name} is biased in the candidate: it divides by n": ((terms - 1) / terms) ** power,
                f"{name} is unbiased in the candidate: it divides by n - 1": (terms / (terms - 1)) ** power,
            }
        for text, factor in factors.items():
            yield Hypothesis("other", text, {node: _times(factor)})


def _times(factor: float) -> Edit:
    return lambda call: call.value * factor
