"""Pieces of graphs: they compute what the whole computes, and the search finds the planted culprit alone."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from glassengine.judge.pieces import MAX_TRIALS, NodeRecorder, Piece, clone, cut, piece_of, smallest_failing

Values = dict[str, Any]


def recorded(module: GraphModule, *inputs: torch.Tensor) -> Values:
    recorder = NodeRecorder(module)
    recorder.run(*inputs)
    return recorder.values


def chain(x: torch.Tensor) -> torch.Tensor:
    """Forty ops, no two of one result."""
    for number in range(10):
        left, right = (x * (1 + number / 10)).split(4, -1)
        x = torch.cat([left.relu(), right.sin()], -1) + x
    return x


@pytest.fixture(scope="module")
def graph() -> GraphModule:
    return make_fx(chain)(torch.randn(3, 8, generator=torch.Generator().manual_seed(0)))


@pytest.fixture(scope="module")
def values(graph: GraphModule) -> Values:
    return recorded(graph, torch.randn(3, 8, generator=torch.Generator().manual_seed(1)))


def calls(graph: GraphModule, name: str) -> list[Node]:
    return [node for node in graph.graph.nodes if node.op == "call_function" and name in str(node.target)]


def holds(*nodes: Node) -> Callable[[Piece], bool]:
    names = {node.name for node in nodes}
    return lambda piece: names <= {node.name for node in piece.ops}


def test_any_piece_computes_what_the_whole_computes(graph: GraphModule, values: Values) -> None:
    chooser = random.Random(0)
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    for _ in range(40):
        piece = piece_of(chooser.sample(nodes, chooser.randint(1, len(nodes))), values)
        if piece is None:
            continue  # a split alone returns no tensor
        for name, value in zip(piece.outputs, piece.run(), strict=True):
            assert torch.equal(value, values[name])
        assert not any(isinstance(value, (list, tuple)) for value in piece.inputs.values())


def test_what_a_piece_reads_keeps_its_name() -> None:
    graph = torch.fx.Graph()
    given = graph.create_node("placeholder", "onnx__Conv_208", name="onnx__Conv_208")
    made = graph.call_function(torch.relu, (given,))
    graph.output(made)
    piece = piece_of([made], {given.name: torch.zeros(2), made.name: torch.zeros(2)})
    assert piece is not None
    assert [node.name for node in piece.module.graph.find_nodes(op="placeholder")] == ["onnx__Conv_208"]


def test_one_culprit_is_found_alone(graph: GraphModule, values: Values) -> None:
    tried: list[int] = []

    def fails(culprit: Node, piece: Piece) -> bool:
        tried.append(len(piece.ops))
        return holds(culprit)(piece)

    for culprit in calls(graph, "sin"):
        tried.clear()
        found = smallest_failing(graph.graph, values, partial(fails, culprit))
        assert found is not None and [node.name for node in found.ops] == [culprit.name]
        assert len(tried) <= 16  # 2 log2(60), and some


def test_two_that_fail_only_together_are_found_together(graph: GraphModule, values: Values) -> None:
    first, second = calls(graph, "sin")[2], calls(graph, "relu")[7]
    found = smallest_failing(graph.graph, values, holds(first, second))
    assert found is not None and {first.name, second.name} == {node.name for node in found.ops}


def test_neighbors_that_fail_only_when_fused_stay_together(graph: GraphModule, values: Values) -> None:
    relu = calls(graph, "relu")[4]
    (user,) = relu.users
    found = smallest_failing(graph.graph, values, holds(relu, user))
    assert found is not None and [node.name for node in found.ops] == [relu.name, user.name]
    assert found.outputs == (user.name,)


def test_nothing_fails(graph: GraphModule, values: Values) -> None:
    assert smallest_failing(graph.graph, values, lambda piece: False) is None


def test_a_failure_that_comes_and_goes_ends_with_the_smallest_seen(graph: GraphModule, values: Values) -> None:
    chooser = random.Random(3)
    seen: list[int] = []

    def fails(piece: Piece) -> bool:
        failing = not seen or chooser.random() < 0.5
        if failing:
            seen.append(len(piece.ops))
        return failing

    found = smallest_failing(graph.graph, values, fails)
    assert found is not None and len(found.ops) == min(seen)
    assert len(seen) <= MAX_TRIALS


def test_random_values_are_taken_as_they_were_drawn() -> None:
    module = make_fx(lambda x: torch.rand_like(x) + x)(torch.ones(4))
    values = recorded(module, torch.ones(4))
    found = smallest_failing(module.graph, values, lambda piece: True)
    assert found is not None and [str(node.target) for node in found.ops] == ["aten.add.Tensor"]
    assert torch.equal(found.run()[0], values[found.outputs[0]])


def test_sizes_are_written_into_a_piece() -> None:
    class Sized(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 1).reshape(x.shape[0] * x.shape[1]) * x.shape[0]

    exported = torch.export.export(
        Sized(), (torch.ones(3, 4),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)
    ).run_decompositions({})
    module = exported.graph_module
    values = recorded(module, torch.randn(5, 4))
    last = calls(module, "mul.Tensor")[-1]
    for name in [n for n, value in values.items() if isinstance(value, (int, torch.SymInt))]:
        del values[name]  # as where only tensors were observed
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    piece = cut([last], tensors, {"x"})
    assert piece is not None and torch.equal(piece.run()[0], values[last.name])
    assert not any("sym" in str(node.target) or node.target is operator.mul for node in piece.ops)


def test_a_value_that_nobody_observed_makes_no_piece(graph: GraphModule, values: Values) -> None:
    last = calls(graph, "add")[-1]
    assert cut([last], {}, ()) is None


def test_a_run_changes_nothing_of_a_piece() -> None:
    def written(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + 1

    module = make_fx(written)(torch.ones(3))
    values = recorded(module, torch.ones(3))
    (name,) = (node.name for node in module.graph.nodes if node.op == "placeholder")
    assert torch.equal(values[name], torch.ones(3))
    piece = piece_of([node for node in module.graph.nodes if node.op == "call_function"], values)
    assert piece is not None
    assert all(torch.equal(a, b) for a, b in zip(piece.run(), piece.run(), strict=True))
    assert torch.equal(piece.inputs[name], torch.ones(3))


@pytest.mark.parametrize(
    "tensor", [torch.arange(6.0).reshape(2, 3).T, torch.ones(3, 1).expand(3, 4), torch.zeros(0, 2), torch.tensor(1.5)]
)
def test_a_copy_has_the_strides_of_the_original(tensor: torch.Tensor) -> None:
    copy = clone(tensor)
    assert torch.equal(copy, tensor)
    assert copy.stride() == tensor.stride() or 0 in tensor.stride()
    assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
