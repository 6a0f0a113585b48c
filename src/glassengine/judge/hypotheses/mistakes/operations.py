"""Other ops instead of an op: activations, sums, trigonometry, norms and variances, convolutions, resizing.

Ops are named here, as nowhere else in the judge: which op people take for which is no trait of either. Activations are
found where they are written with several ops too, and their derivatives in a backward.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, bound, literals_of, reading, tensors_of
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Edit, TrialCall, edited
from glassengine.judge.site_pairs import ancestors, argument_names, down, up
from glassengine.numerics.float64 import is_real
from glassengine.ops.traits import traits_of
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
_SMOOTH = itertools.product(("linear", "bilinear", "trilinear", "bicubic"), (False, True))
_MODES: Sequence[tuple[str, bool | None]] = (("nearest", None), ("nearest-exact", None), *_SMOOTH, ("area", None))
"""Ways to resize, with or without aligned corners; torch takes those that fit the number of axes."""
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
            yield "other", f"{other} instead of {name}", _by_name(other)
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
        yield "permuted", f"the kernel {name} is flipped", reading({1: weight.flip(axes)})
    for what, first in (("height and width", 2), ("input and output", 0)):
        if (first == 0 or len(axes) == 2) and weight.shape[first] == weight.shape[first + 1]:
            text = f"{what} of the kernel {name} are transposed"
            yield "transposed", text, reading({1: weight.transpose(first, first + 1)})
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
    for mode, corners in _MODES:
        corner = "" if corners is None else f", align_corners={corners}"
        text = f"the candidate resizes by {mode}{corner}, the baseline by {op_name(node)}"
        yield "other", text, _interpolated(size, mode, corners)


def _interpolated(size: tuple[int, ...], mode: str, corners: bool | None) -> Edit:
    return lambda call: F.interpolate(call.args[0], size, mode=mode, align_corners=corners)


def _other_norms(node: Node) -> Iterator[Other]:
    """Yield what a norm may compute instead."""
    is_centered = op_name(node) == "layer_norm"
    names = "rms_norm instead of layer_norm" if is_centered else "layer_norm instead of rms_norm"
    text = f"the mean is {'not ' if is_centered else ''}subtracted: {names}"
    yield "other", text, _norm(node, is_centered=not is_centered)
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
    for node, made in trial.real_ops():
        name, tensors = op_name(node), tensors_of(trial, node)
        if not tensors or not made.numel() or name not in ("var", "std", "mean"):
            continue
        terms = trial.values[tensors[0][1]].numel() / made.numel()
        power = 0.5 if name == "std" else 1.0
        unbiased = (terms / (terms - 1)) ** power if terms > 1 else 1.0
        factors = {
            f"{name} is biased in the candidate: it divides by n": 1 / unbiased,
            f"{name} is unbiased in the candidate: it divides by n - 1": unbiased,
        }
        if name == "mean":
            factors = {"the mean is of n - 1: the variance is unbiased": unbiased}
        for text, factor in factors.items() if terms > 1 else ():
            yield Hypothesis("other", text, {node: made * factor})


Pointwise = Callable[[Tensor], Tensor]
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
_STEPS = 8
"""Activations are short."""
_EQUAL = 1e-9
_SAMPLED = 64
_ROUNDINGS = 8.0
"""What a derivative is made of may have been rounded before."""
_MOST_TENSORS = 6
_TELLING = 4
"""Elements of another slope than the rest, or slopes, from which a derivative is known as one."""
_GATED = frozenset({"gelu", "gelu (tanh)", "quick_gelu", "silu", "mish", "hardswish"})
"""Activations that are x times a gate."""


def activations(question: Question) -> Iterator[Hypothesis]:
    """Yield: another activation, also where the baseline's is written out with several ops."""
    trial = question.trial
    theirs = {op_name(op) for op in question.theirs}
    sampled: dict[Node, Tensor] = {}
    for node, made in trial.real_ops():
        for source in up(node, _STEPS):
            given = trial.values.get(source)
            if not is_real(given) or given.shape != made.shape:
                continue
            own: str | None = op_name(node)
            if traits_of(node).kind != "activation" or source not in node.all_input_nodes:
                if source not in sampled:
                    some = _some_of(given)
                    sampled[source] = torch.stack([act(some) for act in NAMED.values()])
                own = _named(given, made, sampled[source])
                # Of numbers of one sign several are nothing at all, and a square is any.
                has_both = own is not None and bool((given < 0).any()) and bool((given > 0).any())
                own = own if has_both and _bends(trial.ops, source, node) else None
            for name, act in NAMED.items() if own not in (None, "nothing") else ():
                other = made if name == own else act(given)
                # A candidate of zeros is what many make of negative numbers, and what is left of a lost factor.
                if name != own and (name in theirs or bool(other.any()) or not bool(made.any())):
                    text = f"{own} in the baseline, {name} in the candidate"
                    yield Hypothesis("activation", text, {node: other}, "activation", (own, name))


