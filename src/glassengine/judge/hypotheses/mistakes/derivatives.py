"""The backward of an activation: the derivative of another one, or one of the two terms of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.judge.hypotheses.mistakes.operations import NAMED
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Edit
from glassengine.ops.traits import traits_of

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
    for node in reversed(trial.ops):
        made = trial.values[node]
        if not _is_number(made) or traits_of(node).kind != "factor":
            continue
        above = [one for one in tensors if trial.values[one].shape == made.shape][:_MOST_TENSORS]
        found = _found(above, made, trial.values, _ROUNDINGS * question.noise)
        if found is None:
            continue
        name, gradient, given = found
        for other, derivative in _others(name):
            value = gradient * derivative(given)
            text = f"the derivative of {name} here, {other} in the candidate"
            yield Hypothesis("activation", text, {node: _value(value)}, "activation", (name, other))


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1


def _found(
    tensors: list[Node], made: Tensor, values: dict[Node, Tensor], apart: float
) -> tuple[str, Tensor, Tensor] | None:
    """Return (activation, gradient, input) of which a product is made; None where it is none."""
    some = made.flatten()[:_SAMPLED]
    size = float(some.abs().max())
    few = {node: values[node].flatten()[:_SAMPLED] for node in tensors}
    for given in tensors:
        for name in NAMED:
            slope = _derivative(name)(few[given])
            if bool((slope == slope[0]).all()):
                continue  # of nothing: any product is one
            for gradient in tensors:
                made_of = few[gradient] * slope
                if gradient is not given and bool(((made_of - some).abs() <= apart * size).all()):
                    return name, values[gradient], values[given]
    return None


def _others(name: str) -> Iterator[tuple[str, Derivative]]:
    if name in _GATED:
        yield "its gate alone", lambda x: _gate(name, x)
        yield "the other term without its gate", lambda x: _derivative(name)(x) - _gate(name, x)
    for other in NAMED:
        if other != name:
            yield f"that of {other}", _derivative(other)


def _gate(name: str, x: Tensor) -> Tensor:
    return torch.where(x == 0, _derivative(name)(torch.zeros_like(x)), NAMED[name](x) / x)


def _value(value: Tensor) -> Edit:
    return lambda call: value


def _derivative(name: str) -> Derivative:
    def of(x: Tensor) -> Tensor:
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            made = NAMED[name](given)
            return torch.autograd.grad(made.sum(), given)[0].detach()

    return of
