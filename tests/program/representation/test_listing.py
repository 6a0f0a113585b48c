"""Differences of graphs: what is reported, and that neither numbering nor a change further up counts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from glassengine.errors import CorruptError
from glassengine.program.export.export import export_module
from glassengine.program.representation.artifacts import diff_graphs, diff_text, match_nodes
from glassengine.program.representation.listing import (
    NodeLine,
    graph_json,
    graph_text,
    list_nodes,
    read_listing,
    stage_of,
)
from glassengine.program.representation.passes import apply_function
from glassengine.program.representation.program import Program


class Chain(nn.Module):
    def __init__(self, *, extra: bool = False, scale: float = 2.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.extra, self.scale = extra, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.extra:
            x = torch.tanh(x + 1.0)
        x = torch.relu(self.first(x)) * self.scale
        return torch.sigmoid(self.second(x) + 1.0) - x


def exported(**options: Any) -> Program:
    return export_module(Chain(**options), {"x": torch.ones(2, 4)})


def listing(program: Program) -> list[NodeLine]:
    return list_nodes(stage_of(program, "functional"))


@pytest.fixture(scope="module")
def chain() -> Program:
    return exported()


def test_same_graph(chain: Program) -> None:
    assert diff_graphs(listing(chain), listing(exported())).changes == ()


def test_renumbered_nodes_are_no_difference(chain: Program) -> None:
    lines = listing(chain)
    table = {line.name: f"{line.name}_99" for line in lines if line.op == "call_function"}
    other = [
        dataclasses.replace(
            line, name=table.get(line.name, line.name), inputs=tuple(table.get(name, name) for name in line.inputs)
        )
        for line in lines
    ]
    assert diff_graphs(lines, other).changes == ()
    assert match_nodes(lines, other)["linear"] == "linear_99"


def test_inserted_ops_are_all_that_is_reported(chain: Program) -> None:
    diff = diff_graphs(listing(chain), listing(exported(extra=True)))
    # add and tanh come in; the first linear reads another value; what comes after computes something else, unchanged.
    assert [(change.kind, (change.candidate or "").partition(":")[0]) for change in diff.changes] == [
        ("added", "add"), ("added", "tanh"), ("changed", "linear"),
    ]  # fmt: skip


def test_changed_literal(chain: Program) -> None:
    diff = diff_graphs(listing(chain), listing(exported(scale=3.0)))
    assert [change.kind for change in diff.changes] == ["changed"]
    assert diff_text(diff).splitlines()[0] == "# nodes: 0 added, 0 removed, 1 changed"
    assert ["2.0" in line for line in diff.changes[0].lines] == [True, False]


def test_replaced_op(chain: Program) -> None:
    def swap(gm: torch.fx.GraphModule) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            node.target = torch.ops.aten.gelu.default

    diff = diff_graphs(listing(chain), listing(apply_function(chain, swap, name="swap")))
    assert [change.kind for change in diff.changes] == ["changed"]
    assert "aten.relu" in str(diff.changes[0].baseline) and "aten.gelu" in str(diff.changes[0].candidate)


def test_swapped_inputs_are_a_change(chain: Program) -> None:
    def swap(gm: torch.fx.GraphModule) -> None:
        (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sub.Tensor)
        node.args = (node.args[1], node.args[0])

    diff = diff_graphs(listing(chain), listing(apply_function(chain, swap, name="swap")))
    assert [change.kind for change in diff.changes] == ["changed"]


def test_removed_stands_before_added(chain: Program) -> None:
    def split(gm: torch.fx.GraphModule) -> None:
        (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(torch.ops.aten.clamp_min.default, (node.args[0], 0.0))
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)

    diff = diff_graphs(listing(chain), listing(apply_function(chain, split, name="split")))
    lines = [line for change in diff.changes for line in change.lines]
    assert lines[0].startswith("- relu") and lines[1].startswith("+ clamp_min")


def test_text_has_one_line_for_each_node(chain: Program) -> None:
    lines = listing(chain)
    text = graph_text(lines).splitlines()
    assert len(text) == len(lines) == len(chain.graph.nodes)
    (relu,) = [line for line in text if line.startswith("relu: ")]
    assert relu == "relu: float32[2, 4] = call_function aten.relu.default(%linear)  # ./relu.0"


def test_listing_survives_its_file(chain: Program, tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text(graph_json(listing(chain)))
    assert read_listing(tmp_path / "graph.json") == listing(chain)


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", '{"schema_version": 1, "nodes": [{}]}', '{"schema_version": 1, "nodes": 3}',
        '{"schema_version": 99, "nodes": []}', "[" * 100_000, '{"schema_version": "x", "nodes": []}',
    ],
)  # fmt: skip
def test_damaged_listing(tmp_path: Path, content: str) -> None:
    (tmp_path / "graph.json").write_text(content)
    with pytest.raises(CorruptError, match=r"graph\.json"):
        read_listing(tmp_path / "graph.json")


@pytest.mark.parametrize(("key", "value"), [("name", 3), ("inputs", [1]), ("sites", 4), ("source", 5)])
def test_node_of_other_types(chain: Program, tmp_path: Path, key: str, value: object) -> None:
    data = json.loads(graph_json(listing(chain)))
    data["nodes"][0][key] = value
    (tmp_path / "graph.json").write_text(json.dumps(data))
    with pytest.raises(CorruptError):
        read_listing(tmp_path / "graph.json")


def test_s11_nodes_of_one_call_with_fewer_inputs_are_others() -> None:
    lines = listing(exported())
    wide = [index for index, line in enumerate(lines) if len(line.inputs) > 1 and line.op == "call_function"]
    assert wide
    for index in wide:
        line = lines[index]
        fewer = dataclasses.replace(line, name="fewer", inputs=line.inputs[1:], fingerprint="another")
        changed = [*lines[:index], fewer, *lines[index + 1 :]]
        assert match_nodes(lines, changed).get(line.name) != line.name
        assert match_nodes(changed, lines).get("fewer") != "fewer"
