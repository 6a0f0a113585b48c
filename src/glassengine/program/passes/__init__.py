"""User passes on a program: `--pass file.py:function`.

The function gets a copy of the functional graph module, changes it in place or returns another one. Nodes that survive
keep their sites; a node that takes the place of another (it now feeds the same argument of the same consumer) takes over
its site, so that a comparison before / after can name it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from glassengine.errors import UsageError
from glassengine.program.factory import load_function
from glassengine.program.naming import fingerprints, op_name
from glassengine.program.program import Program, rebuilt
from glassengine.sites import SiteTable


def apply_pass(program: Program, spec: str) -> Program:
    """Return `program` after the pass `spec`; the original is left as it is.

    Raises:
        UsageError: The pass cannot be found, raised, changed the inputs or outputs, or left an invalid graph.
    """
    return apply_function(program, load_function(spec), name=spec)


def apply_function(program: Program, function: Callable[[torch.fx.GraphModule], Any], *, name: str) -> Program:
    """Return `program` after `function`; see `apply_pass`."""
    module = torch.fx.GraphModule(program.exported.graph_module, copy.deepcopy(program.graph))
    before = {node.name: node for node in module.graph.nodes}
    uses = {node.name: [(user.name, _slots(user, node)) for user in node.users] for node in module.graph.nodes}
    inputs = [node.name for node in module.graph.find_nodes(op="placeholder")]
    try:
        result = function(module)
        module = result if isinstance(result, torch.fx.GraphModule) else module
        module.graph.lint()
    except Exception as error:
        raise UsageError(f"pass {name} failed", got=f"{type(error).__name__}: {error}", hint="run with -v") from error
    graph = module.graph
    if [node.name for node in graph.find_nodes(op="placeholder")] != inputs:
        raise UsageError(f"pass {name} changed the inputs of the program", expected=f"the same {len(inputs)} inputs")
    results = graph.output_node().args[0]
    specs = program.exported.graph_signature.output_specs
    if len(results) != len(specs):
        raise UsageError(f"pass {name} changed the number of outputs", got=str(len(results)), expected=str(len(specs)))

    after = {node.name: node for node in graph.nodes}
    successors = _successors(before, uses, after)
    _restore_meta(program, graph, successors)
    renamed = {old: new.name for old, new in successors.items()}
    new_specs = [
        replace(spec, arg=type(spec.arg)(name=node.name)) for spec, node in zip(specs, results, strict=True)
    ]
    prints = fingerprints(graph, program.weight_names() | {port.node: port.name for port in program.inputs})
    sites = [
        replace(
            site,
            node=(node := after[renamed.get(site.node, site.node)]).name,
            op=op_name(node),
            fingerprint=prints[node],
            aliases=tuple(node.name if alias == site.node else alias for alias in site.aliases),
        )
        for site in program.sites
        if renamed.get(site.node, site.node) in after
    ]
    changed = rebuilt(program.exported, graph, new_specs)
    outputs = {key: spec.arg.name for key, spec in _outputs_in_order(program, new_specs)}
    return replace(program, exported=changed, sites=SiteTable(sites), output_nodes=outputs)


def _slots(user: Node, node: Node) -> list[int]:
    flat, _ = torch.utils._pytree.tree_flatten((user.args, user.kwargs))
    return [index for index, value in enumerate(flat) if value is node]


def _successors(
    before: dict[str, Node], uses: dict[str, list[tuple[str, list[int]]]], after: dict[str, Node]
) -> dict[str, Node]:
    """Map each vanished node to the new node that now feeds the same argument of a surviving consumer."""
    found: dict[str, Node] = {}
    for name in reversed(before):
        if name in after:
            continue
        for consumer, slots in uses[name]:
            survivor = after.get(consumer) or found.get(consumer)
            if survivor is None:
                continue
            flat, _ = torch.utils._pytree.tree_flatten((survivor.args, survivor.kwargs))
            candidates = [flat[i] for i in slots if i < len(flat) and isinstance(flat[i], Node)]
            new = [node for node in candidates if node.name not in before and node not in found.values()]
            if new:
                found[name] = new[0]
                break
    return found


def _restore_meta(program: Program, graph: torch.fx.Graph, successors: dict[str, Node]) -> None:
    """Give new nodes the metadata of what they replace, and fake values where the pass made none."""
    old = {node.name: node for node in program.graph.nodes}
    for name, node in successors.items():
        for key, value in old[name].meta.items():
            node.meta.setdefault(key, value)
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val", n))
            node.meta["val"] = node.target(*args, **kwargs)


def _outputs_in_order(program: Program, specs: list[Any]) -> list[tuple[str, Any]]:
    """Pair each output name with its new spec; several names may share one node."""
    position: dict[str, list[int]] = {}
    for index, spec in enumerate(program.exported.graph_signature.output_specs):
        position.setdefault(spec.arg.name, []).append(index)
    return [(name, specs[position[node][0]]) for name, node in program.output_nodes.items()]