def _some_of(value: Tensor) -> Tensor:
    """Return a few elements [S] of a tensor, without copying all of them: the same places in all of its shape."""
    while value.dim() > 1 and value.numel() >= _SAMPLED * value.shape[0]:
        value = value[0]
    return value.flatten()[:_SAMPLED]


def _bends(ops: list[Node], source: Node, node: Node) -> bool:
    """Whether one of the ops by which a node is made of a source is one that activations are written with."""
    between = {*down([source], set(ops))} & {node, *ancestors(node)}
    return any(traits_of(op).kind == "activation" or op_name(op) in _BENDING for op in between)


def _named(given: Tensor, made: Tensor, sampled: Tensor) -> str | None:
    """Return the activation that makes one tensor of another, given what each makes of some elements [N, S]."""
    size = float(made.abs().max()) if made.numel() else 0.0
    if not math.isfinite(size):
        return None
    most = _EQUAL * max(size, 1e-30)
    may_be = ((sampled - _some_of(made)).abs() <= most).all(dim=1).tolist()
    near = [name for name, is_near in zip(NAMED, may_be, strict=True) if is_near]
    return next((name for name in near if bool(((NAMED[name](given) - made).abs() <= most).all())), None)


def derivatives(question: Question) -> Iterator[Hypothesis]:
    """Yield: a gradient is multiplied with the derivative of another activation, or with a part of the right one."""
    trial = question.trial
    tensors = [
        one for one in [*trial.inputs, *trial.ops] if is_real(trial.values[one]) and trial.values[one].numel() > 1
    ]
    slopes: dict[Node, Tensor] = {}
    for node, made in trial.real_ops():
        if made.numel() < 2 or traits_of(node).kind != "factor":
            continue
        above = [one for one in tensors if trial.values[one].shape == made.shape][:_MOST_TENSORS]
        found = _as_product(above, made, trial.values, slopes, _ROUNDINGS * question.noise)
        if found is None:
            continue
        name, gradient, given = found
        if name == "softplus" and any(op_name(op) == "sigmoid" for op in trial.ops):
            continue  # its derivative is a gate by itself
        for other, derivative in _other_activations(name, given):
            text = f"the derivative of {name} in the baseline, {other} in the candidate"
            yield Hypothesis("activation", text, {node: gradient * derivative}, "activation", (name, other))


def _as_product(
    tensors: list[Node], made: Tensor, values: dict[Node, Tensor], slopes: dict[Node, Tensor], apart: float
) -> tuple[str, Tensor, Tensor] | None:
    """Return (activation, gradient, input) of which a product is made; None where it is none."""
    some = _some_of(made)
    most = apart * float(some.abs().max())
    few = {node: _some_of(values[node]) for node in tensors}
    for given in tensors:
        if given not in slopes:
            slopes[given] = torch.stack([_derivative(name, few[given]) for name in NAMED])
        slope = slopes[given]
        # Of nothing where nearly all are alike: any product with a mask is one.
        differ = (slope != slope[:, :1]).sum(dim=1)
        tells = torch.minimum(differ, slope.shape[1] - differ) >= _TELLING
        tells |= torch.tensor([one.unique().numel() > _TELLING for one in slope])
        tells &= (slope != few[given]).any(dim=1)  # zeros and ones are their own slopes: a mask
        others = [gradient for gradient in tensors if gradient is not given]
        if not others or not bool(tells.any()):
            continue
        products = torch.stack([few[gradient] for gradient in others]) * slope[:, None]
        is_made = ((products - some).abs() <= most).all(dim=2) & tells[:, None]
        for number, name in enumerate(NAMED):
            for gradient, is_one in zip(others, is_made[number].tolist(), strict=True):
                if is_one:
                    return name, values[gradient], values[given]
    return None


def _other_activations(name: str, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    if name in _GATED:
        gate = torch.where(x == 0, _derivative(name, torch.zeros_like(x)), NAMED[name](x) / x)
        yield "its gate alone", gate
        yield "the other term without its gate", _derivative(name, x) - gate
    yield from ((f"that of {other}", _derivative(other, x)) for other in NAMED if other != name)


def _derivative(name: str, x: Tensor) -> Tensor:
    with torch.enable_grad():
        given = x.detach().requires_grad_()
        return torch.autograd.grad(NAMED[name](given).sum(), given)[0].detach()
