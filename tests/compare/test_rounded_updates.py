"""Two runs that differ by what Adam makes of rounding are told so, and others are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.compare.compare import compare


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
