"""Keep of a traced graph what leads to its results: for a program that is a part of what was run."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph

from glassengine.program.user_code.marks import Mark

_STORED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def remove_dead_nodes(graph: Graph, marks: Iterable[Mark]) -> list[Mark]:
    """Erase what no result depends on, and return the marks of what is left.

    Args:
        graph: Functional and free of marks.
        marks: What the erased marks named.
    """
    for node in reversed(list(graph.nodes)):
        # Inputs are part of the signature. Assertions have no result, so that all that they read would stay.
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
    left = set(graph.nodes)
    return [mark for mark in marks if mark.node in left]


def without_dead_weights(exported: ExportedProgram) -> ExportedProgram:
    """Return the program without parameters, buffers and constants that nothing reads."""
    placeholders = {node.name: node for node in exported.graph.find_nodes(op="placeholder")}
    specs = exported.graph_signature.input_specs
    dead = {spec.arg.name for spec in specs if spec.kind in _STORED and not placeholders[spec.arg.name].users}
    for name in dead:
        exported.graph.erase_node(placeholders[name])
    signature = copy.copy(exported.graph_signature)
    signature.input_specs = [spec for spec in specs if spec.arg.name not in dead]
    kept = {spec.target for spec in signature.input_specs if spec.target is not None}
    return ExportedProgram(
        root=torch.fx.GraphModule(exported.graph_module, exported.graph),
        graph=exported.graph,
        graph_signature=signature,
        state_dict={name: value for name, value in exported.state_dict.items() if name in kept},
        range_constraints=_of_what_is_left(exported),
        module_call_graph=exported.module_call_graph,
        example_inputs=exported.example_inputs,
        constants={name: value for name, value in exported.constants.items() if name in kept},
        verifiers=exported.verifiers,
    )


def _of_what_is_left(exported: ExportedProgram) -> dict[Any, Any]:
    """Return the ranges of those sizes that a tensor of the graph has; readers wonder about others."""
    found = {
        symbol
        for node in exported.graph.nodes
        if isinstance(value := node.meta.get("val"), torch.Tensor)
        for size in value.shape
        if isinstance(size, torch.SymInt)
        for symbol in size.node.expr.free_symbols  # type: ignore[attr-defined]
    }
    return {symbol: bounds for symbol, bounds in exported.range_constraints.items() if symbol in found}
