"""Torch's own samples of all its modules: forward and backward in lazy code are those of eager code, bit by bit."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import glassengine as glass

_MOST_SAMPLES = 8
"""Of one module, in training and beside it."""


def _moved(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().to(device).requires_grad_(value.requires_grad)


def _outcome(module: nn.Module, sample: Any, device: torch.device) -> list[Any]:
    """Return the results of a module, the gradients of its parameters and inputs, and its buffers."""
    module = copy.deepcopy(module).to(device)
    args, kwargs = pytree.tree_map(lambda value: _moved(value, device), (sample.args, sample.kwargs))
    torch.manual_seed(1)
    results = pytree.tree_leaves(module(*args, **kwargs))
    wanted = [result.square().sum() for result in results if isinstance(result, torch.Tensor) and result.requires_grad]
    if wanted:
        torch.stack(wanted).sum().backward()
    glass.mark_step()
    inputs = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    gradients = [tensor.grad for tensor in (*module.parameters(), *inputs)]
    return [
        value.detach().cpu() if isinstance(value, torch.Tensor) else value
        for value in (*results, *gradients, *module.buffers())
    ]


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    return bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())


@pytest.mark.slow
def test_modules_give_the_results_and_gradients_of_eager_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.testing._internal.common_modules import module_db

    # Random operations of these samples end the step of each lazy tensor.
    monkeypatch.setattr(torch, "_lazy", types.SimpleNamespace(mark_step=glass.mark_step), raising=False)
    warnings.simplefilter("ignore")
    device, host = glass.lazy.device(), torch.device("cpu")
    unexpected, count = [], 0
    for info in module_db:
        for training in (True, False):
            make: Callable[..., list[Any]] = info.module_inputs_func
            samples = make(info, device="cpu", dtype=torch.float32, requires_grad=True, training=training)
            for number, sample in enumerate(samples[:_MOST_SAMPLES]):
                torch.manual_seed(0)
                given = sample.constructor_input
                module = info.module_cls(*given.args, **given.kwargs).train(training)
                is_lazy_module = isinstance(module, nn.modules.lazy.LazyModuleMixin)
                if sample.forward_input is None or is_lazy_module:
                    continue
                try:
                    wanted = _outcome(module, sample.forward_input, host)
                except Exception:  # noqa: S112 - what eager code refuses has no result
                    continue
                count += 1
                got = _outcome(module, sample.forward_input, device)
                if not all(_equal(one, other) for one, other in zip(wanted, got, strict=True)):
                    unexpected.append(f"{info.name} sample {number}, training {training}")
    assert unexpected == []
    assert count > 900
