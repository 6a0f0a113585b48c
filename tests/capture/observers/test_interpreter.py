"""The interpreter: every computed node once, in order, without gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from glassengine.capture.observers.interpreter import run_program
from glassengine.errors import UsageError
from glassengine.program.export.export import export_module
from glassengine.program.representation.program import Program

X = torch.linspace(-2, 2, 8).reshape(2, 4)


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    return export_module(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval(), {"input": X})


def test_computed_nodes_are_observed_once_in_graph_order(program: Program) -> None:
    seen: list[torch.fx.Node] = []
    run_program(program, {"input": X}, lambda node, value: seen.append(node))
    assert seen == [node for node in program.graph.nodes if node.op == "call_function"]
    assert len(seen) == 2


def test_nothing_keeps_a_graph_of_gradients(program: Program) -> None:
    """Weights are parameters: with gradients on, every value of a step would hold on to all before it."""
    assert any(weight.requires_grad for weight in program.weights().values())
    values: list[Any] = []
    with torch.enable_grad():
        results = run_program(program, {"input": X.clone().requires_grad_()}, lambda node, value: values.append(value))
    assert not any(value.requires_grad for value in [*values, *results.values()])


def test_errors_of_the_observer_are_not_changed(program: Program) -> None:
    def refuse(node: torch.fx.Node, value: Any) -> None:
        raise UsageError("enough seen")

    with pytest.raises(UsageError, match=r"^enough seen"):
        run_program(program, {"input": X}, refuse)


def test_a_missing_input_is_named(program: Program) -> None:
    with pytest.raises(UsageError, match=r"inputs are missing\n.*got: x\n.*expected: input"):
        run_program(program, {"x": X})


class Channels(nn.Module):
    """A norm over channels between transposes: its kernel keeps strides that torch.export does not foresee."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return y.reshape(2, 3, 5, 4).flatten(2)


def test_a_view_of_other_strides_than_foreseen_is_a_copy() -> None:
    module, x = Channels().eval(), torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(1))
    (found,) = run_program(export_module(module, {"x": x}), {"x": x}).values()
    assert torch.equal(found, module(x))
