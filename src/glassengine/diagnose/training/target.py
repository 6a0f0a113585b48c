"""What a training check is given by name: modules, batches, optimizers and losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glassengine.diagnose.training.gradient_graph import Loss
from glassengine.diagnose.training.run import OptimizerFactory
from glassengine.errors import UsageError
from glassengine.program import load_inputs, load_model
from glassengine.program.user_code.factory import load_function

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
