"""User passes on a program: `--pass file.py:function`.

The function gets a copy of the functional graph module, changes it in place or returns another one. Nodes that survive
keep their sites; a node that takes the place of another (it now feeds the same argument of the same consumer) takes
over its site, so that a comparison before / after can name it. Ops that the pass inserted get sites of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.export.graph_signature import OutputKind, OutputSpec
from torch.fx import Node
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils import _pytree as pytree

from glassengine.errors import UsageError
from glassengine.program.representation.naming import describe_shape, fingerprints, is_tensor_node, op_name
from glassengine.program.representation.program import Program, copied_graph, rebuilt
from glassengine.program.user_code.calls import described, load_function
from glassengine.sites import ROOT, Site, SiteTable, op_site


def apply_pass(program: Program, spec: str) -> Program:
    """Return `program` after the pass `spec`; the original is left as it is.

    Raises:
        UsageError: The pass cannot be found, raised, changed the inputs or outputs, or left an invalid graph.
    """
    return apply_function(program, load_function(spec), name=spec)


def apply_function(program: Program, function: Callable[[torch.fx.GraphModule], Any], *, name: str) -> Program:
    """Return `program` after `function`; see `apply_pass`."""
    module = torch.fx.GraphModule(program.exported.graph_module, copied_graph(program.graph))
    before = {node.name: node for node in module.graph.nodes}
    shapes_before = {node.name: (node.target, _structure(node)) for node in module.graph.nodes}
    uses = {node.name: [(user.name, _slots(user, node)) for user in node.users] for node in module.graph.nodes}
    inputs = [node.name for node in module.graph.find_nodes(op="placeholder")]
    try:
        result = function(module)
        if result is not None:
            module = result.graph_module if isinstance(result, PassResult) else result
        if isinstance(module, torch.fx.GraphModule):
            module.graph.lint()
    except Exception as error:
        raise UsageError(f"pass {name} failed", got=described(error), hint="run with -v") from error
    if not isinstance(module, torch.fx.GraphModule):
        raise UsageError(
            f"pass {name} returned something else than a graph",
            got=type(module).__name__,
            expected="a torch.fx.GraphModule, or None where the given one was changed in place",
        )
    graph = module.graph
    if [node.name for node in graph.find_nodes(op="placeholder")] != inputs:
        raise UsageError(f"pass {name} changed the inputs of the program", expected=f"the same {len(inputs)} inputs")
    specs = _new_specs(program, graph, name)
    after = {node.name: node for node in graph.nodes}
    successors = _successors(before, uses, after)
    try:
        _restore_meta(program, graph, successors, shapes_before)
        changed = rebuilt(program.exported, graph, specs)
    except Exception as error:
        raise UsageError(
            f"pass {name} left a graph that is not valid",
            got=f"{type(error).__name__}: {error}",
            expected="call_function nodes of functional ATen ops with fitting arguments",
        ) from error
    sites = SiteTable(_sites(program, graph, {old: new.name for old, new in successors.items()}))
    return replace(program, exported=changed, sites=sites, output_nodes=_output_nodes(program, specs))


def _structure(node: Node) -> str:
    return str((node.args, node.kwargs))


def _slots(user: Node, node: Node) -> list[int]:
    flat, _ = pytree.tree_flatten((user.args, user.kwargs))
    return [index for index, value in enumerate(flat) if value is node]


def _new_specs(program: Program, graph: torch.fx.Graph, name: str) -> list[OutputSpec]:
    results = graph.output_node().args[0]
    specs = program.exported.graph_signature.output_specs
    if not isinstance(results, (list, tuple)) or len(results) != len(specs):
        got = len(results) if isinstance(results, (list, tuple)) else 1
        raise UsageError(f"pass {name} changed the number of outputs", got=str(got), expected=str(len(specs)))
    changed = []
    for spec, result in zip(specs, results, strict=True):
        if not isinstance(result, Node):
            raise UsageError(f"pass {name} changed the kind of an output", got=str(result), expected=str(spec.arg))
        changed.append(replace(spec, arg=type(spec.arg)(name=result.name)))
    return changed


def _successors(
    before: dict[str, Node], uses: dict[str, list[tuple[str, list[int]]]], after: dict[str, Node]
) -> dict[str, Node]:
    """Map each vanished node to the new node that now feeds the same argument of a surviving consumer."""
    successors: dict[str, Node] = {}
    for name in reversed(before):
        if name in after:
            continue
        for consumer, slots in uses[name]:
            survivor = after.get(consumer) or successors.get(consumer)
            if survivor is None:
                continue
            flat, _ = pytree.tree_flatten((survivor.args, survivor.kwargs))
            candidates = [flat[i] for i in slots if i < len(flat) and isinstance(flat[i], Node)]
            new = [node for node in candidates if node.name not in before and node not in successors.values()]
            if new:
                successors[name] = new[0]
                break
    return successors


def _restore_meta(
    program: Program, graph: torch.fx.Graph, successors: dict[str, Node], shapes_before: Mapping[str, tuple[Any, str]]
) -> None:
    """Give new nodes the metadata of what they replace, and fake values to all that the pass has reached."""
    old = {node.name: node for node in program.graph.nodes}
    for name, node in successors.items():
        for key, value in old[name].meta.items():
            node.meta.setdefault(key, value)
    fakes = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    modes = [fake.fake_mode for fake in fakes if isinstance(fake, torch._subclasses.FakeTensor)]
    stale: set[Node] = set()
    # Shapes are only asked for: a guard made here would fix the batch of every later trace.
    shape_env = modes[0].shape_env
    with modes[0], shape_env.suppress_guards() if shape_env is not None else nullcontext():
        for node in graph.nodes:
            same = shapes_before.get(node.name) == (node.target, _structure(node))
            if node.op == "call_function" and not (same and stale.isdisjoint(node.all_input_nodes)):
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)
                stale.add(node)


def _sites(program: Program, graph: torch.fx.Graph, renamed: Mapping[str, str]) -> list[Site]:
    """Return the sites of `program` that survive, brought up to date, and those of inserted ops, in graph order."""
    names = program.weight_names() | {port.node: port.name for port in program.inputs}
    prints = fingerprints(graph, names)
    symbols = program.symbols()
    kept: dict[str, list[Site]] = {}
    for site in program.sites:
        name = renamed.get(site.node, site.node)
        aliases = tuple(name if alias == site.node else alias for alias in site.aliases)
        kept.setdefault(name, []).append(replace(site, node=name, aliases=aliases))
    numbers = Counter(site.name.rpartition(".")[0] for site in program.sites if site.kind == "op")
    table: list[Site] = []
    positions: dict[Node, str] = {}
    for node in graph.nodes:
        own = kept.get(node.name, [])
        path = next((site.name.split("/")[0] for site in own if site.kind == "op"), None)
        # An inserted op belongs to the module that made its first input.
        positions[node] = path or next((positions[source] for source in node.all_input_nodes), ROOT)
        if not own and is_tensor_node(node):
            stem = op_site(positions[node], op_name(node), 0).rpartition(".")[0]
            name = f"{stem}.{numbers[stem]}"
            numbers[stem] += 1
            own = [Site(name, "op", node.name, op_name(node), "", (), {}, None, prints[node], (node.name,))]
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            shape, axes = describe_shape(value, symbols)
            dtype = str(value.dtype).removeprefix("torch.")
            op, print_ = op_name(node), prints[node]
            table += [replace(s, dtype=dtype, shape=shape, axes=axes, op=op, fingerprint=print_) for s in own]
    return table


def _output_nodes(program: Program, specs: list[OutputSpec]) -> dict[str, str]:
    """Return output name -> node after the pass: results and caches each in their own order."""
    free = list(enumerate(program.exported.graph_signature.output_specs))
    table = {}
    for name, node in program.output_nodes.items():
        is_cache = name in program.caches.values()
        fitting = [entry for entry in free if entry[1].arg.name == node]
        entry = next((e for e in fitting if (e[1].kind is OutputKind.USER_INPUT_MUTATION) is is_cache), fitting[0])
        table[name] = specs[entry[0]].arg.name
        free.remove(entry)
    return table
