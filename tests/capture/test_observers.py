"""Hooks on eager modules: order, call counts, what they leave behind; and every node of a program, once, in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from glassengine.capture.observers import observing, run_program
from glassengine.errors import UsageError
from glassengine.program.export.export import export_module
from glassengine.program.representation.program import Program

X = torch.ones(1, 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def forward(self, x: torch.Tensor, *, fail: bool = False) -> dict[str, torch.Tensor]:
        y = self.inner(x)
        if fail:
            raise RuntimeError("planted")
        return {"y": self.inner(y)}


EXPECTED = ["inner.0", "inner.1", "inner", "inner.0@1", "inner.1@1", "inner@1", ".:out.y"]


def test_outputs_in_order_of_execution() -> None:
    model, seen = Model(), []
    with observing(model, lambda site, tensor: seen.append(site)):
        model(X)
    assert seen == EXPECTED


def test_a_forward_that_failed_leaves_no_trace_in_the_next() -> None:
    model, seen = Model(), []
    with observing(model, lambda site, tensor: seen.append(site)):
        with pytest.raises(RuntimeError, match="planted"):
            model(X, fail=True)
        seen.clear()
        model.inner(X)
        assert seen == []
        model(X)
    assert seen == EXPECTED


def test_modules_that_run_outside_of_the_model_are_not_observed() -> None:
    model, seen = Model(), []
    with observing(model, lambda site, tensor: seen.append(site)):
        model.inner(X)
    assert seen == []


def test_the_hooks_are_gone_afterwards() -> None:
    model, seen = Model(), []
    with pytest.raises(RuntimeError, match="planted"), observing(model, lambda site, tensor: seen.append(site)):
        model(X, fail=True)
    seen.clear()
    model(X)
    assert seen == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_model_computes_what_it_computes() -> None:
    model = Model()
    expected = model(X)["y"]
    with observing(model, lambda site, tensor: None):
        assert torch.equal(model(X)["y"], expected)


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_compiled_parts_are_seen_from_outside_and_stay_whole(how: str) -> None:
    torch._dynamo.reset()
    model, seen, graphs = Model(), [], []

    def backend(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    if how == "wrapped":
        model.inner = torch.compile(model.inner, backend=backend)  # type: ignore[assignment]
    else:
        model.inner.compile(backend=backend)
    with torch.no_grad(), observing(model, lambda site, tensor: seen.append(site)):
        model(X)
    assert seen == ["inner", "inner@1", ".:out.y"]
    assert len(graphs) == (how == "wrapped")  # nothing of torch's own containers is compiled in place


GIVEN = torch.linspace(-2, 2, 8).reshape(2, 4)


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    return export_module(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval(), {"input": GIVEN})


def test_computed_nodes_are_observed_once_in_graph_order(program: Program) -> None:
    seen: list[torch.fx.Node] = []
    run_program(program, {"input": GIVEN}, lambda node, value: seen.append(node))
    assert seen == [node for node in program.graph.nodes if node.op == "call_function"]
    assert len(seen) == 2


def test_nothing_keeps_a_graph_of_gradients(program: Program) -> None:
    """Weights are parameters: with gradients on, every value of a step would hold on to all before it."""
    assert any(weight.requires_grad for weight in program.weights().values())
    values: list[Any] = []
    with torch.enable_grad():
        results = run_program(
            program, {"input": GIVEN.clone().requires_grad_()}, lambda node, value: values.append(value)
        )
    assert not any(value.requires_grad for value in [*values, *results.values()])


def test_errors_of_the_observer_are_not_changed(program: Program) -> None:
    def refuse(node: torch.fx.Node, value: Any) -> None:
        raise UsageError("enough seen")

    with pytest.raises(UsageError, match=r"^enough seen"):
        run_program(program, {"input": GIVEN}, refuse)


def test_a_missing_input_is_named(program: Program) -> None:
    with pytest.raises(UsageError, match=r"inputs are missing\n.*got: x\n.*expected: input"):
        run_program(program, {"x": GIVEN})


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
