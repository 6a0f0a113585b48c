"""The program of one rank: the whole program on parts of its tensors, with collectives where ranks must exchange them.

Where weights lie is given; from there on the rules decide for every op how it runs. A weight or a cache that is whole
and that every op would read cut is cut, too, so that a rank holds nothing that it does not read. The result is a
program like any other: functional, named, with shapes of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.fx import Node

from glassengine.program.parallel.local import Local
from glassengine.program.parallel.placements import Placement, Shard
from glassengine.program.parallel.rules import local, reads_sizes
from glassengine.program.representation.program import Program


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
    inputs: Mapping[str, Shard]
    locals: Mapping[str, Local | None]
    placed: Mapping[str, Any]
    gathered: tuple[tuple[str, str], ...]


def lay_out(program: Program, weights: Mapping[str, Shard], ranks: int) -> Layout:
    """Return where everything lies when these weights (by placeholder) are cut."""
    names = {port.name: port.node for port in program.inputs}
    caches = {names[past] for past in program.caches}
    free = set(program.weights()) | caches
    inputs = {name: cut for name, cut in weights.items() if cut.fits(ranks)}
    while True:
        layout, asked = _flow(program, inputs, ranks)
        found = {
            name: next(iter(cuts)) for name, cuts in asked.items() if name in free - inputs.keys() and len(cuts) == 1
        }
        more = {name: cut for name, cut in found.items() if cut is not None}
        if not more:
            return layout
        inputs |= more


def _flow(program: Program, inputs: Mapping[str, Shard], ranks: int) -> tuple[Layout, dict[str, set[Placement]]]:
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
                if isinstance(placed[item.name], Shard) and want != placed[item.name]:
                    gathered.append((item.name, node.name))
                if item.op == "placeholder" and not reads_sizes(node):
                    asked[item.name].add(want)
    return Layout(ranks, dict(inputs), locals_, placed, tuple(gathered)), asked


def _none_of(node: Node) -> Any:
    value = node.meta.get("val")
    return tuple(None for _ in value) if isinstance(value, (list, tuple)) else None


COLLECTIVES = ("all_reduce", "all_gather_into_tensor")


def is_sum(node: Node) -> bool:
    """Whether ranks meet in a node to reduce what each of them has to one tensor."""
    return is_collective(node) and "all_reduce" in str(node.target)


def is_collective(node: Node) -> bool:
    """Whether ranks meet in a node."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace == "_c10d_functional"
        and (target._schema.name.rpartition("::")[2] in COLLECTIVES)
    )


def weight_placements(program: Program, layout: Layout) -> dict[str, Shard]:
    """Return qualified name -> cut, of the parameters and buffers that are cut."""
    return {
        str(spec.target): layout.inputs[spec.arg.name]
        for spec in program.exported.graph_signature.input_specs
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
        and spec.arg.name in layout.inputs
    }
