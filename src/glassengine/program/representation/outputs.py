"""Debug outputs: chosen and added on the program before any conversion, never looked up in a converted graph.

Three kinds of node are not added, because an executable that returns them would alias its inputs or repeat itself:
views of available tensors, updated caches (they are in the cache buffers after the run), and nodes that
depend on weights alone. `DerivedValues` computes them on reading.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.errors import UnknownNameError, UsageError
from glassengine.program.representation.naming import is_tensor_node, of_any_layout
from glassengine.program.representation.program import Program, copied_graph, rebuilt

PREFIX = "dbg."
"""Prefix of the names of added outputs; the rest is the FX node name."""


@dataclass(frozen=True)
class OutputPlan:
    """How each requested node is observed.

    Attributes:
        added: Nodes that become outputs of the executable, in graph order.
        derived: Node -> where its value comes from, for nodes that are computed on reading.
        left_out: Node -> reason, for nodes that do not fit the byte budget.
        num_bytes: Bytes of all added outputs for the planned sizes (0 without sizes).
    """

    added: tuple[str, ...]
    derived: dict[str, Derived]
    left_out: dict[str, str]
    num_bytes: int = 0


def is_view(node: Node) -> bool:
    """Whether `node` is a view, or one of several views, of its first argument."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and is_view(node.args[0])
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def last_uses(program: Program) -> dict[Node, list[Node]]:
    """Map each node to the values that are not needed after it; outputs live to the end."""
    table: dict[Node, list[Node]] = {}
    seen: set[Node] = set(program.graph.output_node().all_input_nodes)
    for node in reversed(program.graph.nodes):
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                table.setdefault(node, []).append(source)
    return table


def plan_outputs(
    program: Program,
    nodes: Iterable[str],
    *,
    sizes: Mapping[str, int] | None = None,
    byte_budget: int | None = None,
) -> OutputPlan:
    """Decide how to observe `nodes`.

    Args:
        program: The program.
        nodes: FX node names.
        sizes: "batch", "sequence" and "cache" of the largest step, for the byte count.
        byte_budget: Most bytes of added outputs in one step; the largest nodes are left out first.
    """
    wanted = set(nodes)
    graph_nodes = {node.name: node for node in program.graph.nodes}
    constant = weight_only_nodes(program)
    cached = {program.output_nodes[present]: past for past, present in program.caches.items()}
    already = {node: name for name, node in program.output_nodes.items() if node not in cached}
    cache_inputs = {port.node for port in program.inputs if port.name in program.caches}

    roots: set[str] = set()
    derived: dict[str, Derived] = {}
    for name in graph_nodes:
        if name not in wanted:
            continue
        node, root = graph_nodes[name], graph_nodes[name]
        while is_view(root) and root.name not in already:
            root = root.args[0]
        if node in constant:
            derived[name] = Derived(From.WEIGHTS)
        elif root.name in cached:
            derived[name] = Derived(From.CACHE, cached[root.name])
        elif root.op == "placeholder" and root.name not in cache_inputs:
            derived[name] = Derived(From.INPUT, root.name)
        elif root.name in already:
            derived[name] = Derived(From.OUTPUT, already[root.name])
        elif root is not node and root.op != "placeholder":
            derived[name] = Derived(From.VIEW, root.name)
            roots.add(root.name)
        else:
            roots.add(name)

    added = [name for name in graph_nodes if name in roots]
    costs = {name: _num_bytes(graph_nodes[name], program, sizes or {}) for name in added}
    left_out: dict[str, str] = {}
    if byte_budget is not None:
        total = sum(costs.values())
        for name in sorted(added, key=lambda n: -costs[n]):
            if total <= byte_budget:
                break
            total -= costs[name]
            left_out[name] = f"{costs[name]:,} bytes a step do not fit the byte budget of {byte_budget:,}"
        for name in list(derived):
            source = derived[name]
            if source.source is From.VIEW and source.name in left_out:
                left_out[name] = left_out[source.name]
                del derived[name]
        added = [name for name in added if name not in left_out]
    return OutputPlan(tuple(added), derived, left_out, sum(costs[name] for name in added) if sizes else 0)


def add_outputs(program: Program, nodes: Iterable[str]) -> Program:
    """Return a program that also returns `nodes` (in the given order, each once), named `dbg.<node>`.

    Raises:
        UnknownNameError: The graph has no such node.
    """
    names = [name for name in dict.fromkeys(nodes) if PREFIX + name not in program.output_nodes]
    exported = program.exported
    graph = copied_graph(exported.graph)
    by_name = {node.name: node for node in graph.nodes if is_tensor_node(node)}
    for name in names:
        if name not in by_name:
            raise UnknownNameError("node", name, by_name, hint="list the names with: glass sites MODEL [PATTERN]")
    output = graph.output_node()
    output.args = (tuple(output.args[0]) + tuple(by_name[name] for name in names),)  # type: ignore[arg-type]
    specs = list(exported.graph_signature.output_specs)
    specs += [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=name), None) for name in names]
    changed = rebuilt(exported, graph, specs, out_spec=_flat_spec(specs))
    return program.replace(changed, outputs={PREFIX + name: name for name in names})


def functional_form(program: Program) -> Program:
    """Return the program with cache updates as ordinary outputs (converters lose mutations silently)."""
    exported = program.exported
    specs = [
        OutputSpec(OutputKind.USER_OUTPUT, spec.arg, None) if spec.kind is OutputKind.USER_INPUT_MUTATION else spec
        for spec in exported.graph_signature.output_specs
    ]
    graph = copied_graph(exported.graph)
    _forget_pending_sizes(graph)
    return program.replace(rebuilt(exported, graph, specs, out_spec=_flat_spec(specs)))


