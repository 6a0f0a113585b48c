"""The program of one rank: the whole program on parts of its tensors, with collectives where ranks must exchange them.

Where weights lie is given; from there on the rules decide for every op how it runs. A weight or a cache that is whole
and that every op would read cut is cut, too, so that a rank holds nothing that it does not read. The result is a
program like any other: functional, named, with shapes of its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from glassengine.program.kinds.causal_lm import KVLayout
from glassengine.program.parallel.placements import TENSOR_GROUP, Local, Placement, ShardPlacement, name_of, shard_of
from glassengine.program.parallel.rules import local, reads_sizes
from glassengine.program.representation.program import Port, Program, keep_name, rebuilt
from glassengine.sites import Site, SiteTable, op_site

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

ORIGIN = "glassengine_origin"
"""Key of a node's meta: the node of the whole program that it belongs to."""


@dataclass(frozen=True)
class Layout:
    """Where everything of a program lies among ranks.

    Attributes:
        ranks: How many there are.
        inputs: Weights and caches that are cut, by placeholder.
        locals: How each op runs of which an input is cut; None where it reads them whole.
        placed: Where the result of each such op lies.
        gathered: (tensor, op) for each tensor that is cut, and that an op must read whole.
    """

    ranks: int
    inputs: Mapping[str, ShardPlacement]
    locals: Mapping[str, Local | None]
    placed: Mapping[str, Any]
    gathered: tuple[tuple[str, str], ...]


def lay_out(program: Program, weights: Mapping[str, ShardPlacement], ranks: int) -> Layout:
    """Return where everything lies when these weights (by placeholder) are cut."""
    names = {port.name: port.node for port in program.inputs}
    caches = {names[past] for past in program.caches}
    free = set(program.weights()) | caches
    inputs = {name: cut for name, cut in weights.items() if cut.fits(ranks)}
    while True:
        layout, asked = _flow(program, inputs, ranks)
        cut_at = {
            name: next(iter(cuts)) for name, cuts in asked.items() if name in free - inputs.keys() and len(cuts) == 1
        }
        more = {name: cut for name, cut in cut_at.items() if cut is not None}
        if not more:
            return layout
        inputs |= more


def _flow(
    program: Program, inputs: Mapping[str, ShardPlacement], ranks: int
) -> tuple[Layout, dict[str, set[Placement]]]:
    placed: dict[str, Any] = {}
    locals_: dict[str, Local | None] = {}
    gathered: list[tuple[str, str]] = []
    asked: dict[str, set[Placement]] = defaultdict(set)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            placed[node.name] = inputs.get(node.name)
        elif node.op == "call_function":
            read = [item for item in node.all_input_nodes if placed[item.name] is not None]
            placed[node.name] = None
            if read:
                step = local(node, lambda item: placed[item.name], ranks)
                locals_[node.name] = step
                placed[node.name] = step.out if step is not None else _none_of(node)
            step = locals_.get(node.name)
            for item in node.all_input_nodes:
                want = None if step is None else step.wants.get(item, placed[item.name])
                if isinstance(placed[item.name], ShardPlacement) and want != placed[item.name]:
                    gathered.append((item.name, node.name))
                if item.op == "placeholder" and not reads_sizes(node):
                    asked[item.name].add(want)
    return Layout(ranks, dict(inputs), locals_, placed, tuple(gathered)), asked


def _none_of(node: Node) -> Any:
    value = node.meta.get("val")
    return tuple(None for _ in value) if isinstance(value, (list, tuple)) else None


def is_sum(node: Node) -> bool:
    """Whether ranks meet in a node to reduce what each of them has to one tensor."""
    return node.target is _c10d.all_reduce.default


def is_collective(node: Node) -> bool:
    """Whether ranks meet in a node."""
    return node.target in (_c10d.all_reduce.default, _c10d.all_gather_into_tensor.default)


def weight_placements(program: Program, layout: Layout) -> dict[str, ShardPlacement]:
    """Return qualified name -> cut, of the parameters and buffers that are cut."""
    return {name: layout.inputs[node] for node, name in program.weight_names().items() if node in layout.inputs}


def program_of(program: Program, layout: Layout, place: int) -> Program:
    """Return the program of the rank at `place`, with its parts of the weights."""
    return _Writer(program, layout, place).written()


