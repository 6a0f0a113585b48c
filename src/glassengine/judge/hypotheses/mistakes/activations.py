"""Other activations, also those that are written with several ops, and the derivatives of others in a backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from glassengine.judge.graphs.between import ancestors
from glassengine.judge.hypotheses.trials.hypothesis import (
    Hypothesis,
)
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name

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

_ROUNDINGS = 8.0
"""What a derivative is made of may have been rounded before."""
_MOST_TENSORS = 6
_GATED = frozenset({"gelu", "gelu (tanh)", "quick_gelu", "silu", "mish", "hardswish"})
"""Activations that are x times a gate."""

Derivative = Callable[[Tensor], Tensor]


def derivatives(question: Question) -> Iterator[Hypothesis]:
    """Yield: a gradient is multiplied with the derivative of another activation, or with a part of the right one."""
    trial = question.trial
    tensors = [one for one in [*trial.inputs, *trial.ops] if _is_number(trial.values[one])]
    slopes: dict[Node, Tensor] = {}
    for node in reversed(trial.ops):
        made = trial.values[node]
        if not _is_number(made) or traits_of(node).kind != "factor":
            continue
        above = [one for one in tensors if trial.values[one].shape == made.shape][:_MOST_TENSORS]
        found = _found(above, made, trial.values, slopes, _ROUNDINGS * question.noise)
        if found is None:
            continue
        name, gradient, given = found
        for other, derivative in _others(name):
            value = gradient * derivative(given)
            text = f"the derivative of {name} here, {other} in the candidate"
            yield Hypothesis("activation", text, {node: value}, "activation", (name, other))


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1


def _found(
    tensors: list[Node], made: Tensor, values: dict[Node, Tensor], slopes: dict[Node, Tensor], apart: float
) -> tuple[str, Tensor, Tensor] | None:
    """Return (activation, gradient, input) of which a product is made; None where it is none."""
    some = some_of(made)
    most = apart * float(some.abs().max())
    few = {node: some_of(values[node]) for node in tensors}
    for given in tensors:
        if given not in slopes:
            slopes[given] = _slopes(few[given])
        slope = slopes[given]
        # Of nothing where all are alike: any product is one.
        tells = (slope != slope[:, :1]).any(dim=1)
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


def _slopes(x: Tensor) -> Tensor:
    """Return the derivative of every activation at some numbers [S], as [N, S]."""
    with torch.enable_grad():
        given = x.detach().expand(len(NAMED), -1).clone().requires_grad_()
        made = torch.stack([act(row) for act, row in zip(NAMED.values(), given, strict=True)])
        return torch.autograd.grad(made.sum(), given)[0].detach()


def _others(name: str) -> Iterator[tuple[str, Derivative]]:
    if name in _GATED:
        yield "its gate alone", lambda x: _gate(name, x)
        yield "the other term without its gate", lambda x: _derivative(name)(x) - _gate(name, x)
    for other in NAMED:
        if other != name:
            yield f"that of {other}", _derivative(other)


def _gate(name: str, x: Tensor) -> Tensor:
    return torch.where(x == 0, _derivative(name)(torch.zeros_like(x)), NAMED[name](x) / x)


def _derivative(name: str) -> Derivative:
    def of(x: Tensor) -> Tensor:
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            made = NAMED[name](given)
            return torch.autograd.grad(made.sum(), given)[0].detach()

    return of


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
