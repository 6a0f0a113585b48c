"""Other ops instead of an op: sums, trigonometry, norms and variances, convolutions, resizing.

Ops are named here, as nowhere else in the judge: which op people take for which is no trait of either.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from glassengine.judge.graphs.by_name import argument_names
from glassengine.judge.hypotheses.mistakes.activations import Pointwise
from glassengine.judge.hypotheses.trials.hypothesis import (
    Hypothesis,
    bound,
    literals_of,
    tensors_of,
    with_leaves,
)
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Call
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind

_PAIRS = (("sin", "cos"), ("mean", "sum"), ("amax", "mean"), ("amin", "amax"), ("std", "var"), ("sqrt", "rsqrt"))
_COMPARED = (("lt", "le"), ("gt", "ge"), ("lt", "gt"), ("le", "ge"), ("eq", "ne"))
_KINDS_OF_PAIRS: dict[tuple[str, str], Kind] = {
    **dict.fromkeys(_COMPARED, "mask"),
    ("sin", "cos"): "position",
    ("mean", "sum"): "scale",  # by a number of terms
}


def other_ops(question: Question) -> Iterator[Hypothesis]:
    """Yield: the op that people confuse with this one."""
    trial = question.trial
    for node in reversed(trial.ops):
        name = op_name(node)
        for pair in (*_PAIRS, *_COMPARED):
            if name in pair:
                other = pair[1 - pair.index(name)]
                yield Hypothesis(
                    _KINDS_OF_PAIRS.get(pair, "other"), f"{other} instead of {name}", {node: _by_name(other)}
                )
        if name in ("max", "min") and isinstance(trial.values[node], (tuple, list)):
            for other in ("mean", "min" if name == "max" else "max"):
                yield Hypothesis("other", f"{other} instead of {name}", {node: _along(other)})
        if name in ("sqrt", "rsqrt"):
            yield from eps_outside(question, node)
        if name in ("layer_norm", "rms_norm"):
            for text, edit in other_norms(node):
                yield Hypothesis("eps" if text.startswith("eps") else "other", text, {node: edit})
            yield from over_other_axes(question, node)
        if "batch_norm" in name:
            yield from batch_norms(question, node)
        if name.startswith("constant_pad"):
            for mode in ("reflect", "replicate", "circular"):
                yield Hypothesis(
                    "other", f"padding by {mode} in the candidate, by a constant here", {node: _padded(mode)}
                )
        if name in ("conv1d", "conv2d", "conv3d"):
            yield from _convolutions(question, node)
        if re.fullmatch("(adaptive_)?(max|avg)_pool[123]d", name):
            other = name.replace("max", "avg") if "max" in name else name.replace("avg", "max")
            yield Hypothesis("other", f"{other} instead of {name}", {node: _pooled(other)})
        if "upsample" in name:
            yield from _resized(question, node)


def _along(name: str) -> Any:
    def edit(call: Call) -> Any:
        """The largest values along an axis come with their places, which are left as they are."""
        made = getattr(torch, name)(*call.args, **call.kwargs)
        return (made if isinstance(made, torch.Tensor) else made[0], *call.value[1:])

    return edit


def _by_name(name: str) -> Any:
    def edit(call: Call) -> Any:
        args, kwargs = call.args, {key: value for key, value in call.kwargs.items() if key != "dtype"}
        return getattr(torch, name)(*args, **kwargs)

    return edit


def _padded(mode: str) -> Any:
    def edit(call: Call) -> Any:
        given, pad = call.args[0], list(call.args[1])
        # Modes but the constant one need each axis, from the last one on.
        while len(pad) > 2 and not any(pad[-2:]):
            pad = pad[:-2]
        lead = given.dim() - len(pad) // 2
        flat = given.reshape(-1, 1, *given.shape[lead:]) if lead != 2 else given
        made = F.pad(flat, pad, mode=mode)
        return made.reshape(*given.shape[:lead], *made.shape[-(given.dim() - lead) :])

    return edit


def _convolutions(question: Question, node: Node) -> Iterator[Hypothesis]:
    args, _ = bound(node.target, node.args, node.kwargs)
    padding = args[4] if len(args) > 4 else 0
    weight = question.trial.values.get(args[1])
    if weight is None or isinstance(padding, str):
        return
    spatial = weight.dim() - 2
    axes = tuple(range(2, weight.dim()))
    name = question.label(args[1])
    if any(weight.shape[axis] > 1 for axis in axes):
        yield Hypothesis("permuted", f"the kernel {name} is flipped", {node: _with_weight(lambda w: w.flip(axes))})
    if spatial == 2 and weight.shape[2] == weight.shape[3]:
        text = f"height and width of the kernel {name} are transposed"
        yield Hypothesis("transposed", text, {node: _with_weight(lambda w: w.transpose(2, 3))})
    if weight.shape[0] == weight.shape[1]:
        text = f"input and output of the kernel {name} are transposed"
        yield Hypothesis("transposed", text, {node: _with_weight(lambda w: w.transpose(0, 1))})
    sizes = [padding] * spatial if isinstance(padding, int) else list(padding) * (spatial // len(padding))
    if not any(sizes):
        return
    for mode in ("reflect", "replicate", "circular"):
        text = f"padding by {mode} in the candidate, by zeros here"
        yield Hypothesis("other", text, {node: _padded_before(sizes, mode)})
    if any(size > 1 for size in args[3]):
        text = "padding as TensorFlow's SAME: no more before than behind"
        yield Hypothesis("other", text, {node: _padded_as_same(spatial)})
    if spatial == 1:
        for left, right, where in ((2 * sizes[0], 0, "left"), (0, 2 * sizes[0], "right")):
            text = f"all padding is on the {where} side"
            yield Hypothesis("position", text, {node: _padded_before([(left, right)], "constant")})


def _with_weight(change: Pointwise) -> Any:
    return lambda call: call.target(call.args[0], change(call.args[1]), *call.args[2:], **call.kwargs)


def _padded_before(sizes: list[Any], mode: str) -> Any:
    def edit(call: Call) -> Any:
        args, kwargs = bound(call.node.target, call.args, call.kwargs)
        both = [size if isinstance(size, tuple) else (size, size) for size in reversed(sizes)]
        given = F.pad(args[0], [side for pair in both for side in pair], mode=mode)
        return call.target(given, *args[1:4], [0] * len(sizes), *args[5:], **kwargs)

    return edit


def _padded_as_same(spatial: int) -> Any:
    """Pad so that there are as many results as strides in what is given, and what is odd comes behind."""

    def edit(call: Call) -> Any:
        args, _ = bound(call.node.target, call.args, call.kwargs)
        strides, steps = (list(each) * (spatial // len(each)) for each in (args[3], args[5]))
        sizes = []
        for size, kernel, stride, step in zip(args[0].shape[2:], args[1].shape[2:], strides, steps, strict=True):
            missing = max((math.ceil(size / stride) - 1) * stride + (kernel - 1) * step + 1 - size, 0)
            sizes.append((missing // 2, missing - missing // 2))
        return _padded_before(sizes, "constant")(call)

    return edit


def _pooled(name: str) -> Any:
    def edit(call: Call) -> Any:
        sizes = list(call.args[1:4])
        return getattr(F, name)(call.args[0], *sizes)

    return edit


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


def _resized(question: Question, node: Node) -> Iterator[Hypothesis]:
    made = question.trial.values[node]
    given = question.trial.values.get(node.args[0]) if isinstance(node.args[0], Node) else None
    if not isinstance(made, torch.Tensor) or not isinstance(given, torch.Tensor) or given.dim() < 3:
        return
    size = tuple(made.shape[2:])
    for mode, corners in _MODES.get(len(size), ()):
        corner = "" if corners is None else f", align_corners={corners}"
        text = f"the candidate resizes by {mode}{corner}, the baseline by {op_name(node)}"
        yield Hypothesis("other", text, {node: _interpolated(size, mode, corners)})


def _interpolated(size: tuple[int, ...], mode: str, corners: bool | None) -> Any:
    return lambda call: F.interpolate(call.args[0], size, mode=mode, align_corners=corners)


_LARGEST_EPS = 1e-2


def other_norms(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield (words, edit) for what a norm may compute instead."""
    is_centered = op_name(node) == "layer_norm"

    def normed(*, center: bool, is_unbiased: bool = False, eps_outside: bool = False) -> Any:
        def edit(call: Call) -> Any:
            args, _ = bound(node.target, call.args, call.kwargs)
            x, shape, weight = args[:3]
            bias, eps = (args[3], args[4]) if is_centered else (None, args[3] or 1e-6)
            axes = tuple(range(-len(shape), 0))
            x = x - x.mean(axes, keepdim=True) if center else x
            terms = math.prod(shape) - is_unbiased
            spread = x.square().sum(axes, keepdim=True) / terms
            made = x / (spread.sqrt() + eps if eps_outside else (spread + eps).sqrt())
            made = made if weight is None else made * weight
            return made if bias is None else made + bias

        return edit

    if is_centered:
        yield "the mean is not subtracted: rms_norm instead of layer_norm", normed(center=False)
    else:
        yield "the mean is subtracted: layer_norm instead of rms_norm", normed(center=True)
    yield "the variance is unbiased: of n - 1", normed(center=is_centered, is_unbiased=True)
    yield "eps is added to the root, not below it", normed(center=is_centered, eps_outside=True)


