"""Cuts a program into stages: some of its layers each, with what one stage hands to the next as results and inputs.

A layer is what keeps keys and values of its own; what comes before the layers belongs to the first stage, what comes
after to the last. What needs no weights (masks, positions) is computed in every stage that reads it; the rest is
handed on.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from glassengine.errors import UsageError
from glassengine.program.kinds.causal_lm import KVLayout
from glassengine.program.parallel.placements import name_of
from glassengine.program.representation.program import Port, Program, keep_name, rebuilt
from glassengine.sites import SiteTable

HANDED = "handed_on."
"""Prefix of the inputs and results of a stage that are neither the program's own nor caches: then the node's name."""


def require_layers(program: Program, stages: int) -> dict[str, int]:
    """Return path of a layer -> stage.

    Raises:
        UsageError: There are fewer layers than stages.
    """
    layers = _layers(program)
    if len(layers) < stages:
        raise UsageError(
            f"{stages} stages need as many layers with caches of their own",
            got=f"{len(layers)} in {program.metadata.get('model', 'this model')}",
            hint=f"--pipeline-parallel {max(len(layers), 1)}",
        )
    return {path: number * stages // len(layers) for number, path in enumerate(layers)}


def _layers(program: Program) -> list[str]:
    layers: dict[str, None] = {}
    for present in program.caches.values():
        sites = program.sites.by_node.get(program.output_nodes[present], ())
        match = re.match(r"(.*?\.\d+)(?=[./:@]|$)", sites[0].name if sites else "")
        if match:
            layers[match[1]] = None
    return list(layers)


def stage_of_nodes(program: Program, stages: int) -> dict[str, int]:
    """Return node -> stage, of all ops but those that any stage computes for itself."""
    layers = require_layers(program, stages)
    stage_of: dict[str, int] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        above = [stage_of[item.name] for item in node.all_input_nodes if item.name in stage_of]
        path = program.sites.by_node[node.name][0].name if node.name in program.sites.by_node else ""
        match = re.match(r"(.*?\.\d+)(?=[./:@]|$)", path)
        own = [layers[match[1]]] if match and match[1] in layers else []
        if above or own:
            stage_of[node.name] = max(above + own)
    weights = {name for name, value in program.weights().items() if isinstance(value, torch.nn.Parameter)}
    for node in program.graph.nodes:
        # Before the layers: an embedding belongs to the first stage, and all that is computed from it.
        if node.op == "call_function" and node.name not in stage_of:
            reads = any(item.name in weights or stage_of.get(item.name) == 0 for item in node.all_input_nodes)
            if reads:
                stage_of[node.name] = 0
    return stage_of


def cut_stages(program: Program, stages: int) -> list[Program]:
    """Return the program of each stage, with its weights alone.

    Raises:
        UsageError: There are fewer layers than stages.
    """
    if stages == 1:
        return [program]
    owner = stage_of_nodes(program, stages)
    return [_Stage(program, owner, stage, stages).written() for stage in range(stages)]


class _Stage:
    def __init__(self, program: Program, owner: Mapping[str, int], stage: int, stages: int) -> None:
        self.program, self.owner, self.stage, self.last = program, owner, stage, stages - 1
        self.graph = Graph()
        self.made: dict[Node, Node] = {}
        self.ports: list[Port] = []
        self.specs: list[InputSpec] = []
        values = (node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder")
        self.mode = next(value.fake_mode for value in values if hasattr(value, "fake_mode"))
        self.by_name = {node.name: node for node in program.graph.nodes}

    def written(self) -> Program:
        program = self.program
        results = {name: self.by_name[node] for name, node in program.output_nodes.items()}
        mine = {name: node for name, node in results.items() if self.owner.get(node.name) == self.stage}
        sent = [] if self.stage == self.last else self._between(self.stage)
        received = [] if self.stage == 0 else self._between(self.stage - 1)
        needed = self._needed([*mine.values(), *sent], received)
        self._inputs(needed, received)
        for node in program.graph.nodes:
            if node in needed and node.op == "call_function" and node not in self.made:
                self._copy(node)
        return self._program(mine, sent)

    def _between(self, stage: int) -> list[Node]:
        """Return what is made up to a stage and read after it."""
        results = {
            name: node for name, node in self.program.output_nodes.items() if name not in self.program.caches.values()
        }
        found = []
        for node in self.program.graph.nodes:
            if self.owner.get(node.name, stage + 1) <= stage and isinstance(node.meta.get("val"), torch.Tensor):
                later = any(self.owner.get(user.name, -1) > stage for user in node.users)
                if later or (node.name in results.values() and self.owner[node.name] < self.last):
                    found.append(node)
        return found

    def _needed(self, ends: list[Node], received: list[Node]) -> set[Node]:
        given, needed = set(received), set(received)
        waiting = [node for node in ends if node not in given]
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        return needed

    def _inputs(self, needed: set[Node], received: list[Node]) -> None:
        ports = {port.node: port for port in self.program.inputs}
        program = self.program
        caches = {
            port.node: program.output_nodes[program.caches[port.name]]
            for port in program.inputs
            if port.name in program.caches
        }
        specs = {spec.arg.name: spec for spec in self.program.exported.graph_signature.input_specs}
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            is_given = node.name in ports and node.name not in caches
            if is_given or (node in needed if node.name not in caches else self.owner[caches[node.name]] == self.stage):
                self.made[node] = self.graph.node_copy(node)
                self.made[node].meta = dict(node.meta)
                self.specs.append(specs[node.name])
                if node.name in ports:
                    self.ports.append(ports[node.name])
        for node in received:
            made = self.graph.placeholder(f"handed_{node.name}")
            made.meta = {"val": node.meta["val"]}
            self.made[node] = made
            self.specs.append(InputSpec(InputKind.USER_INPUT, TensorArgument(made.name), None))
            dtype = str(node.meta["val"].dtype).removeprefix("torch.")
            sites = self.program.sites.by_node.get(node.name)
            shape = (
                sites[0].shape if sites else tuple(s if isinstance(s, int) else str(s) for s in node.meta["val"].shape)
            )
            self.ports.append(Port(HANDED + node.name, made.name, dtype, shape))

    def _copy(self, node: Node) -> None:
        if name_of(node) == "sym_size" and node.args[0] not in self.made:
            args: Any = self._same_size(node)
        else:
            args = map_arg(node.args, self.made.__getitem__)
        kwargs = map_arg(node.kwargs, self.made.__getitem__)
        made = self.graph.create_node("call_function", node.target, args, kwargs, name=node.name)
        keep_name(made, node.name)
        made.meta = dict(node.meta)
        same = all(
            self.made[item].meta.get("val") is item.meta.get("val")
            for item in node.all_input_nodes
            if item in self.made
        )
        if not same or name_of(node) == "sym_size":
            target: Any = node.target
            with self.mode:
                made.meta["val"] = target(*map_arg(args, _value), **map_arg(kwargs, _value))
        self.made[node] = made

    def _same_size(self, node: Node) -> tuple[Any, ...]:
        """Return the arguments that read the same size from an input of this stage."""
        ports = {port.node: port for port in self.program.inputs}
        size = ports[node.args[0].name].shape[node.args[1]]  # type: ignore[index, union-attr]
        for port in reversed(self.ports):
            if size in port.shape:
                return self.made[self.by_name[port.node]] if port.node in self.by_name else None, port.shape.index(size)
        raise UsageError(f"a stage has no input of the size {size!r}", hint="fewer stages: --pipeline-parallel 1")

    def _program(self, mine: Mapping[str, Node], sent: list[Node]) -> Program:
        program, exported = self.program, self.program.exported
        old = exported.graph_signature
        specs, values = [], []
        for spec in old.output_specs:
            node = self.by_name[spec.arg.name]
            if self.owner.get(node.name) == self.stage:
                specs.append(spec)
                values.append(self.made[node])
        for node in sent:
            specs.append(OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(self.made[node].name), None))
            values.append(self.made[node])
        self.graph.output(tuple(values))
        targets = {spec.target for spec in self.specs}
        users = [spec.arg for spec in self.specs if spec.kind is InputKind.USER_INPUT]
        num_results = sum(spec.kind is OutputKind.USER_OUTPUT for spec in specs)
        made = rebuilt(
            exported,
            self.graph,
            specs,
            input_specs=self.specs,
            in_spec=pytree.tree_structure((tuple(range(len(users))), {})),
            out_spec=pytree.tree_structure(tuple(range(num_results))),
            stored=lambda table: {name: value for name, value in table.items() if name in targets},
            example_inputs=(tuple(self._examples(users)), {}),
        )
        names = {port.name for port in self.ports}
        caches = {past: present for past, present in program.caches.items() if past in names}
        nodes = {name: node.name for name, node in mine.items()} | {HANDED + n.name: self.made[n].name for n in sent}
        known = {node.name for node in self.graph.nodes}
        kept = [site for site in program.sites if site.node in known]
        layout = program.layout
        if layout is not None:
            mine_too = {int(past.rpartition("_")[2]) for past in caches}
            layers = [layer if number in mine_too else (0, 0, 0) for number, layer in enumerate(layout.layers)]
            layout = KVLayout(tuple(layers), layout.states)
        return dataclasses.replace(
            program,
            exported=made,
            sites=SiteTable(kept),
            kind="module",
            inputs=tuple(self.ports),
            output_nodes=nodes,
            caches=caches,
            layout=None,
            metadata={**program.metadata, "layers": [list(layer) for layer in layout.layers] if layout else []},
        )

    def _examples(self, users: list[Any]) -> Iterator[torch.Tensor]:
        """Yield example inputs: those of the whole program, zeros of what is handed on."""
        exported = self.program.exported
        given = [s.arg.name for s in exported.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
        known = dict(zip(given, pytree.tree_leaves(exported.example_inputs), strict=True))
        nodes = {node.name: node for node in self.graph.nodes if node.op == "placeholder"}
        for argument in users:
            if argument.name in known:
                yield known[argument.name]
                continue
            value = nodes[argument.name].meta["val"]
            sizes = [size if isinstance(size, int) else int(size.node.hint) for size in value.shape]
            yield torch.zeros(sizes, dtype=value.dtype, device=value.device)


def _value(node: Node) -> Any:
    return node.meta["val"]
