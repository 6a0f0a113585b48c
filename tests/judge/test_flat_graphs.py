"""Graphs on their way to a back-end that builds ahead of time."""

from __future__ import annotations

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from glassengine.executable.graph import CapturedGraph, input_spec
from glassengine.judge.flat_graphs import of_contiguous, program_of


def captured(*values: torch.Tensor, tracing_mode: str = "fake") -> CapturedGraph:
    def function(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x @ weight,)

    module: GraphModule = make_fx(function, tracing_mode=tracing_mode)(*values)
    specs = [
        input_spec(value, name, kind) for value, name, kind in zip(values, "xw", ("input", "parameter"), strict=True)
    ]  # type: ignore[arg-type]
    return CapturedGraph(module, tuple(specs), ("y",), "engine")


def strides(graph: CapturedGraph) -> list[tuple[int, ...]]:
    return [node.meta["val"].stride() for node in graph.module.graph.find_nodes(op="placeholder")]


def test_inputs_are_contiguous_and_weights_are_what_they_are() -> None:
    values = torch.randn(4, 6)[:, :1], torch.randn(5, 1).t()
    graph = captured(*values)
    built = of_contiguous(graph, values)
    assert strides(graph) == [(6, 1), (1, 1)] and strides(built) == [(1, 1), (1, 1)]
    torch.testing.assert_close(built.module(values[0].contiguous(), values[1]), graph.module(*values))
    assert of_contiguous(built, values) is built


def test_symbols_stay_symbols_and_examples_lie_where_the_inputs_do() -> None:
    values = torch.randn(4, 6), torch.randn(6, 5)
    program = program_of(captured(*values, tracing_mode="symbolic"), values)
    (example,) = program.exported.example_inputs[1].values()
    assert example.shape == (4, 6) and example.device.type == "cpu"
    sizes = program.graph.find_nodes(op="placeholder")[0].meta["val"].shape
    assert all(isinstance(size, torch.SymInt) and size.node.expr.free_symbols for size in sizes)
    assert {str(symbol) for symbol in program.exported.range_constraints} >= {str(size) for size in sizes}
