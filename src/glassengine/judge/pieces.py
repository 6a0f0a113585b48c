"""Pieces of a graph that run by themselves, and the smallest piece that still shows a failure.

A piece computes some nodes of a graph from recorded values of the others. Numbers that the graph computes (sizes) are
written into it, so that a piece has tensors and literals only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from glassengine.numerics.float64 import in_double, retarget, retargeted, target_of
from glassengine.ops.traits import traits_of
from glassengine.program.onnx.function import Each
from glassengine.program.representation.naming import of_any_layout

_KEPT = ("stack_trace", "nn_module_stack")


@dataclass(frozen=True)
class Piece:
    """A part of a graph, with the values that enter it.

    Attributes:
        module: Placeholders, operators and one output, a tuple of tensors.
        inputs: Name of the node that made a value -> the value, in the order of the placeholders; never changed by a
            run.
        outputs: Names of the nodes whose values it returns, in order.
    """

    module: GraphModule
    inputs: Mapping[str, torch.Tensor]
    outputs: tuple[str, ...]

    @property
    def ops(self) -> list[Node]:
        """Nodes that compute something, in order."""
        return [node for node in self.module.graph.nodes if node.op == "call_function"]

    def arguments(self) -> list[torch.Tensor]:
        """Return copies of the inputs, for a run that may write to them."""
        return [clone(tensor) for tensor in self.inputs.values()]

    @torch.no_grad()
    def run(self) -> tuple[torch.Tensor, ...]:
        """Return the outputs, node by node in eager mode."""
        found: tuple[torch.Tensor, ...] = AnyLayout(self.module).run(*self.arguments())
        return found

    @torch.no_grad()
    def exact(self, each: Each | None = None) -> tuple[torch.Tensor, ...]:
        """Return the outputs in float64, dtypes that are written into the graph included; `each` changes a result."""
        doubles = [retarget(tensor) for tensor in self.arguments()]
        found: tuple[torch.Tensor, ...] = _Float64(self.module, each).run(*doubles)
        return found


class AnyLayout(Interpreter):
    """Runs views as copies where the layout of a tensor allows no view."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call one op."""
        return super().call_function(of_any_layout(target), args, kwargs)


class _Float64(Interpreter):
    def __init__(self, module: GraphModule, each: Each | None) -> None:
        super().__init__(module)
        self._each = each

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = retargeted(self.fetch_args_kwargs_from_env(n))
        value = in_double(n, target_of(n))(*args, **kwargs)
        return value if self._each is None else self._each(n, value, args, kwargs)


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached copy with the same strides: compilers are given the layout as it was."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    # One that overlaps itself (an expanded one) cannot be written element by element.
    overlaps = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().clone() if overlaps else copy.copy_(tensor.detach())


def cut(outputs: Sequence[Node], values: Mapping[str, Any], known: Collection[str]) -> Piece | None:
    """Return the piece that computes `outputs` from known values; None where one of those that it needs is missing.

    Args:
        outputs: Nodes of one graph.
        values: Node name -> value, of all `known` nodes.
        known: Names of the nodes to take from `values`; an output is computed even if it is among them.
    """
    wanted = {node.name for node in outputs}
    inside: set[Node] = set()
    entering: set[Node] = set()
    numbers: dict[Node, Any] = {}
    waiting = list(outputs)
    while waiting:
        node = waiting.pop()
        if node in inside or node in entering or node in numbers:
            continue
        if node.name in known and node.name not in wanted and isinstance(values[node.name], torch.Tensor):
            entering.add(node)
        elif (number := _number(node, values)) is not None:
            numbers[node] = number
        elif node.op != "call_function":
            return None
        else:
            inside.add(node)
            waiting += node.all_input_nodes
    return _piece(outputs, inside, entering, numbers, values)


def _piece(
    outputs: Sequence[Node],
    inside: set[Node],
    entering: set[Node],
    numbers: Mapping[Node, Any],
    values: Mapping[str, Any],
) -> Piece:
    graph = Graph()
    copies: dict[Node, Node] = {}
    order = outputs[0].graph.nodes
    for node in order:
        if node in entering:
            copies[node] = graph.create_node("placeholder", node.name, name=node.name)  # `placeholder` lowers capitals
    for node in order:
        if node in inside:
            args, kwargs = torch.fx.node.map_arg(
                (node.args, dict(node.kwargs)), lambda source: numbers[source] if source in numbers else copies[source]
            )
            copies[node] = graph.create_node("call_function", node.target, args, kwargs, name=node.name)
            copies[node].meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
    graph.output(tuple(copies[node] for node in outputs))
    inputs = {node.name: values[node.name] for node in order if node in entering}
    return Piece(GraphModule(torch.nn.Module(), graph), inputs, tuple(node.name for node in outputs))


