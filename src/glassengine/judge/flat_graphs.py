"""Flat ATen graphs, as snapshots and pieces have them: as programs for back-ends and judge, compiled and run again.

A graph that torch.compile captured is compiled in memory, as it was; one of an engine is built ahead of time, with its
weights inside, as engines are. A back-end that cannot compile in memory builds everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree

from glassengine.backends.protocol.backend import Backend, CachingGraphs, CompilingGraphs
from glassengine.errors import UsageError
from glassengine.executable.graph import CapturedGraph
from glassengine.executable.run.executable import compile_executable, compile_graph, load_executable
from glassengine.executable.snapshot import layout
from glassengine.program.kinds.causal_lm import USER_MODULE
from glassengine.program.loading.stored import onnx_program
from glassengine.program.onnx.file import OnnxFile, fill
from glassengine.program.onnx.translated import without_data
from glassengine.program.representation.naming import describe_shape, fingerprints, is_tensor_node, op_name, source_line
from glassengine.program.representation.program import Port, Program, copied_graph
from glassengine.sites import ROOT, Site, SiteTable, op_site

GraphRun = Callable[[Sequence[Any]], Sequence[Any]]
"""Takes the inputs in the order of the placeholders, may write to them, and returns the outputs in order."""


def flat_program(
    module: GraphModule, *, weights: Mapping[str, tuple[str, torch.Tensor]], output_names: Sequence[str]
) -> Program:
    """Return the program of a flat graph of tensors; inputs are called like their placeholders.

    Args:
        module: Its nodes have values (`meta["val"]`); what it writes to its inputs at its end is left out.
        weights: Placeholder -> qualified name and value of a parameter, buffer or constant.
        output_names: Of its results, in order; without non-tensor results.

    Raises:
        UsageError: It writes to its inputs in another way, or takes numbers.
    """
    graph = copied_graph(module.graph)
    _without_writes(graph)
    placeholders = list(graph.find_nodes(op="placeholder"))
    for node in placeholders:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise UsageError("a graph that takes numbers cannot be judged", got=node.name, expected="tensors")
    returned: Any = graph.output_node().args[0]
    named = [(name, node) for name, node in zip(output_names, returned, strict=True) if _is_tensor(node)]
    graph.output_node().args = (tuple(node for _, node in named),)
    exported = _exported(module, graph, weights)
    given = [node for node in placeholders if node.name not in weights]
    ports = tuple(Port(n.name, n.name, _dtype(n), describe_shape(n.meta["val"], {})[0]) for n in given)
    leaves = {node: name for node, (name, _) in weights.items()} | {node.name: node.name for node in given}
    outputs: dict[str, str] = {}
    for name, node in named:
        outputs[name if name not in outputs else f"{name}#{len(outputs)}"] = node.name
    return Program(exported, _sites(graph, leaves), "module", ports, outputs, {}, None, {})


def with_values(module: GraphModule, arguments: Sequence[Any]) -> list[Any]:
    """Give every node of a graph its value without data (`meta["val"]`), and return those of the arguments."""
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(a, static_shapes=True) if isinstance(a, torch.Tensor) else a for a in arguments]
    with torch.no_grad():
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*fakes)
    return fakes


def _without_writes(graph: torch.fx.Graph) -> None:
    """Erase the copies into inputs with which graphs of torch.compile end."""
    for node in reversed(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder":
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)
        elif node.target._schema.is_mutable:
            raise UsageError("a graph that writes in place cannot be judged", got=str(node.target))


def _exported(
    module: GraphModule, graph: torch.fx.Graph, weights: Mapping[str, tuple[str, torch.Tensor]]
) -> ExportedProgram:
    inputs, state = [], {}
    placeholders = list(graph.find_nodes(op="placeholder"))
    for node in placeholders:
        argument = TensorArgument(name=node.name)
        if node.name not in weights:
            inputs.append(InputSpec(InputKind.USER_INPUT, argument, None))
            continue
        name, tensor = weights[node.name]
        is_parameter = tensor.is_floating_point() and not tensor.is_inference()
        kind = InputKind.PARAMETER if is_parameter else InputKind.BUFFER
        inputs.append(InputSpec(kind, argument, name, None if is_parameter else True))
        state[name] = torch.nn.Parameter(tensor.detach(), requires_grad=False) if is_parameter else tensor
    returned: Any = graph.output_node().args[0]
    outputs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=node.name), None) for node in returned]
    given = [spec.arg for spec in inputs if spec.kind is InputKind.USER_INPUT]
    calling = ModuleCallSignature(
        inputs=list(given),
        outputs=[spec.arg for spec in outputs],
        in_spec=pytree.tree_structure(((), {argument.name: 0 for argument in given})),
        out_spec=pytree.tree_structure(tuple(range(len(outputs)))),
        forward_arg_names=[argument.name for argument in given],
    )
    return ExportedProgram(
        root=GraphModule(module, graph),
        graph=graph,
        graph_signature=ExportGraphSignature(inputs, outputs),
        state_dict=state,
        range_constraints=_ranges(placeholders),
        module_call_graph=[ModuleCallEntry("", calling)],
        # Their names say how the program is called, their devices where; nothing looks at their values.
        example_inputs=((), {n.name: _example(n) for n in placeholders if n.name not in weights}),
    )


def _sites(graph: torch.fx.Graph, leaves: Mapping[str, str]) -> SiteTable:
    prints = fingerprints(graph, leaves)
    occurrences: Counter[tuple[str, str]] = Counter()
    sites = []
    for node in graph.nodes:
        if not is_tensor_node(node):
            continue
        where, op = module_path(node), op_name(node)
        shape, axes = describe_shape(node.meta["val"], {})
        name = op_site(where, op, occurrences[where, op])
        occurrences[where, op] += 1
        source = source_line(node)
        sites.append(Site(name, "op", node.name, op, _dtype(node), shape, axes, source, prints[node], (node.name,)))
    return SiteTable(sites)


def module_path(node: Node) -> str:
    """Return the user's path of the module that a node of a captured graph is in; the root's where none is known."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    return path.removeprefix(f"{USER_MODULE}.") or ROOT


