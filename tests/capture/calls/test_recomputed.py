"""Activation checkpointing: what a backward computes again is recorded once, counted, and told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from glassengine.capture.runs.record import record
from glassengine.compare import compare
from glassengine.recording.read.reader import Recording


class Net(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def run(path: Path, reentrant: bool | None, *, gradients: bool = True) -> Path:
    net = Net(reentrant)
    with record(net, path, gradients=gradients):
        for step in range(2):
            net.zero_grad()
            net(torch.linspace(-1, 1, 8).reshape(2, 4).mul(step + 1).requires_grad_()).square().sum().backward()
    return path


@pytest.mark.parametrize("reentrant", [True, False])
def test_f23_recomputed_calls_are_recorded_once_and_told(
    reentrant: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, again = run(tmp_path / "plain", None), run(tmp_path / "again", reentrant)
    assert "18 calls of 9 modules ran again in a backward (activation checkpointing)" in caplog.text
    opened = Recording.open(again)
    assert opened.metadata["recomputed"] == {
        path: 2 for i in range(3) for path in (f"layers.{i}", f"layers.{i}.0", f"layers.{i}.1")
    }
    assert "recomputed" not in Recording.open(plain).metadata
    # Nothing is missing, nothing appears twice, all has the values it has without: gradients inside included.
    assert set(opened.sites()) == set(Recording.open(plain).sites()) and not opened.left_out
    result = compare(plain, again)
    assert (result.ok, result.coverage) == (True, 1.0) and result.verdict in ("identical", "rounding")


def test_f23_values_alone(tmp_path: Path) -> None:
    opened = Recording.open(run(tmp_path / "r", True, gradients=False))
    assert opened.steps == [0, 1] and opened.metadata["recomputed"]["layers.0"] == 2
    assert not [site for site in opened.sites() if "grad" in site]
