"""A parameter of a checkpoint, put together from the tensors that an engine has for it, as a rule of a table says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from glassengine.compare.matching.assembling import assembled
from glassengine.compare.matching.maps import MapRule
from glassengine.errors import UsageError
from glassengine.serving.protocol import ServedWeight


class Unread(Mapping[str, ServedWeight]):
    """What an engine has for each parameter, read whenever it is asked for: a large model is never held twice.

    Args:
        readers: Parameter -> what reads it.
    """

    def __init__(self, readers: Mapping[str, Callable[[], ServedWeight]]) -> None:
        self._readers = readers

    def __getitem__(self, name: str) -> ServedWeight:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


@torch.no_grad()
def adds_one(module: nn.Module, name: str) -> bool:
    """Whether a parameter is the gain of a norm less 1: of -1 its module makes zeros, of 0 it does not."""
    path, _, own = name.rpartition(".")
    norm = module.get_submodule(path)
    parameters = dict(norm.named_parameters())
    if own not in parameters or any(one.dim() != 1 for one in parameters.values()):
        return False
    zeros = {key: torch.zeros_like(one) for key, one in parameters.items()}
    given = torch.linspace(1.0, 2.0, parameters[own].numel(), dtype=parameters[own].dtype)[None]
    try:
        made = [functional_call(norm, zeros | {own: zeros[own] + gain}, (given,)) for gain in (-1, 0)]
    except Exception:  # it is no norm, and its own code may raise anything
        return False
    return all(isinstance(one, Tensor) for one in made) and not made[0].any() and bool(made[1].any())


def as_parameter(
    stored: tuple[str, ...],
    rule: MapRule | None,
    values: Sequence[Tensor],
    steps: Sequence[Tensor | None],
    types: tuple[str, ...],
    parameter: Tensor,
    *,
    tied: bool = False,
) -> ServedWeight:
    """Return what an engine has for a parameter, in its layout.

    Args:
        stored: Names of the engine's tensors.
        rule: Of the table; None for one tensor as it is.
        values: In float32.
        steps: Of each element of each tensor that is quantized.
        types: How they are stored.
        parameter: The checkpoint's.
        tied: Whether it is read from another parameter's tensor.
    """
    made = _made(rule, list(values))
    step = None
    if any(one is not None for one in steps):
        whole = [torch.zeros_like(v) if s is None else s for v, s in zip(values, steps, strict=True)]
        step = _made(_without_values(rule), whole)
    if (
        made.shape != parameter.shape
        and made.numel() == parameter.numel()
        and made.squeeze().shape == parameter.squeeze().shape
    ):
        made = made.reshape(parameter.shape)
        step = None if step is None else step.reshape(parameter.shape)
    adds = rule is not None and any(op.op == "add" for op in rule.candidate_ops)
    room = max(float(value.abs().max()) for value in values) * 2.0**-23 if adds else 0.0
    return ServedWeight(stored, made, step, types, tied=tied, room=room)


def _made(rule: MapRule | None, values: list[Tensor]) -> Tensor:
    if rule is None:
        return values[0]

    def lookup(name: str) -> Tensor:
        raise UsageError("rules of weights look nothing up", got=name)

    try:
        return assembled(rule, [(value, lookup) for value in values])
    except UsageError:
        return values[0]  # of another shape than the rule is for: that shows


def _without_values(rule: MapRule | None) -> MapRule | None:
    """Return the rule for steps: numbers that are added do not change them."""
    if rule is None:
        return None
    return dataclasses.replace(rule, candidate_ops=tuple(op for op in rule.candidate_ops if op.op != "add"))