def _ranges(placeholders: Sequence[Node]) -> dict[Any, Any]:
    """Return the range of every symbol in the sizes of the inputs, as far as their tracer knows it."""
    ranges: dict[Any, Any] = {}
    for node in placeholders:
        for size in node.meta["val"].shape:
            if isinstance(size, torch.SymInt):
                known = size.node.shape_env.var_to_range
                ranges |= {symbol: known[symbol] for symbol in size.node.expr.free_symbols if symbol in known}
    return ranges


def _example(node: Node) -> torch.Tensor:
    value = node.meta["val"]
    # `int` of a symbol would make it a constant of the graph.
    sizes = [size.node.hint if isinstance(size, torch.SymInt) else size for size in value.shape]
    return torch.empty(sizes, dtype=value.dtype, device=value.device)


def _is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _dtype(node: Node) -> str:
    return str(node.meta["val"].dtype).removeprefix("torch.")


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
        return _build_run(name, program_of(of_contiguous(graph, values), values), backend, directory)
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


def _build_run(name: str, program: Program, backend: Backend, directory: Path) -> GraphRun:
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
    numbers: dict[Node, Any] = {}
    for node, spec, value in zip(copy.find_nodes(op="placeholder"), graph.inputs, values, strict=True):
        readers = list(node.users)
        if not isinstance(value, torch.Tensor):
            numbers[node] = value
        elif readers and all(user.target is torch.ops.aten._local_scalar_dense.default for user in readers):
            numbers |= dict.fromkeys([node, *readers], value.item())
        else:
            specs.append(spec)
            kept.append(value)
    for node in reversed(copy.nodes):
        if node in numbers:
            copy.erase_node(node)
            continue
        node.args = torch.fx.node.map_arg(node.args, lambda read: numbers.get(read, read))
        node.kwargs = torch.fx.node.map_arg(node.kwargs, lambda read: numbers.get(read, read))
    module = GraphModule(graph.module, copy)
    with_values(module, kept)
    return replace(graph, module=module, inputs=tuple(specs)), kept


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
