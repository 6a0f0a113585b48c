"""Steps that are compared while both models run: the quick pass proves what `compare` says, also of two modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glassengine.commands import watch_modules
from glassengine.compare.compare import compare
from glassengine.diagnose.paired_steps import LiveStep, quick_verdict
from glassengine.errors import IncomparableError, UsageError

METADATA = {"class": "a.B", "dtype": "float32"}


def _step(tensor: Tensor) -> LiveStep:
    return LiveStep("side", dict(METADATA), 0, {"a": tensor, "b": torch.arange(3)})


CHANGES = {
    "relative": lambda x, size: x * (1 + size * torch.randn_like(x)),
    "scaled": lambda x, size: x * (1 + size),
    "absolute": lambda x, size: x + size * torch.randn_like(x),
    "one element": lambda x, size: x + torch.nn.functional.one_hot(torch.tensor(5), x.numel()).view(x.shape) * size,
    "not a number": lambda x, size: torch.where(x > 2, torch.nan, x),
    "infinite": lambda x, size: torch.where(x > 2, torch.inf, x) * (1 + size),
    "zero": lambda x, size: torch.where(x.abs() < size, 0.0, x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"rtol": 1e-4}, {"atol": 1e-3, "rtol": 0.0}])
def test_what_the_quick_pass_proves_is_what_compare_says(dtype: torch.dtype, options: dict[str, float]) -> None:
    torch.manual_seed(0)
    num_proven = 0
    for scale in (1e-30, 1e-7, 1e-3, 1.0, 1e4):
        x = (torch.randn(24, 16, dtype=torch.float64) * scale).to(dtype)
        for change in CHANGES.values():
            for size in (1e-9, 1e-7, 1e-6, 3e-6, 1e-5, 1e-4, 1e-3, 1.5e-2, 3e-2):
                left, right = _step(x), _step(change(x.double(), size).to(dtype))
                known = quick_verdict(left, right, options)
                if known is not None:
                    found = compare(left, right, **options)
                    assert found.ok
                    assert found.verdict in ("identical", known)
                    num_proven += 1
    assert num_proven > 60


def test_rounding_of_a_model_takes_no_comparison() -> None:
    x = torch.randn(64, 64)
    assert quick_verdict(_step(x), _step(x.clone()), {}) == "identical"
    assert quick_verdict(_step(x), _step(x * (1 + 2e-7)), {}) == "rounding"
    assert quick_verdict(_step(x), _step(x * 1.001), {}) is None
    assert quick_verdict(_step(x), _step(x.double()), {}) is None
    assert quick_verdict(_step(x), _step(x[:32]), {}) is None


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


class WrittenBetween(nn.Module):
    """What one module returns is written to before the next is given it."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.second, self.factor = nn.Identity(), nn.Identity(), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between: torch.Tensor = self.first(x + 1)
        found: torch.Tensor = self.second(between.mul_(self.factor))
        return found


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_tensor_is_compared_as_each_module_is_given_it(mode: type[torch.no_grad]) -> None:
    sides = [WrittenBetween(factor) for factor in (1.5, 1.25)]
    with (
        pytest.raises(AssertionError, match=r"first divergence: step 0, second:in\[0\]"),
        watch_modules(*sides),
        mode(),
    ):
        for side in sides:
            side(torch.ones(4))


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
