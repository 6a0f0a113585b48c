"""The backward of an activation: the derivative of another one, or one of the two terms of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.judge.hypotheses.mistakes.operations import NAMED, some_of
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import giving
from glassengine.ops.traits import traits_of

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
            yield Hypothesis("activation", text, {node: giving(value)}, "activation", (name, other))


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
