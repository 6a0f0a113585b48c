"""Compile and run a flat graph again, on any back-end.

A graph that torch.compile captured is compiled in memory, as it was; one of an engine is built ahead of time, with its
weights inside, as engines are. A back-end that cannot compile in memory builds everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

from glassengine.backends.protocol.backend import Backend, CachingGraphs, CompilingGraphs
from glassengine.executable.graph import CapturedGraph
from glassengine.executable.run.executable import compile_executable, compile_graph, load_executable
from glassengine.executable.snapshot import layout
from glassengine.judge.graphs.flat import flat_program, with_values
from glassengine.program.loading.stored import onnx_program
from glassengine.program.onnx.file import OnnxFile, fill
from glassengine.program.onnx.translated import without_data
from glassengine.program.representation.program import Program, copied_graph

GraphRun = Callable[[Sequence[Any]], Sequence[Any]]
"""Takes the inputs in the order of the placeholders, may write to them, and returns the outputs in order."""


def compile_run(
    name: str, graph: CapturedGraph, values: Sequence[Any], backend: Backend, directory: Path, *, keep: bool = False
) -> GraphRun:
    """Compile a graph for one kind of inputs and return what runs it.

    Args:
        name: Shown in messages.
        graph: Every placeholder has a value without data (`meta["val"]`).
        values: Of the inputs, in order.
        backend: What compiles.
        directory: For what a back-end builds; must live as long as the result.
        keep: Look the compiled code up in the persistent cache, and keep it there.

    Raises:
        BackendError: The back-end failed.
        UsageError: The back-end builds programs, and the graph cannot be made one.
    """
    if graph.kind == "engine" or not isinstance(backend, CompilingGraphs):
        return _build_run(name, program_of(of_contiguous(graph, values), values), values, backend, directory)
    fakes = [node.meta["val"] for node in graph.module.graph.find_nodes(op="placeholder")]
    cache = backend.graph_cache() if keep and isinstance(backend, CachingGraphs) else None
    with tracing(TracingContext(detect_fake_mode(fakes) or FakeTensorMode())):
        executable = compile_graph(name, graph, lambda: backend.compile_graph(graph.module, fakes), cache)

    def run(arguments: Sequence[Any]) -> Sequence[Any]:
        with torch.no_grad():
            found: Sequence[Any] = executable.run(list(arguments))
            return found

    return run


def of_contiguous(graph: CapturedGraph, values: Sequence[Any]) -> CapturedGraph:
    """Return a graph that takes contiguous inputs: what is built ahead of time is given no others."""
    placeholders = graph.module.graph.find_nodes(op="placeholder")
    is_weight = [spec.kind in ("parameter", "buffer") for spec in graph.inputs]
    vals = [node.meta["val"] for node, weight in zip(placeholders, is_weight, strict=True) if not weight]
    if all(value.is_contiguous() for value in vals if isinstance(value, torch.Tensor)):
        return graph
    module = GraphModule(graph.module, copied_graph(graph.module.graph))
    given = zip(values, is_weight, strict=True)
    with_values(module, [v if weight or not isinstance(v, torch.Tensor) else v.contiguous() for v, weight in given])
    return replace(graph, module=module)


def _build_run(name: str, program: Program, values: Sequence[Any], backend: Backend, directory: Path) -> GraphRun:
    compile_executable(name, lambda folder: backend.build(program, folder), directory)
    weights = None if backend.keeps_weights(program) else dict(program.exported.state_dict)
    executable = load_executable(name, lambda folder: backend.load(folder, weights), directory)
    order = [node.name for node in program.graph.find_nodes(op="placeholder")]
    ports = {port.node: port.name for port in program.inputs}

    def run(arguments: Sequence[Any]) -> Sequence[Any]:
        given = {ports[node]: value for node, value in zip(order, arguments, strict=True) if node in ports}
        with torch.no_grad():
            found = executable.run(given)
        return [found[output] for output in program.output_nodes]

    return run


def without_numbers(graph: CapturedGraph, values: Sequence[Any]) -> tuple[CapturedGraph, list[torch.Tensor]]:
    """Return a graph into which its numbers are written, with sizes of these inputs, and the inputs that remain.

    Tensors that are nothing but numbers of it, as the scalars of lazy code, are numbers, too.

    Args:
        graph: The graph; is not changed.
        values: Of its inputs, in order.
    """
    if graph.onnx is not None:
        return graph, list(values)  # it has no numbers
    copy = copied_graph(graph.module.graph)
    specs, kept = [], []
    for node, spec, value in zip(list(copy.find_nodes(op="placeholder")), graph.inputs, values, strict=True):
        numbers = [node]
        if isinstance(value, torch.Tensor):
            numbers = [user for user in node.users if user.target is torch.ops.aten._local_scalar_dense.default]
            if not numbers or len(numbers) < len(node.users):
                specs.append(spec)
                kept.append(value)
                continue
            value = value.item()
        for number in numbers:
            written = partial(_in_place_of, {number: value})
            for user in list(number.users):
                user.args = torch.fx.node.map_arg(user.args, written)
                user.kwargs = torch.fx.node.map_arg(user.kwargs, written)
            copy.erase_node(number)
        if numbers[0] is not node:
            copy.erase_node(node)
    module = GraphModule(graph.module, copy)
    with_values(module, kept)
    return replace(graph, module=module, inputs=tuple(specs)), kept


def _in_place_of(values: Mapping[Node, Any], node: Node) -> Any:
    return values.get(node, node)


def program_of(graph: CapturedGraph, values: Sequence[Any]) -> Program:
    """Return a graph as a program that holds its parameters, buffers and constants.

    Args:
        graph: The graph; its inputs know what they are.
        values: Of its inputs, in order.

    Raises:
        UsageError: See `flat_program`.
    """
    placeholders = graph.module.graph.find_nodes(op="placeholder")
    if graph.onnx is not None:
        held = {graph.onnx.values[node.name]: value for node, value in zip(placeholders, values, strict=True)}
        results: Any = graph.module.graph.output_node().args[0]
        model = without_data(graph.onnx.file, [graph.onnx.values[node.name] for node in results])
        fill(model, held)
        return onnx_program(OnnxFile(Path(layout.ONNX_GRAPH), model))
    weights = {
        node.name: (spec.name, value)
        for node, spec, value in zip(placeholders, graph.inputs, values, strict=True)
        if spec.kind in ("parameter", "buffer")
    }
    return flat_program(graph.module, weights=weights, output_names=graph.output_names)