def _forget_pending_sizes(graph: torch.fx.Graph) -> None:
    """Let a graph be converted twice: the tracer keeps a list of sizes that values decide, of `nonzero` and the like.

    A conversion leaves some of them on it, and the next one takes them for sizes that it has lost.
    """
    for node in graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            mode.shape_env.pending_fresh_unbacked_symbols.clear()
            return


def result_names(program: Program) -> list[str]:
    """Return the names of the user outputs in the order in which an executable of this program returns them."""
    by_node: dict[str, list[str]] = {}
    for name, node in program.output_nodes.items():
        by_node.setdefault(node, []).append(name)
    specs = program.exported.graph_signature.output_specs
    return [by_node[spec.arg.name].pop(0) for spec in specs if spec.kind is OutputKind.USER_OUTPUT]


class DerivedValues:
    """Values of nodes of one executed step: returned, available, a view of that, or made of weights alone.

    Anything else is refused: recomputed it would be the program's value, not that of the executable.

    Args:
        program: The program.
        inputs: Inputs of the step by name; caches as they are *after* the step.
        outputs: Outputs by name (`logits`, `dbg.<node>`, and `present_*` where the back-end returns them).
    """

    def __init__(
        self, program: Program, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
    ) -> None:
        self._nodes = {node.name: node for node in program.graph.nodes}
        self._weights = program.weights()
        self._constant = {node.name for node in weight_only_nodes(program)}
        self._values: dict[str, Any] = {}
        for port in program.inputs:
            if port.name in inputs:
                self._values[port.node] = inputs[port.name]
        for past, present in program.caches.items():
            if past in inputs:
                self._values[program.output_nodes[present]] = inputs[past]
        for name, tensor in outputs.items():
            self._values[program.output_nodes.get(name, name.removeprefix(PREFIX))] = tensor

    def __getitem__(self, node: str) -> torch.Tensor:
        """Return the value of the node called `node`.

        Raises:
            UnknownNameError: The graph has no such node.
            UsageError: It was neither returned nor can it be derived from what was.
        """
        if node not in self._nodes:
            raise UnknownNameError("node", node, self._nodes)
        value: torch.Tensor = self._evaluate(self._nodes[node])
        return value

    def _evaluate(self, node: Node) -> Any:
        if node.name in self._values:
            return self._values[node.name]
        if node.op == "placeholder" and node.name in self._weights:
            return self._weights[node.name]
        is_number = not isinstance(node.meta.get("val"), (torch.Tensor, list, tuple))
        if node.op != "call_function" or not (is_number or is_view(node) or node.name in self._constant):
            raise UsageError(f"node {node.name!r} was not observed", hint="build with --add-output")
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), self._evaluate)
        return of_any_layout(node.target)(*args, **kwargs)


def weight_only_nodes(program: Program) -> set[Node]:
    """Nodes whose value does not depend on any user input, not even on its shape."""
    user = {port.node for port in program.inputs}
    found: set[Node] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if node.name not in user:
                found.add(node)
        elif node.op == "call_function" and is_tensor_node(node) and all(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return found


def _num_bytes(node: Node, program: Program, sizes: Mapping[str, int]) -> int:
    site = program.sites.by_node[node.name][0]
    total = int(node.meta["val"].dtype.itemsize)
    for size in site.shape:
        total *= size if isinstance(size, int) else size_of(size, sizes)
    return total


_OPERATORS: dict[type[ast.AST], Callable[..., int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., int]] = {
    "Max": max,
    "Min": min,
    "Mod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CeilDiv": lambda a, b: -(-a // b),
    "floor": lambda a: a,
}


def size_of(expression: str, sizes: Mapping[str, int]) -> int:
    """Evaluate a dynamic size such as "2*batch*sequence"; unknown symbols and functions count as 1.

    The text may come from a file, so it is never handed to anything that evaluates Python (sympy does).
    """

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant):
            return int(node.value) if isinstance(node.value, int) else 1
        if isinstance(node, ast.Name):
            return sizes.get(node.id, 1)
        if isinstance(node, (ast.BinOp, ast.UnaryOp)) and type(node.op) in _OPERATORS:
            operands = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.operand,)
            return _OPERATORS[type(node.op)](*(value(operand) for operand in operands))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            return _FUNCTIONS[node.func.id](*(value(argument) for argument in node.args))
        return 1

    try:
        return value(ast.parse(expression, mode="eval").body)
    except ZeroDivisionError:
        return 1  # by an unknown symbol less itself, say
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 1  # in an ONNX file a size may be called anything


def _flat_spec(specs: Iterable[OutputSpec]) -> Any:
    count = sum(spec.kind is OutputKind.USER_OUTPUT for spec in specs)
    return pytree.tree_structure(tuple(range(count)))


class From(Enum):
    """What a value is derived from; the value says it in a manifest and to people."""

    WEIGHTS = "depends on weights alone"
    CACHE = "the cache {} after the step"
    INPUT = "the input {}"
    OUTPUT = "the output {}"
    VIEW = "a view of {}"


@dataclass(frozen=True)
class Derived:
    """Where a value is taken from on reading, and what that is called."""

    source: From
    name: str = ""

    def __str__(self) -> str:
        return self.source.value.format(self.name)
