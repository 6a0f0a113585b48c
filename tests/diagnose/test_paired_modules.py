"""Two modules of one process that are compared while both run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from glassengine.commands import watch_modules
from glassengine.errors import IncomparableError, UsageError


def _both() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).eval()
    return model, copy.deepcopy(model)


def _run(model: nn.Module, other: nn.Module, wrong_at: int = -1, count: int = 6) -> None:
    with torch.no_grad():
        for i in range(count):
            x = torch.randn(4, 16)
            if i == wrong_at:
                other[2].weight.mul_(1.01)  # type: ignore[index, operator, union-attr]
            model(x)
            other(x)


def test_the_call_with_the_first_difference_raises() -> None:
    model, other = _both()
    with (
        pytest.raises(AssertionError, match=r"(?s)NOT OK.*step 3, 2\nstopped at step 3"),
        watch_modules(model, other),
    ):
        _run(model, other, 3)
    assert not model._forward_hooks and not other._forward_hooks


def test_a_callback_gets_the_first_difference_alone() -> None:
    model, other = _both()
    found: list[Any] = []
    with watch_modules(model, other, on_difference=found.append) as steps:
        _run(model, other, 2)
    (one,) = found
    assert (one.first_divergence.step, one.first_divergence.site) == (2, "2")
    assert steps.conclusion() is one and steps.num_steps == 3


def test_rounding_raises_nothing() -> None:
    model, other = _both()
    with torch.no_grad():
        other[0].weight.mul_(1 + 2e-7)  # type: ignore[index, operator, union-attr]
    with watch_modules(model, other) as steps:
        _run(model, other)
    one = steps.conclusion()
    assert one.ok and one.verdict == "rounding" and one.notes[-1].startswith("6 steps were compared")


def test_a_side_that_is_not_called_is_named() -> None:
    model, other = _both()
    with pytest.raises(IncomparableError, match=r"(?s)baseline made steps .*candidate: 0"), watch_modules(model, other):
        model(torch.zeros(2, 16))
    with pytest.raises(IncomparableError, match="steps ahead"), watch_modules(model, other):
        for _ in range(20):
            model(torch.zeros(2, 16))
    with pytest.raises(UsageError, match="beside itself"), watch_modules(model, model):
        pass


def test_a_block_that_compares_nothing_is_not_ok() -> None:
    model, other = _both()
    with (
        pytest.raises(IncomparableError, match=r"(?s)nothing to compare.*baseline: 0 steps"),
        watch_modules(model, other),
    ):
        copy.deepcopy(model)(torch.zeros(2, 16))
    with pytest.raises(IncomparableError), watch_modules(model, other, sites=["no.such.module"]):
        _run(model, other, 1)