class _Writer:
    def __init__(self, program: Program, layout: Layout, place: int) -> None:
        self.program, self.layout, self.place, self.ranks = program, layout, place, layout.ranks
        self.graph = Graph()
        self.made: dict[Node, Node] = {}
        self.moved: dict[tuple[Node, Placement], Node] = {}
        self.origin: Node | None = None
        values = (node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder")
        self.mode = next(value.fake_mode for value in values if hasattr(value, "fake_mode"))

    def written(self) -> Program:
        outputs: dict[str, Node] = {}
        for node in self.program.graph.nodes:
            self.origin = node
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._op(node)
            else:
                specs = self.program.exported.graph_signature.output_specs
                results = []
                for spec, value in zip(specs, node.args[0], strict=True):
                    self.origin = value
                    kept = spec.kind is not OutputKind.USER_OUTPUT
                    results.append(self.made[value] if kept else self._moved(value, None))
                    outputs[spec.arg.name] = results[-1]
                self.graph.output(tuple(results))
        return self._program(outputs)

    def _placeholder(self, node: Node) -> None:
        made = self.graph.placeholder(node.name)
        made.meta = dict(node.meta)
        cut = self.layout.inputs.get(node.name)
        if cut is not None:
            whole = node.meta["val"]
            shape = list(whole.shape)
            shape[cut.axis] //= self.ranks
            with self.mode:
                part = torch.empty(shape, dtype=whole.dtype, device=whole.device)
            made.meta["val"] = torch.nn.Parameter(part, False) if isinstance(whole, torch.nn.Parameter) else part
        self._keep(node, made)

    def _keep(self, node: Node, made: Node) -> None:
        keep_name(made, node.name)
        made.meta[ORIGIN] = node.name
        self.made[node] = made

    def _call(self, target: Any, *args: Any, name: str | None = None, **kwargs: Any) -> Node:
        """Add a node with the value that it has for this rank; no name takes the next one of the current op."""
        assert self.origin is not None
        name = name or f"{self.origin.name}_{target._schema.name.rpartition('::')[2]}"
        made = self.graph.create_node("call_function", target, args, kwargs, name=name)
        made.meta = {k: v for k, v in self.origin.meta.items() if k not in ("val", "tensor_meta")}
        with self.mode:
            made.meta["val"] = target(*map_arg(args, _value), **map_arg(kwargs, _value))
        return made

    def _op(self, node: Node) -> None:
        step = self.layout.locals.get(node.name)
        wants: Mapping[Node, Placement] = {} if step is None else step.wants

        def moved(item: Node) -> Node:
            cut = self.layout.placed[item.name]
            if isinstance(cut, tuple):
                return self.made[item]
            want = wants.get(item, cut) if step is not None else None
            return self._moved(item, want)

        if node.name not in self.layout.locals:
            if all(self.made[item].meta.get("val") is item.meta.get("val") for item in node.all_input_nodes):
                self._keep(node, self.graph.node_copy(node, self.made.__getitem__))
                return
            args, kwargs = map_arg((node.args, node.kwargs), lambda item: self.made[item])
        else:
            given = node.args if step is None or step.args is None else step.args
            args, kwargs = map_arg((given, node.kwargs), moved)
        if step is None or not step.partial:
            made = self._call(node.target, *args, name=node.name, **kwargs)
            made.meta = {**node.meta, "val": made.meta["val"]}
        else:
            made = self._summed(node, step, args, kwargs)
        self._keep(node, made)

    def _summed(self, node: Node, step: Local, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Node:
        """Add the terms of all ranks, then what is added once."""
        target: Any = node.target
        if step.offset:
            partial = self._rows(*args[:2])
        elif step.addend is None:
            partial = self._call(target, *args, name=f"{node.name}_partial", **kwargs)
        else:
            alone = tuple(arg for index, arg in enumerate(args) if index != step.addend)
            target = _aten.mm.default if name_of(node) == "addmm" else target
            partial = self._call(target, *alone, name=f"{node.name}_partial")
        total = self._call(_c10d.all_reduce.default, partial, "sum", TENSOR_GROUP)
        if step.addend is None:
            return self._call(_c10d.wait_tensor.default, total, name=node.name)
        waited = self._call(_c10d.wait_tensor.default, total)
        return self._call(_aten.add.Tensor, waited, args[step.addend], name=node.name)

    def _rows(self, table: Node, rows: Node) -> Node:
        """Look up the rows that this rank has; zeros for others."""
        count = int(table.meta["val"].shape[0])
        here = self._call(_aten.sub.Tensor, rows, self.place * count)
        near = self._call(_aten.clamp.default, here, 0, count - 1)
        found = self._call(_aten.embedding.default, table, near)
        outside = self._call(_aten.ne.Tensor, here, near)
        mask = self._call(_aten.unsqueeze.default, outside, -1)
        name = f"{self.origin.name}_partial" if self.origin is not None else None
        return self._call(_aten.masked_fill.Scalar, found, mask, 0.0, name=name)

    def _moved(self, node: Node, want: Placement) -> Node:
        """Return the value of a node of the whole program as it is wanted."""
        cut = self.layout.placed[node.name]
        if cut == want:
            return self.made[node]
        if (node, want) not in self.moved:
            before, self.origin = self.origin, node
            whole = self.made[node] if cut is None else self._gathered(self.made[node], cut)
            self.moved[node, None] = whole
            if want is not None:
                self.moved[node, want] = self._part(whole, want)
            self.origin = before
        return self.moved[node, want]

    def _part(self, whole: Node, cut: ShardPlacement) -> Node:
        spans = cut.spans(self.ranks, self.place)
        parts = [self._call(_aten.slice.Tensor, whole, cut.axis, start, stop) for start, stop in spans]
        return parts[0] if len(parts) == 1 else self._call(_aten.cat.default, parts, cut.axis)

    def _gathered(self, part: Node, cut: ShardPlacement) -> Node:
        """All parts, laid beside each other on a new first axis, then block by block where they belong."""
        row = self._call(_aten.unsqueeze.default, part, 0)
        dense = self._call(_aten.clone.default, row, memory_format=torch.contiguous_format)
        asked = self._call(_c10d.all_gather_into_tensor.default, dense, self.ranks, TENSOR_GROUP)
        every = self._call(_c10d.wait_tensor.default, asked)
        order = list(range(1, len(part.meta["val"].shape) + 1))
        order.insert(cut.axis, 0)
        laid = self._call(_aten.permute.default, every, order)
        pieces, start = [], 0
        for block in cut.blocks:
            size = block // self.ranks
            piece = laid
            if len(cut.blocks) > 1:
                piece = self._call(_aten.slice.Tensor, laid, cut.axis + 1, start, start + size)
            pieces.append(self._call(_aten.flatten.using_ints, piece, cut.axis, cut.axis + 1))
            start += size
        return pieces[0] if len(pieces) == 1 else self._call(_aten.cat.default, pieces, cut.axis)

    def _program(self, outputs: Mapping[str, Node]) -> Program:
        program, exported = self.program, self.program.exported
        cuts = weight_placements(program, self.layout)
        made = rebuilt(
            exported,
            self.graph,
            [
                replace(spec, arg=TensorArgument(outputs[spec.arg.name].name))
                for spec in exported.graph_signature.output_specs
            ],
            stored=lambda table: {name: self._weight(value, cuts.get(name)) for name, value in table.items()},
            example_inputs=self._examples(),
        )
        nodes = {name: outputs[node].name for name, node in program.output_nodes.items()}
        return replace(
            program,
            exported=made,
            sites=SiteTable(self._sites()),
            inputs=tuple(self._port(port) for port in program.inputs),
            output_nodes=nodes,
            layout=self._layout(),
        )

    def _weight(self, value: Any, cut: ShardPlacement | None) -> Any:
        if cut is None or not isinstance(value, torch.Tensor):
            return value
        part = shard_of(value.detach(), cut, self.ranks, self.place).clone()
        return torch.nn.Parameter(part, requires_grad=False) if isinstance(value, torch.nn.Parameter) else part

    def _examples(self) -> Any:
        """Return the example inputs, parts of the caches."""
        leaves, spec = pytree.tree_flatten(self.program.exported.example_inputs)
        names = [
            s.arg.name for s in self.program.exported.graph_signature.input_specs if s.kind is InputKind.USER_INPUT
        ]
        for index, name in enumerate(names):
            cut = self.layout.inputs.get(name)
            if cut is not None:
                leaves[index] = shard_of(leaves[index], cut, self.ranks, self.place).clone()
        return pytree.tree_unflatten(leaves, spec)

    def _port(self, port: Port) -> Port:
        return replace(port, shape=self._shape(port.shape, self.layout.inputs.get(port.node)))

    def _shape(self, shape: tuple[int | str, ...], cut: Placement) -> tuple[int | str, ...]:
        if cut is None:
            return shape
        return tuple(s // self.ranks if i == cut.axis and isinstance(s, int) else s for i, s in enumerate(shape))

    def _layout(self) -> KVLayout | None:
        layout = self.program.layout
        if layout is None:
            return None
        heads = {
            port.name: self._port(port).shape[1] for port in self.program.inputs if port.name in self.program.caches
        }
        layers = [
            (int(heads.get(f"past_key_{index}", own)), key, value)
            for index, (own, key, value) in enumerate(layout.layers)
        ]
        return KVLayout(tuple(layers), layout.states)

    def _sites(self) -> list[Site]:
        """Names of the whole program where a tensor is one of it, and names of what is between."""
        table = self.program.sites.by_node
        counts: Counter[tuple[str, str]] = Counter()
        found: list[Site] = []
        for node in self.graph.nodes:
            if ORIGIN in node.meta:
                cut = self.layout.placed.get(node.name)
                cut = cut if isinstance(cut, ShardPlacement) else None
                own = table.get(node.name, ())
                found += [replace(site, shape=self._shape(site.shape, cut)) for site in own]
        known = {site.node for site in found}
        for node in self.graph.nodes:
            value = node.meta.get("val")
            if node.op != "call_function" or node.name in known or not isinstance(value, torch.Tensor):
                continue
            near = next((table[n] for n in _stems(node.name) if n in table), None)
            if near is None or ORIGIN in node.meta:
                continue
            path = near[0].name.partition("/")[0].partition(":")[0]
            name = node.name.rpartition("_")[2] if node.name.endswith("_partial") else name_of(node)
            number = counts[path, name]
            counts[path, name] += 1
            shape = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
            site = op_site(path, f"rank_{name}", number)
            dtype = str(value.dtype).removeprefix("torch.")
            found.append(
                Site(site, "op", node.name, name, dtype, shape, {}, near[0].source, f"rank:{site}", (node.name,))
            )
        order = {node.name: number for number, node in enumerate(self.graph.nodes)}
        return sorted(found, key=lambda site: order[site.node])


def _stems(name: str) -> list[str]:
    parts = name.split("_")
    return ["_".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def _value(node: Node) -> Any:
    return node.meta["val"]
