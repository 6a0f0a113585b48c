"""Half precision without a noise floor: what roundings add up to is neither wrong nor ok; a mistake stays wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import glassengine as glass
from glassengine.compare import pairs as plans
from glassengine.compare.compare import compare
from glassengine.compare.roundings import ROUNDED

ROWS, WIDTH, BF16 = 16, 32, torch.bfloat16


class _InParts(torch.autograd.Function):
    """A product whose gradient is added up of parts, each rounded, as ranks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, parts: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parts = parts
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        each = [g.T @ y for g, y in zip(grad.chunk(ctx.parts), x.chunk(ctx.parts), strict=True)]
        return grad @ weight, torch.stack(each).sum(0), None


class Layer(nn.Linear):
    parts = 1

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _InParts.apply(x, self.weight.to(x.dtype), self.parts)
        return found


class Net(nn.Module):
    """With parameters in the dtype of its results, or in float32 beside them."""

    def __init__(self, parts: int, dtype: torch.dtype, slip: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(4)])
        self.act, self.slip = nn.Tanh(), slip
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(BF16)
        for i, layer in enumerate(self.layers):
            y = layer(x)
            if i == 2 and self.slip != 1:
                y = torch.cat((y[: ROWS // 2], y[ROWS // 2 :] * self.slip))
            x = x + self.act(y)
        return x


def trained(
    path: Path, parts: int, dtype: torch.dtype = BF16, *, slip: float = 1.0, rate: float = 0.05, scale: float = 1.0
) -> Path:
    net, batch = Net(parts, dtype, slip), torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    with glass.record(net, path, gradients=True, optimizer=optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            (net(batch).float().square().sum(-1).mean() * scale).backward()
            optimizer.step()
    return path


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_roundings_are_not_judged_and_never_ok(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trained(tmp_path / "one", 1, dtype)
    right = compare(one, trained(tmp_path / "right", 4, dtype))
    assert (right.ok, right.too_little, right.verdict) == (False, True, "suspicious")
    unsure = [pair for pair in right.pairs if pair.verdict == "suspicious"]
    assert {pair.reason for pair in unsure} == {ROUNDED} and any(":param" in pair.site for pair in unsure)
    assert right.coverage < 1 and right.not_ok_because is not None and ROUNDED in right.not_ok_because
    mistakes: list[tuple[str, dict[str, float]]] = [
        (".:grad_out", {"scale": 1.05}),
        ("act@2:in[0]", {"slip": 1.05}),
        ("layers.0.weight:param", {"rate": 0.055}),
    ]
    for i, (site, mistake) in enumerate(mistakes):
        wrong = compare(one, trained(tmp_path / f"wrong{i}", 4, dtype, **mistake))
        assert (wrong.ok, wrong.too_little, wrong.verdict) == (False, False, "wrong"), mistake
        assert wrong.first_divergence is not None and wrong.first_divergence.site == site
    monkeypatch.setattr(plans, "BLOCK_BYTES", 500)
    rows = compare(one, tmp_path / "right")
    assert [pair.verdict for pair in rows.pairs] == [pair.verdict for pair in right.pairs]


def test_one_side_in_half_precision_is_not_excused(tmp_path: Path) -> None:
    """A layer in another dtype: what comes after it is wrong where the baseline has rounded nothing."""

    class Cast(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.dtype, self.inner, self.outer = dtype, nn.Identity(), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.outer(self.inner(x.to(self.dtype)).float())
            return found

    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2))
    for name, dtype in (("a", torch.float32), ("b", BF16)):
        with glass.record(net := Cast(dtype), tmp_path / name):
            net(x)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.verdict == "wrong" and {pair.site: pair.verdict for pair in found.pairs}["outer"] == "wrong"
