"""Other activations, also those that are written with several ops, and the derivatives of others in a backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.site_pairs import ancestors, down, up
from glassengine.numerics.float64 import is_real
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name

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
