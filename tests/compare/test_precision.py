"""Two records of two precisions are told as drift; what is no drift is still wrong."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import glassengine as glass
from glassengine.cli.main import main
from glassengine.report.terminal_compare import comparison
from glassengine.testing import models


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x.to(self.head.weight.dtype)
        for layer in self.layers:
            x = torch.tanh(layer(x) * 3) + x
        return {"logits": self.head(x)}


class Negated(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    wrong = models.drawn(Net)
    wrong.layers[2].__class__ = Negated
    sides = {"float32": models.drawn(Net), "bfloat16": models.drawn(Net).bfloat16(), "wrong": wrong.bfloat16()}
    for name, model in sides.items():
        with glass.record(model, folder / name), torch.no_grad():
            model(x)
            model(x * 2)
    return folder


def test_f15_two_precisions_are_drift_and_no_mistake(records: Path) -> None:
    result = glass.compare(records / "float32", records / "bfloat16")
    assert result.ok and result.verdict in ("rounding", "suspicious"), result.not_ok_because
    assert result.first_divergence is None
    assert result.calibration == "another precision: drift, float32 against bfloat16"
    names = [row.site for row in result.drift]
    assert names[:2] == ["layers.0", "layers.1"] and names[-1] == ".:out.logits"
    assert 30 < result.drift[-1].snr_db < 60 and result.drift[0].num_tensors == 2
    assert sum(row.share or 0 for row in result.drift) == pytest.approx(1.0)
    console = Console(file=io.StringIO(), width=100)
    console.print(comparison(result))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "another precision: drift" in text and "drift, in order of execution" in text


def test_f15_a_verdict_that_is_asked_for_or_a_budget_fails(records: Path) -> None:
    sides = [str(records / "float32"), str(records / "bfloat16")]
    assert main(["compare", *sides]) == 0
    assert main(["compare", *sides, "--min-snr", "30dB"]) == 0
    assert main(["compare", *sides, "--min-snr", "90dB"]) == 1
    assert main(["compare", *sides, "--fail-on", "suspicious"]) == 1
    assert main(["compare", *sides, "--min-snr", "much"]) == 2


def test_f15_what_is_no_signal_any_more_is_wrong(records: Path) -> None:
    result = glass.compare(records / "float32", records / "wrong")
    assert not result.ok and result.verdict == "wrong"
    assert result.first_divergence is not None and result.first_divergence.site == "layers.2"


def test_of_one_precision_nothing_is_drift(records: Path) -> None:
    result = glass.compare(records / "bfloat16", records / "wrong")
    assert not result.ok and result.drift == () and result.calibration == "uncalibrated"