def over_other_axes(question: Question, node: Node) -> Iterator[Hypothesis]:
    """Yield: the mean of a norm, its spread or both are taken over another axis."""
    args, _ = bound(node.target, node.args, dict(node.kwargs))
    given = question.trial.values.get(args[0]) if isinstance(args[0], Node) else None
    if not isinstance(given, torch.Tensor) or len(args[1]) != 1:
        return
    is_centered = op_name(node) == "layer_norm"
    for axis in range(given.dim() - 1):
        if given.shape[axis] < 2:
            continue
        for means, spreads, what in ((axis, -1, "the mean"), (-1, axis, "the spread"), (axis, axis, "all")):
            if means != -1 and not is_centered:
                continue
            text = f"{op_name(node)}: {what} is over axis {axis} of {given.dim()}, not over the last one"
            yield Hypothesis("transposed", text, {node: _over(means, spreads, is_centered)}, axis=axis)


def _over(means: int, spreads: int, is_centered: bool) -> Any:
    def edit(call: Call) -> Any:
        args, _ = bound(call.node.target, call.args, call.kwargs)
        x, _, weight = args[:3]
        bias, eps = (args[3], args[4]) if is_centered else (None, args[3] or 1e-6)
        x = x - x.mean(means, keepdim=True) if is_centered else x
        made = x / (x.square().mean(spreads, keepdim=True) + eps).sqrt()
        made = made if weight is None else made * weight
        return made if bias is None else made + bias

    return edit


