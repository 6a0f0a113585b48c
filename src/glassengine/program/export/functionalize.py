"""Make a traced graph functional by rewriting it: the graph of `run_decompositions({})`, in a twentieth of its time.

`run_decompositions` executes the graph twice more on fake tensors with symbolic sizes. Most of what it finds, the trace
has found already: all ops but a few stay as they are. Here those are copied with their description, and the rules of
functionalization are applied to the nodes: an op in place becomes its functional twin; a view of memory that was
written since is taken again, from the new value, where it is next used; ops that may return their input (`to`,
`contiguous`, `reshape`) become what they did in the trace. A graph that holds anything else goes the long way. Tests
show that both ways give the same graph.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from glassengine.program.export.functional_rules import NoRule, Rewriter
from glassengine.program.representation.program import rebuilt, without_dead_weights


def functional(exported: ExportedProgram) -> ExportedProgram:
    """Return a program that was just traced with a functional graph, `linear` and attention whole, names in order.

    Args:
        exported: As traced: the fake tensors of its graph share memory where its tensors do. It stays as it is.
    """
    try:
        return rewritten(without_regions(exported))
    except NoRule:
        return decomposed(exported)


def without_regions(exported: ExportedProgram) -> ExportedProgram:
    """Return a traced program in which the ops of regions without gradients or autocast stand in their place.

    Torch takes these regions apart as well, and forgets modules and lines of their ops.
    """
    if not any(_is_plain(node) for node in exported.graph.nodes):
        return exported
    graph = Graph()

    def copied(source: GraphModule, made: dict[Node, Any]) -> Any:
        for node in source.graph.nodes:
            if node in made or node.op == "output" or _is_of_plain(node):
                continue
            if _is_plain(node):
                place = _REGIONS[node.target]
                inner = getattr(source, node.args[place].target)
                given = (made[one] if isinstance(one, Node) else one for one in node.args[place + 1 :])
                made[node] = copied(inner, dict(zip(inner.graph.find_nodes(op="placeholder"), given, strict=True)))
            elif node.target is operator.getitem and isinstance(made[node.args[0]], (tuple, list)):
                made[node] = made[node.args[0]][node.args[1]]
            else:
                made[node] = graph.node_copy(node, made.__getitem__)
        return map_arg(source.graph.output_node().args[0], made.__getitem__)

    results = copied(exported.graph_module, {})
    graph.output(results)
    specs = copy.deepcopy(exported.graph_signature.output_specs)
    for spec, result in zip(specs, results, strict=True):
        if isinstance(result, Node):
            spec.arg.name = result.name
    return rebuilt(exported, graph, specs)


_REGIONS = {torch.ops.higher_order.wrap_with_autocast: 4, torch.ops.higher_order.wrap_with_set_grad_enabled: 1}
"""Ops that run a graph -> the place of the graph among their arguments."""


def _is_plain(node: Node) -> bool:
    """Whether an op runs a graph as it would run outside of it: gradients are not asked for here."""
    is_autocast = node.target is torch.ops.higher_order.wrap_with_autocast
    return node.op == "call_function" and node.target in _REGIONS and not (is_autocast and node.args[2])


def _is_of_plain(node: Node) -> bool:
    return node.op == "get_attr" and bool(node.users) and all(map(_is_plain, node.users))


def rewritten(exported: ExportedProgram) -> ExportedProgram:
    """Return the functional program by rewriting the graph.

    Raises:
        Unknown: The graph holds what the rules here do not cover.
    """
    graph, output_specs = Rewriter(exported).run()
    new = _number(graph)
    for spec in output_specs:
        if isinstance(spec.arg, TensorArgument):
            spec.arg.name = new[spec.arg.name]
    return rebuilt(exported, graph, output_specs, verifiers=None)  # that of a trace allows mutations


def decomposed(exported: ExportedProgram) -> ExportedProgram:
    """Return the functional program by running the graph, its nodes named as `rewritten` names them.

    Torch numbers them by all that it computes on the way, sizes included: `mul_1331` is the eighth product of tensors.
    """
    traced = _without_leaks(without_regions(exported))
    traced.module_call_graph[0].signature.outputs = []  # torch would look for these names in the new graph
    found: ExportedProgram = traced.run_decompositions({})
    new = _number(found.graph)
    specs = found.graph_signature.output_specs
    for spec in specs:
        if isinstance(getattr(spec.arg, "name", None), str):
            spec.arg.name = new.get(spec.arg.name, spec.arg.name)
    found.module_call_graph[0].signature.outputs = [s.arg for s in specs if s.kind is OutputKind.USER_OUTPUT]
    found.graph_module.recompile()
    return found


def _without_leaks(exported: ExportedProgram) -> ExportedProgram:
    """Return a program without the constants that left a `torch.vmap`: nothing can be done with them outside of it."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    leaked = {name for name, value in exported.constants.items() if isinstance(value, torch.Tensor) and wrapped(value)}
    if not leaked:
        return exported
    for node in reversed(list(exported.graph.nodes)):
        is_aten = node.op == "call_function" and getattr(node.target, "namespace", "") == "aten"
        if is_aten and not node.users and not node.is_impure():
            exported.graph.erase_node(node)
    return without_dead_weights(exported, among=leaked)


def _number(graph: Graph) -> dict[str, str]:
    """Name the ops of a graph by what they are and count them in order; return the new name of each node."""
    space = Graph()._graph_namespace
    new = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            space._used_names.add(node.name)
    for node in graph.nodes:
        kept = node.op == "placeholder"
        new[node.name] = node.name if kept else space.create_name(_plain_name(graph, node.target), None)
    for node in graph.nodes:
        node.name = new[node.name]
    graph._graph_namespace = space
    return new


def _plain_name(graph: Graph, target: Any) -> str:
    is_number = target is torch.ops.aten.sym_size.int  # the exporter writes its overload out
    is_op = isinstance(target, torch._ops.OpOverload) and not is_number
    return graph._target_to_str(target.overloadpacket.__name__ if is_op else target)
