"""Inputs of plain modules: made up as `check` makes them up, or tensors in the order of the forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import glassengine as glass
from glassengine.errors import UsageError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.table = nn.Linear(4, 4), nn.Embedding(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x))


class Two(Net):
    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        return self.fc(x) - y * scale


X, Y = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)), torch.ones(3, 4)
FILE = """
import torch
from torch import nn

def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 3), nn.ReLU()).eval()

def image():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).eval()

def tokens():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 3)).eval()

class Odd(nn.Module):
    def forward(self, batch):
        return batch["x"] + batch["y"]

def odd():
    return Odd().eval()
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FILE)
    return str(tmp_path / "mine.py")


@pytest.mark.parametrize("name", ["linear", "image", "tokens"])
def test_u4_sites_and_build_make_inputs_up_as_check_does(
    name: str, file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert any(site.op in ("linear", "addmm") for site in glass.sites(f"{file}:{name}"))
    engine: Any = glass.build(f"{file}:{name}", tmp_path / "engine", backend="eager")
    assert "the inputs are made up: input [" in caplog.text and engine.manifest.inputs
    assert glass.check(f"{file}:{name}", candidate=tmp_path / "engine").ok


def test_u4_what_cannot_be_made_up_is_told(file: str, tmp_path: Path) -> None:
    for command in (glass.sites, glass.check, lambda spec: glass.build(spec, tmp_path / "engine", backend="eager")):
        with pytest.raises(UsageError, match="--inputs"):
            command(f"{file}:odd")  # type: ignore[operator]


@pytest.mark.parametrize("inputs", [X, (X,), [X], [(X,), (X[:2],)], {"x": X}, [{"x": X}]], ids=str)
def test_u4_tensors_without_names(inputs: Any) -> None:
    engine: Any = glass.build(Net().eval(), inputs=inputs, backend="eager")
    assert torch.equal(engine(X)["output"], Net()(X)) and torch.equal(engine(x=X)["output"], engine(X)["output"])


@pytest.mark.parametrize("inputs", [(X, Y), [X, Y], {"y": Y, "x": X}, [{"y": Y, "x": X}]], ids=str)
def test_u4_the_order_is_that_of_the_forward(inputs: Any) -> None:
    engine: Any = glass.build(Two().eval(), inputs=inputs, backend="eager")
    expected = Two()(X, Y)
    for outputs in (engine(X, Y), engine(X, y=Y), engine(y=Y, x=X)):
        assert torch.equal(outputs["output"], expected)


@pytest.mark.parametrize("inputs", [3, "", (X, Y), [3], (3, 4)], ids=str)
def test_u4_other_inputs_are_refused(inputs: Any) -> None:
    with pytest.raises(UsageError):
        glass.build(Net().eval(), inputs=inputs, backend="eager")


def test_u4_other_arguments_are_refused() -> None:
    engine: Any = glass.build(Net().eval(), inputs=X, backend="eager")
    for args, more in (((X, X), {}), ((X,), {"x": X}), ((), {}), (((X,),), {}), ((), {"y": X})):
        with pytest.raises(UsageError):
            engine(*args, **more)
