"""Other implementations of a program that are right: torch.compile, other attention, every row of a batch alone.

Like engines, and unlike `variations`, these are what users really run.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from glassengine.capture.observers import run_program
from glassengine.judge.replay.replay import Replay
from glassengine.judge.sides.module import ModuleSide
from glassengine.judge.sides.program import ProgramSide
from glassengine.judge.sides.protocol import Place
from glassengine.program import Program, export_program, load_model
from glassengine.program.representation.naming import is_tensor_node
from glassengine.program.representation.program import copied_graph
from tests.corpus.corpus import Bench, interpreted
from tests.corpus.edits import DoesNotApply
from tests.corpus.right.node_side import NodeSide


class _OwnNodes(NodeSide):
    """The baseline's own program."""

    def __init__(self, bench: Bench) -> None:
        computed = [node for node in bench.program.graph.nodes if node.op == "call_function" and is_tensor_node(node)]
        dtype = getattr(torch, bench.model.dtype)
        replay = Replay(bench.program, compiled=True, dtype=dtype, worth_a_bound=0.0)
        super().__init__(bench.program, {node.name: node.name for node in computed}, replay)


class TorchCompiled(_OwnNodes):
    """The program through `torch.compile`, every node an output."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        graph = copied_graph(bench.program.graph)
        wanted = [node for node in graph.nodes if node.name in self.nodes]
        graph.output_node().args = (tuple(wanted),)
        self._order = [node.name for node in wanted]
        self._placeholders = [node.name for node in graph.nodes if node.op == "placeholder"]
        module = GraphModule(bench.program.exported.graph_module, graph)
        self._compiled = torch.compile(module)

    def _run(self, fed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        placed = self._placed(fed)
        results = self._compiled(*(placed.get(name) for name in self._placeholders))
        return {name: value.clone() for name, value in zip(self._order, results, strict=True)}


class RowsApart(_OwnNodes):
    """Every row of the batch in a run of its own: other shapes, so other kernels and other orders of sums."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        if bench.program.layout is None:
            raise DoesNotApply
        self._axes: dict[str, int | None] = {}
        # Integers may be the numbers of rows, which are others here.
        for name in self.nodes.keys() - {n.name for n in bench.program.graph.nodes if _is_integer(n)}:
            site = bench.program.sites.by_node[name][0]
            folded = [i for i, size in enumerate(site.shape) if size == "batch*sequence"]
            self._axes[name] = folded[0] if folded else site.axes.get("batch")

    def _run(self, fed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rows: list[dict[str, Tensor]] = []
        batch = fed["input_ids"].shape[0]
        for index in range(batch):
            values: dict[str, Tensor] = {}

            def keep(node: Node, value: Any, values: dict[str, Tensor] = values) -> None:
                if node.name in self._axes:
                    values[node.name] = value

            row = {name: t if name == "cache_position" else t[index : index + 1] for name, t in fed.items()}
            run_program(self._program, row, keep)
            rows.append(values)
        merged = {}
        for name, axis in self._axes.items():
            parts = [row[name] for row in rows]
            if axis is not None:
                merged[name] = torch.cat(parts, axis)
            elif all(torch.equal(part, parts[0]) for part in parts):
                merged[name] = parts[0]
        return merged


def _is_integer(node: Node) -> bool:
    if not is_tensor_node(node):
        return False
    dtype: torch.dtype = node.meta["val"].dtype
    return not dtype.is_floating_point and dtype is not torch.bool


def other_attention(bench: Bench) -> list[ProgramSide | ModuleSide]:
    """Return the model with transformers' eager attention instead of torch's kernel: exported, and untouched.

    Raises:
        DoesNotApply: The model has one implementation only, or this one already.
    """
    model: Any = copy.deepcopy(bench.model.module)
    config = getattr(model, "config", None)
    if bench.program.layout is None or config is None or config._attn_implementation == "eager":
        raise DoesNotApply
    try:
        model.set_attn_implementation("eager")
    except ValueError as error:
        raise DoesNotApply from error
    program: Program = export_program(load_model(model, dtype=bench.model.dtype))
    return [interpreted(bench, program), ModuleSide(model, bench.program, place=Place.UNTOUCHED)]
