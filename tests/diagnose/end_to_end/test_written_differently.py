"""Two graphs say different things and the values do not show it: listed, not judged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from glassengine.diagnose import check
from glassengine.engine.build.build import build_program
from glassengine.program import export_program, load_inputs, load_model
from glassengine.report import terminal_check


@pytest.fixture
def inputs(tmp_path: Path) -> str:
    path = tmp_path / "inputs.pt"
    torch.save({"input": torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).bfloat16()}, path)
    return str(path)


def perceptron(activation: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), activation, nn.Linear(32, 8)).bfloat16().eval()


def test_an_activation_of_another_form_in_half_precision(inputs: str) -> None:
    result = check(perceptron(nn.GELU()), candidate=perceptron(nn.GELU("tanh")), inputs=inputs)
    assert result.ok and result.verdict == "rounding"
    found = result.written_differently
    assert [(item.site, item.verdict) for item in found] == [("1/gelu.0", "rounding")]
    assert "tanh" in found[0].difference
    console = Console(width=120, no_color=True)
    with console.capture() as screen:
        console.print(terminal_check.check(result))
    assert "written differently, the same up to rounding: 1 ops" in screen.get() and "1/gelu.0" in screen.get()


def test_ops_that_make_a_difference_are_origins(inputs: str) -> None:
    result = check(perceptron(nn.LeakyReLU(0.01)), candidate=perceptron(nn.LeakyReLU(0.5)), inputs=inputs)
    assert not result.ok and result.first_divergence is not None
    assert result.first_divergence.site == "1/leaky_relu.0"
    assert [item.verdict for item in result.written_differently] == ["wrong"]


def test_equal_programs_list_nothing(inputs: str) -> None:
    result = check(perceptron(nn.GELU()), candidate=perceptron(nn.GELU()), inputs=inputs)
    assert result.ok and result.written_differently == ()


def test_an_engine_is_asked_for_the_program_that_it_was_built_from(inputs: str, tmp_path: Path) -> None:
    """Neither the engine's values nor those of the release engine show it: its program does."""
    other = load_model(perceptron(nn.GELU("tanh")), dtype="bfloat16")
    build_program(export_program(other, inputs=load_inputs(inputs)), tmp_path / "engine", backend="eager")
    result = check(perceptron(nn.GELU()), candidate=tmp_path / "engine", inputs=inputs)
    assert result.ok and result.verdict == "rounding"
    assert [(item.site, item.level) for item in result.written_differently] == [("1/gelu.0", "engine")]


def test_engines_of_one_program_list_nothing(inputs: str) -> None:
    result = check(perceptron(nn.GELU()), backend="eager", inputs=inputs)
    assert result.ok and result.written_differently == ()
