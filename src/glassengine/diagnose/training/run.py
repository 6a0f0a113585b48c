"""A training run as it happens: the user's module, loss and optimizer, and what every step began and ended with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glassengine.diagnose.training.gradient_graph import Loss, state_of
from glassengine.errors import UsageError
from glassengine.program import load_inputs, load_model
from glassengine.program.user_code.calls import load_function, raised_by
from glassengine.program.user_code.module_state import own_copies

OptimizerFactory = Callable[[nn.Module], Any]
"""Makes the optimizer of a module, or (optimizer, scheduler of its learning rate)."""

_HOW = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "initial_lr", "param_names"})


@dataclass(frozen=True)
class StepTaken:
    """One step of a training run; tensors are copies.

    Attributes:
        state: Parameters and buffers before the step, by name.
        loss: Scalar.
        gradients: By parameter; None where the parameter has none.
        memory: What the optimizer kept before its step: parameter -> name -> value.
        options: Hyperparameters of the step, by parameter: learning rate, betas and the like.
        parameters_after: Parameters after the optimizer's step.
        memory_after: What the optimizer keeps after it.
        buffers_written: Names of the buffers that the forward changed.
    """

    state: Mapping[str, Tensor]
    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    memory: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Mapping[str, Any]]
    parameters_after: Mapping[str, Tensor]
    memory_after: Mapping[str, Mapping[str, Any]]
    buffers_written: tuple[str, ...]


def train(
    module: nn.Module, batches: Sequence[Mapping[str, Any]], loss: Loss, optimizer: OptimizerFactory
) -> list[StepTaken]:
    """Train `module` for one step per batch and keep what happened. The module is changed.

    Raises:
        UsageError: The optimizer needs a closure, or the loss is not a scalar.
    """
    plain = getattr(module, "_orig_mod", module)
    with raised_by("the function that makes the optimizer"):
        updates, scheduler = split(optimizer(module))
    names = {parameter: name for name, parameter in plain.named_parameters()}
    steps = []
    for batch in batches:
        updates.zero_grad(set_to_none=True)
        state = _copied(state_of(plain))
        with raised_by(f"the forward of {type(plain).__name__}"):
            made = module(**own_copies(batch))
        with raised_by("the loss function"):
            value = loss(made)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UsageError("the loss is not a scalar", got=str(getattr(value, "shape", type(value).__name__)))
        with raised_by(f"the backward of {type(plain).__name__}"):
            value.backward()  # type: ignore[no-untyped-call]
        gradients = {
            name: None if parameter.grad is None else parameter.grad.detach().clone()
            for name, parameter in plain.named_parameters()
            if parameter.requires_grad
        }
        memory, options = _memory(updates, names), options_of(updates, names)
        written = tuple(name for name, buffer in plain.named_buffers() if not torch.equal(buffer, state[name]))
        with raised_by(f"the optimizer {type(updates).__name__}"):
            _update(updates)
        after = {name: p.detach().clone() for name, p in plain.named_parameters() if p.requires_grad}
        steps.append(
            StepTaken(
                state, value.detach().clone(), gradients, memory, options, after, _memory(updates, names), written
            )
        )
        if scheduler is not None:
            with raised_by(f"the scheduler {type(scheduler).__name__}"):
                scheduler.step()
    return steps


def split(made: Any) -> tuple[torch.optim.Optimizer, Any]:
    """Return optimizer and scheduler (or None) of what a factory made."""
    optimizer, scheduler = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            "the optimizer factory did not return an optimizer",
            got=type(optimizer).__name__,
            expected="a torch.optim.Optimizer, or (optimizer, scheduler)",
        )
    return optimizer, scheduler


def options_of(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, dict[str, Any]]:
    """Return the hyperparameters of each parameter, without those that say how fast the same is computed."""
    return {
        names[parameter]: {key: _plain(value) for key, value in group.items() if key not in _HOW}
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in names
    }


def repeat_update(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    step: StepTaken,
    change: Callable[[Tensor], Tensor],
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Make the update of `optimizer` on parameters, gradients and memory of another run's step.

    Args:
        optimizer: Of a module of the same parameters, in any dtype; its own hyperparameters hold.
        names: Its parameters.
        step: Of the other run.
        change: Done to every floating tensor that is taken over.

    Returns:
        Parameters and memory after the update, by parameter.
    """
    for parameter, name in names.items():
        if name not in step.gradients:
            continue
        with torch.no_grad():
            parameter.copy_(change(step.state[name]))
        gradient = step.gradients[name]
        # Optimizers write to their memory, and may write to gradients: what the other run had stays as it was.
        parameter.grad = None if gradient is None else change(gradient).to(parameter.dtype, copy=True)
        known = step.memory.get(name)
        if known is not None:
            optimizer.state[parameter] = {
                key: change(value).to(parameter.dtype, copy=True)
                if _follows(value, parameter)
                else copy.deepcopy(value)
                for key, value in known.items()
            }
    _update(optimizer)
    after = {name: parameter.detach().clone() for parameter, name in names.items() if name in step.gradients}
    return after, _memory(optimizer, names)