def _number(node: Node, values: Mapping[str, Any]) -> Any:
    """Return the value of a node that computes a number from sizes of known tensors; None for anything else."""
    if not isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return None
    if node.name in values:
        return values[node.name]
    if node.op != "call_function":
        return None
    arguments = []
    for source in node.args:
        value = (values.get(source.name, _number(source, values))) if isinstance(source, Node) else source
        if value is None:
            return None
        arguments.append(value)
    target: Any = node.target
    return target(*arguments)


Fails = Callable[[Piece], bool]

MAX_TRIALS = 80
"""Most pieces that are tried; each may be a compilation."""


def smallest_failing(graph: Graph, values: Mapping[str, Any], fails: Fails) -> Piece | None:
    """Return a smallest piece of `graph` that fails, or None where all of it does not.

    First the end and then the beginning of the graph are cut off by bisection, then what is left is thinned out: about
    2 log2(n) trials for n operators, most of them of small pieces.
    """
    # A number is written in, and random values are taken as they were drawn.
    are_values = (n for n in graph.nodes if not isinstance(values.get(n.name), (int, float, bool, type(None))))
    nodes = [n for n in are_values if n.op == "call_function" and not traits_of(n).is_random]
    return _Search(values, fails).smallest(nodes)


class _Search:
    """Tries pieces and keeps the smallest that failed: a failure that comes and goes loses nothing found before."""

    def __init__(self, values: Mapping[str, Any], fails: Fails) -> None:
        self._values = values
        self._fails = fails
        self._tried: dict[frozenset[Node], bool] = {}
        self._best: Piece | None = None

    def smallest(self, nodes: Sequence[Node]) -> Piece | None:
        if not self._failing(nodes):
            return None
        end = 1 + bisect_left(range(1, len(nodes)), True, key=lambda size: self._failing(nodes[:size]))
        size = 1 + bisect_left(range(1, end), True, key=lambda size: self._failing(nodes[end - size : end]))
        self._thin(nodes[end - size : end])
        return self._best

    def _thin(self, nodes: Sequence[Node]) -> None:
        """Leave out runs of operators, long ones first, as long as what is left fails."""
        kept = list(nodes)
        size = len(kept) // 2
        while size:
            start = 0
            while start < len(kept) and len(kept) > 1:
                rest = kept[:start] + kept[start + size :]
                if rest and self._failing(rest):
                    kept = rest
                else:
                    start += size
            size //= 2

    def _failing(self, nodes: Sequence[Node]) -> bool:
        key = frozenset(nodes)
        if key not in self._tried and len(self._tried) < MAX_TRIALS:
            piece = piece_of(nodes, self._values)
            self._tried[key] = piece is not None and self._fails(piece)
            if piece is not None and self._tried[key] and (not self._best or len(piece.ops) < len(self._best.ops)):
                self._best = piece
        return self._tried.get(key, False)


def piece_of(nodes: Iterable[Node], values: Mapping[str, Any]) -> Piece | None:
    """Return the piece that computes `nodes`, and returns those that are needed outside of it, or not used at all."""
    inside = set(nodes)
    outputs = [node for node in inside if isinstance(values.get(node.name), torch.Tensor)]
    outputs = [n for n in outputs if not n.users or any(user not in inside for user in n.users)]
    if not outputs:
        return None
    order = {node: index for index, node in enumerate(outputs[0].graph.nodes)}
    outputs.sort(key=order.__getitem__)
    return cut(outputs, values, values.keys() - {node.name for node in inside})


class NodeRecorder(Interpreter):
    """Runs a graph in eager mode and keeps the value of every node in `values`, by name."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        """Run one node and keep what it made."""
        value = super().run_node(n)
        # What a later node writes in place must not change what was kept.
        self.values[n.name] = pytree.tree_map_only(torch.Tensor, clone, value)
        return value
