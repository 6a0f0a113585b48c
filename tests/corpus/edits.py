"""Plant one mistake in a copy of a program, as a pass of a careless author would.

A `Mistake` edits a graph or weights through an `Edit`. `plant` gives the changed program with the node that holds the
value of each node of the original; `truth` says which op is guilty.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.fx import Graph, GraphModule, Node

from glassengine.program.representation.naming import op_name
from glassengine.program.representation.outputs import weight_only_nodes
from glassengine.program.representation.passes import apply_function
from glassengine.program.representation.program import Program

Op = Any
"""A node of a graph. torch declares the arguments of a node as a union of 17 types, which no edit can work with."""


class DoesNotApply(Exception):
    """The program has no place for this mistake."""


@dataclass(frozen=True)
class Mistake:
    """One kind of mistake.

    Attributes:
        name: Stable; with the program and a seed it determines the edit.
        group: "graph", "precision", "weights", "source" or "random".
        edit: Makes it; raises `DoesNotApply` where there is no place for it.
    """

    name: str
    group: str
    edit: Callable[[Edit], None]


class Edit:
    """Hands of a mistake: finds nodes, replaces them, changes weights. Choices among several places are seeded.

    Attributes:
        program: The original.
        random: Source of choices.
        weights: Changed weights by qualified name.
        moved: Node of the original -> node that stands in its place.
    """

    def __init__(self, program: Program, seed: str) -> None:
        self.program = program
        self.random = random.Random(seed)
        self.weights: dict[str, Tensor] = {}
        self.moved: dict[str, Node] = {}
        self.graph: Graph = program.graph

    def find(self, *ops: str, where: Callable[[Op], bool] = lambda node: True) -> list[Op]:
        """Return the nodes of one of `ops` that depend on an input, in graph order."""
        constant = {node.name for node in weight_only_nodes(self.program)}
        nodes = [node for node in self.graph.nodes if node.op == "call_function" and node.name not in constant]
        return [node for node in nodes if op_name(node) in ops and where(node)]

    def one(self, nodes: Iterable[Op]) -> Op:
        """Choose one."""
        found = list(nodes)
        if not found:
            raise DoesNotApply
        return self.random.choice(found)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Op:
        """Insert an op; only while `replace` or `rewrite` makes something."""
        return self.graph.call_function(target, args, kwargs)

    def replace(self, node: Op, make: Callable[[], Op]) -> None:
        """Put what `make` returns in the place of `node`."""
        with self.graph.inserting_before(node):
            new = make()
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)
        self.moved[node.name] = new

    def rewrite(self, node: Op, make: Callable[[Op], Op]) -> None:
        """Put what `make` returns for the value of `node` in its place."""
        self.replace(node, lambda: make(self.graph.node_copy(node)))

    def feed(self, node: Op, index: int, make: Callable[[Op], Op]) -> None:
        """Give `node` another argument `index`, made from the one it has."""
        with self.graph.inserting_before(node):
            node.update_arg(index, make(node.args[index]))

    def weight_of(self, node: Op, *, dims: int | None = None) -> str:
        """Return the qualified name of a weight that `node` reads."""
        names = self.program.weight_names()
        used = [source for source in node.all_input_nodes if source.name in names]
        fitting = [source for source in used if dims is None or source.meta["val"].dim() == dims]
        if not fitting:
            raise DoesNotApply
        return names[fitting[0].name]

    def value_of(self, name: str) -> Tensor:
        """Return a copy of a weight of the original by qualified name."""
        store = self.program.exported.state_dict
        value: Tensor = (store if name in store else self.program.exported.constants)[name]
        return value.detach().clone()


@dataclass(frozen=True)
class Mutant:
    """A program with a mistake.

    Attributes:
        mistake: What was planted.
        program: The result.
        moved: Node name of the original -> node name in the result, for every node that has a value in both.
    """

    mistake: Mistake
    program: Program
    moved: Mapping[str, str]


def plant(program: Program, mistake: Mistake, seed: str) -> Mutant:
    """Return `program` with `mistake`.

    Raises:
        DoesNotApply: There is no place for it.
    """
    edit = Edit(program, f"{mistake.name}/{seed}")
    refused: list[DoesNotApply] = []

    def function(module: GraphModule) -> None:
        edit.graph = module.graph
        try:
            mistake.edit(edit)
        except DoesNotApply as error:
            refused.append(error)

    with _unspecialised(program):
        changed = apply_function(program, function, name=mistake.name)
    if refused:
        raise refused[0]
    if edit.weights:
        changed = with_weights(changed, edit.weights)
    left = {node.name for node in changed.graph.nodes}
    moved = {node.name: node.name for node in program.graph.nodes if node.name in left}
    return Mutant(mistake, changed, moved | {old: new.name for old, new in edit.moved.items()})


@contextmanager
def _unspecialised(program: Program) -> Iterator[None]:
    """Keep what an edit assumes about dynamic sizes out of the original, with which it shares its symbols."""
    fakes = [node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")]
    mode = next(fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor))
    if mode.shape_env is None:
        yield
        return
    with mode.shape_env.suppress_guards():
        yield


def with_weights(program: Program, weights: Mapping[str, Tensor]) -> Program:
    """Return `program` with other values of some weights (by qualified name)."""
    exported = copy.copy(program.exported)
    for attribute in ("_state_dict", "_constants"):
        store = dict(getattr(exported, attribute))
        for name in store.keys() & weights.keys():
            is_parameter = isinstance(store[name], torch.nn.Parameter)
            store[name] = torch.nn.Parameter(weights[name], requires_grad=False) if is_parameter else weights[name]
        setattr(exported, attribute, store)
    return replace(program, exported=exported)