def eps_outside(question: Question, node: Node) -> Iterator[Hypothesis]:
    """An epsilon that is added to a root instead of below it, where a norm is written out."""
    source = node.args[0]
    if not isinstance(source, Node) or op_name(source) != "add" or source not in question.trial.values:
        return
    for literal in literals_of(source):
        if literal.name == "other" and isinstance(literal.value, float) and 0 < literal.value <= _LARGEST_EPS:
            eps, is_turned = literal.value, op_name(node) == "rsqrt"

            def edit(call: Call, eps: float = eps, is_turned: bool = is_turned) -> Any:
                root = (call.args[0] - eps).clamp(min=0).sqrt() + eps
                return 1 / root if is_turned else root

            yield Hypothesis("eps", "eps is added to the root, not below it", {node: edit}, "eps")


def batch_norms(question: Question, node: Node) -> Iterator[Hypothesis]:
    """Statistics of a batch norm that are left out, exchanged, or not what they are taken for."""
    names = argument_names(node.target)
    places = {names[place]: place for place, _ in tensors_of(question.trial, node) if place < len(names)}
    mean, variance = places.get("running_mean"), places.get("running_var")
    if mean is None or variance is None:
        return
    leaves = dict(tensors_of(question.trial, node))
    own = [question.trial.values[leaves[place]] for place in (mean, variance)]
    eps = next((float(item.value) for item in literals_of(node) if item.name == "eps"), 0.0)
    made: dict[str, dict[int, Any]] = {
        "the running mean is not subtracted": {mean: torch.zeros_like(own[0])},
        "it is not divided by the running variance": {variance: torch.ones_like(own[1])},
        "it is divided by the running variance, not by its root": {variance: (own[1] + eps).square() - eps},
        "the running variance is not used, and the mean neither": {
            mean: torch.zeros_like(own[0]),
            variance: torch.ones_like(own[1]),
        },
    }
    for text, changed in made.items():
        yield Hypothesis("other", text, {node: _with(changed)})
    given = question.trial.values.get(node.args[0]) if isinstance(node.args[0], Node) else None
    if isinstance(given, torch.Tensor) and given.dim() > 1:
        axes = [axis for axis in range(given.dim()) if axis != 1]
        changed = {mean: given.mean(axes), variance: given.var(axes, correction=0)}
        text = "statistics of the batch, not those that were learned: a batch norm in training mode"
        yield Hypothesis("other", text, {node: _with(changed)})


def _with(changed: dict[int, Any]) -> Any:
    return lambda call: with_leaves(call, changed)


def variances(question: Question) -> Iterator[Hypothesis]:
    """Yield: n - 1 instead of n, in a variance that is one op or a mean of squares."""
    trial = question.trial
    for node in reversed(trial.ops):
        name = op_name(node)
        tensors = tensors_of(trial, node)
        if not tensors or name not in ("var", "std", "mean", "var_mean"):
            continue
        given, made = trial.values[tensors[0][1]], trial.values[node]
        if not isinstance(made, torch.Tensor) or not made.numel():
            continue
        terms = given.numel() / made.numel()
        if terms <= 1:
            continue
        if name == "mean":
            text = "the mean is of n - 1: the variance is unbiased"
            yield Hypothesis("other", text, {node: _times(terms / (terms - 1))})
        else:
            power = 0.5 if name == "std" else 1.0
            for factor, text in (
                ((terms - 1) / terms, f"{name} is biased in the candidate: it divides by n"),
                (terms / (terms - 1), f"{name} is unbiased in the candidate: it divides by n - 1"),
            ):
                yield Hypothesis("other", text, {node: _times(factor**power)})


def _times(factor: float) -> Any:
    return lambda call: call.value * factor