def _update(optimizer: torch.optim.Optimizer) -> None:
    try:
        optimizer.step()
    except TypeError as error:
        if "closure" not in str(error):
            raise
        got = type(optimizer).__name__
        raise UsageError("an optimizer that needs a closure cannot be judged", got=got) from error


def _follows(value: Any, parameter: Tensor) -> bool:
    """Whether a value in the memory of an optimizer has the dtype of its parameter; step counters have their own."""
    return (
        isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape and value.dim() > 0
    )


def _memory(optimizer: torch.optim.Optimizer, names: Mapping[Any, str]) -> dict[str, dict[str, Any]]:
    return {
        names[parameter]: {key: v.detach().clone() if isinstance(v, Tensor) else v for key, v in kept.items()}
        for parameter, kept in optimizer.state.items()
        if parameter in names
    }


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


LEARNING_RATE = 1e-3
"""Of the optimizer that is taken where none is given."""


def module_of(target: str | Path | nn.Module, **options: Any) -> nn.Module:
    """Return a module as it is, or load one by name, in training mode; `options` are those of `load_model`."""
    return target if isinstance(target, nn.Module) else load_model(target, **options).module.train()


def batches_of(inputs: str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the keyword arguments of each step.

    Raises:
        UsageError: There are none.
    """
    given = load_inputs(str(inputs)) if isinstance(inputs, (str, Path)) else inputs
    batches = [dict(batch) for batch in ([given] if isinstance(given, Mapping) else given or ())]
    if not batches:
        raise UsageError(
            "no step would be trained",
            expected="one dict of keyword arguments per step",
            hint="--inputs file.py:factory, or a tensor file",
        )
    return batches


def optimizer_of(made_by: str | OptimizerFactory | None) -> OptimizerFactory:
    """Return what makes the optimizer of a module: `file.py:function`, a function, or AdamW."""
    if made_by is None:
        return lambda module: torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
    return load_function(made_by) if isinstance(made_by, str) else made_by


def loss_of(made_by: str | Loss | None) -> Loss:
    """Return what takes the scalar loss out of a module's result: `file.py:function`, a function, or its `.loss`."""
    if made_by is None:
        return _own_loss
    return load_function(made_by) if isinstance(made_by, str) else made_by


def _own_loss(result: Any) -> Tensor:
    value = result["loss"] if isinstance(result, Mapping) and "loss" in result else getattr(result, "loss", result)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise UsageError(
            "what the model returns holds no loss",
            got=type(result).__name__,
            expected='a scalar, .loss or ["loss"]: a model of transformers needs labels among its inputs',
            hint="--loss file.py:function (loss=lambda result: ...)",
        )
    return value.reshape(())
