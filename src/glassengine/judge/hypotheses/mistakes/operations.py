"""Other ops instead of an op, or of several that together are one: activations, sums, trigonometry, norms.

Ops are named here, as nowhere else in the judge: which op people take for which is no trait of either.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from glassengine.judge.graphs.between import ancestors
from glassengine.judge.hypotheses.mistakes.norms import batch_norms, eps_outside, other_norms, over_other_axes
from glassengine.judge.hypotheses.trials.hypothesis import (
    Hypothesis,
    bound,
)
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Call
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind

Pointwise = Callable[[torch.Tensor], torch.Tensor]

NAMED: dict[str, Pointwise] = {
    "gelu": F.gelu,
    "gelu (tanh)": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": F.relu,
    "relu squared": lambda x: F.relu(x).square(),
    "relu6": F.relu6,
    "leaky_relu (0.01)": lambda x: F.leaky_relu(x, 0.01),
    "leaky_relu (0.2)": lambda x: F.leaky_relu(x, 0.2),
    "elu": F.elu,
    "selu": F.selu,
    "mish": F.mish,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "log_sigmoid": F.logsigmoid,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "square": torch.square,
    "abs": torch.abs,
    "nothing": lambda x: x,
}
"""Activations by the names that people use."""

_BENDING = frozenset(
    ["erf", "exp", "exp2", "log", "log1p", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "where", "abs"]
)
"""Ops by which an activation is written out, beside those that are one."""
_EQUAL = 1e-9
_SAMPLED = 64
_PAIRS = (("sin", "cos"), ("mean", "sum"), ("amax", "mean"), ("amin", "amax"), ("std", "var"), ("sqrt", "rsqrt"))
_COMPARED = (("lt", "le"), ("gt", "ge"), ("lt", "gt"), ("le", "ge"), ("eq", "ne"))
_KINDS_OF_PAIRS: dict[tuple[str, str], Kind] = {
    **dict.fromkeys(_COMPARED, "mask"),
    ("sin", "cos"): "position",
    ("mean", "sum"): "scale",  # by a number of terms
}


def activations(question: Question) -> Iterator[Hypothesis]:
    """Yield: another activation, also where the baseline's is written out with several ops."""
    trial = question.trial
    theirs = {op_name(op) for op in question.theirs}
    sampled: dict[Node, torch.Tensor] = {}
    for node in reversed(trial.ops):
        made = trial.values[node]
        if not isinstance(made, torch.Tensor) or not made.is_floating_point():
            continue
        for source in _sources(trial.ops, node):
            given = trial.values.get(source)
            if not isinstance(given, torch.Tensor) or given.shape != made.shape or not given.is_floating_point():
                continue
            if traits_of(node).kind == "activation" and source in node.all_input_nodes:
                own: str | None = op_name(node)
            else:
                if source not in sampled:
                    some = some_of(given)
                    sampled[source] = torch.stack([act(some) for act in NAMED.values()])
                own = _named(given, made, sampled[source])
                # Of numbers of one sign several are nothing at all, and a square is any.
                has_both = own is not None and bool((given < 0).any()) and bool((given > 0).any())
                own = own if has_both and _bends(trial.ops, source, node) else None
            if own is None or own == "nothing":
                continue
            for name, act in NAMED.items():
                # A candidate of zeros is what many make of negative numbers, and what is left of a lost factor.
                if name != own and (name in theirs or bool(act(given).any()) or not bool(made.any())):
                    text = f"{own} here, {name} in the candidate"
                    yield Hypothesis("activation", text, {node: _applied(act, given)}, "activation", (own, name))


def _sources(ops: list[Node], node: Node) -> list[Node]:
    """Return what an op reads and what that is made of, nearest first: few steps back, for activations are short."""
    found: dict[Node, None] = {}
    layer = [node]
    for _ in range(8):
        layer = list(dict.fromkeys(source for other in layer for source in other.all_input_nodes))
        found.update(dict.fromkeys(layer))
    return list(found)


def some_of(value: torch.Tensor) -> torch.Tensor:
    """Return a few elements [S] of a tensor, without copying all of them: the same places in all of its shape."""
    while value.dim() > 1 and value.numel() >= _SAMPLED * value.shape[0]:
        value = value[0]
    return value.flatten()[:_SAMPLED]


def _bends(ops: list[Node], source: Node, node: Node) -> bool:
    """Whether one of the ops by which a node is made of a source is one that activations are written with."""
    below = {source}
    for op in ops:
        if below & set(op.all_input_nodes):
            below.add(op)
        if op is node:
            break
    between = (below - {source}) & {node, *ancestors(node)}
    return any(traits_of(op).kind == "activation" or op_name(op) in _BENDING for op in between)


def _named(given: torch.Tensor, made: torch.Tensor, sampled: torch.Tensor) -> str | None:
    """Return the activation that makes one tensor of another, given what each makes of some elements [N, S]."""
    size = float(made.abs().max()) if made.numel() else 0.0
    if not math.isfinite(size):
        return None
    most = _EQUAL * max(size, 1e-30)
    may_be = ((sampled - some_of(made)).abs() <= most).all(dim=1).tolist()
    for (name, act), is_near in zip(NAMED.items(), may_be, strict=True):
        if is_near and bool(((act(given) - made).abs() <= most).all()):
            return name
    return None


def _applied(act: Pointwise, given: torch.Tensor) -> Any:
    return lambda call: act(given)


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
