"""Two runs that differ by what Adam makes of rounding are told so, and others are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.compare.compare import compare
from glassengine.compare.rounded_updates import NOT_JUDGED


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.up(x)).tanh()
        return found


def recorded(path: Path, order: list[int], rate: float) -> Path:
    net, batch = Net(), torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate)
    with glass.record(net, path, gradients=True, optimizer=optimizer, sites=["re::(param|grad)$"]):
        for _ in range(2):
            optimizer.zero_grad()
            net(batch[order]).square().mean().backward()
            optimizer.step()
    return path


@pytest.mark.parametrize(("rate", "is_rounding"), [(0.01, True), (0.02, False)])
def test_a_bias_ahead_of_a_norm(rate: float, is_rounding: bool, tmp_path: Path) -> None:
    one = recorded(tmp_path / "one", list(range(16)), 0.01)
    first = compare(one, recorded(tmp_path / "other", list(range(15, -1, -1)), rate)).first_divergence
    assert first is not None and (first.site == "up.bias:param") is is_rounding
    assert any("whose gradients are rounding" in hint.text for hint in first.hints) is is_rounding


class _InOrder(torch.autograd.Function):
    """A bias whose gradient is summed up in an order of rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor, order: list[int]) -> torch.Tensor:
        ctx.order = order
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        found = torch.zeros_like(grad[0])
        for row in ctx.order:
            found = found + grad[row]
        return grad, found, None


class Up(nn.Linear):
    order: list[int]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _InOrder.apply(nn.functional.linear(x, self.weight), self.bias, self.order)
        return found


class Attention(nn.Module):
    def __init__(self, order: list[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(6, 8), Up(6, 8)
        self.key.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.query(x) @ self.key(x).T).softmax(-1) @ x


def trained(
    path: Path, order: list[int], rate: float = 0.01, shift: float = 0.0, scale: float = 1.0, slip: float = 0.0
) -> Path:
    net, batch = Attention(order), torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate)
    with glass.record(net, path, gradients=True, optimizer=optimizer):
        for step in range(3):
            optimizer.zero_grad()
            (net(batch).square().mean() * scale).backward()
            with torch.no_grad():
                net.key.bias += shift if step == 1 else 0.0
                net.query.weight[1] += slip if step == 2 else 0.0
            optimizer.step()
    return path


def test_rounded_updates_are_not_judged_and_never_ok(tmp_path: Path) -> None:
    one, other = trained(tmp_path / "one", list(range(16))), list(range(15, -1, -1))
    right = compare(one, trained(tmp_path / "right", other))
    assert (right.ok, right.too_little, right.verdict) == (False, True, "suspicious")
    reasons = {pair.site: str(pair.reason) for pair in right.pairs if pair.verdict == "suspicious"}
    reasons = {
        site: reason for site, reason in reasons.items() if "as small as the rounding of key.weight" not in reason
    }
    assert {"key", "key.bias:param"} <= set(reasons) and set(reasons.values()) == {NOT_JUDGED}
    assert right.coverage < 1 and right.not_ok_because is not None and NOT_JUDGED in right.not_ok_because
    mistakes: list[dict[str, float]] = [{"rate": 0.0101}, {"shift": 1.0}, {"scale": 1.01}]
    for i, mistake in enumerate(mistakes):
        wrong = compare(one, trained(tmp_path / f"wrong{i}", other, **mistake))
        assert (wrong.ok, wrong.too_little, wrong.verdict) == (False, False, "wrong"), mistake


def test_a_mistake_after_updates_of_rounding_is_the_first(tmp_path: Path) -> None:
    one, other = trained(tmp_path / "one", list(range(16))), list(range(15, -1, -1))
    found = compare(one, trained(tmp_path / "wrong", other, slip=1e-3))
    first = found.first_divergence
    assert found.verdict == "wrong" and first is not None and (first.site, first.step) == ("query.weight:param", 2)
    assert {pair.site for pair in found.pairs if pair.reason == NOT_JUDGED} == {"key", "key.bias:param"}


class _Product(torch.autograd.Function):
    """A product whose gradient is summed up in an order of rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, order: list[int]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.order = order
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        found = torch.zeros_like(weight)
        for row in ctx.order:
            found = found + grad[row, :, None] * x[row]
        return grad @ weight, found, None


class Product(nn.Linear):
    order: list[int]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Product.apply(x, self.weight, self.order)
        return found


class Weighted(nn.Module):
    """Its loss has a gradient for one row of a weight that is the small rest of large terms."""

    def __init__(self, order: list[int], x: torch.Tensor, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, drawn = Product(6, 8, bias=False), torch.randn(16, 8)
        self.up.order = order
        rest = drawn[:, 3] - x @ torch.linalg.lstsq(x, drawn[:, 3:4]).solution[:, 0]
        drawn[:, 3] = rest + 1e-6 * drawn[:, 4]
        self.drawn = drawn * factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (self.up(x) * self.drawn).sum()
        return found


def of_weights(
    path: Path, order: list[int], *, slip: float = 0.0, row: int = 2, factor: float = 1.0, rate: float = 0.002
) -> Path:
    """Train it with an optimizer that divides by the size of a gradient, and adds an epsilon of that size."""
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    net = Weighted(order, x, factor)
    optimizer = torch.optim.Adam(net.parameters(), lr=rate, eps=1e-5)
    with glass.record(net, path, gradients=True, optimizer=optimizer):
        for step in range(3):
            optimizer.zero_grad()
            net(x).backward()
            with torch.no_grad():
                net.up.weight[row, 1] += slip if step == 1 else 0.0
            optimizer.step()
    return path


def test_a_result_of_weights_whose_small_gradients_are_rounded(tmp_path: Path) -> None:
    one, other = of_weights(tmp_path / "one", list(range(16))), list(range(15, -1, -1))
    right = compare(one, of_weights(tmp_path / "right", other))
    assert (right.ok, right.too_little, right.verdict) == (False, True, "suspicious")
    unsure = {pair.site: pair.reason for pair in right.pairs if pair.verdict == "suspicious"}
    assert unsure == {"up": NOT_JUDGED, "up.weight:param": NOT_JUDGED}
    mistakes: list[dict[str, Any]] = [{"slip": 9e-6}, {"factor": 1.0005}, {"rate": 0.00201}, {"slip": 0.05, "row": 3}]
    for i, mistake in enumerate(mistakes):
        wrong = compare(one, of_weights(tmp_path / f"wrong{i}", other, **mistake))
        assert (wrong.ok, wrong.too_little, wrong.verdict) == (False, False, "wrong"), mistake
