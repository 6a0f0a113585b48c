"""Plant one mistake in a copy of a program, as a pass of a careless author would, and find the guilty op by running it.

A `Mistake` edits a graph or weights through an `Edit`. `plant` gives the changed program with the node that holds the
value of each node of the original. `find_guilt` runs it and compares every op with the original's op on the same
inputs and the same kernels: an op that differs by a bit is guilty. This is the truth that the verdict is held against;
it uses nothing of the verdict but the masks of elements that count.
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
from torch.utils import _pytree as pytree

from glassengine.capture.interpreter import run_program
from glassengine.diagnose.cases import StepInputs
from glassengine.diagnose.float64 import retarget, target_of
from glassengine.diagnose.sides import empty_caches
from glassengine.diagnose.validity import valid_mask
from glassengine.program.export import named_inputs
from glassengine.program.naming import is_tensor_node, op_name
from glassengine.program.outputs import weight_only_nodes
from glassengine.program.passes import apply_function
from glassengine.program.program import Program

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


@dataclass(frozen=True)
class Guilt:
    """Which ops of the original a mutant computes wrongly.

    Attributes:
        nodes: Node -> first step in which it differs, in order of (step, graph).
        is_below_precision: Everywhere the result is a faithful rounding of the right one (within one unit in the last
            place of the float64 result, which is a shift of at most half a unit): nobody can tell.
        is_below_dtype: Likewise in units of the program's dtype, where the op computes in a finer one (a norm in
            float32 within a bfloat16 model): only who looks into the norm can tell.
    """

    nodes: Mapping[str, int]
    is_below_precision: bool
    is_below_dtype: bool


@torch.no_grad()
def find_guilt(program: Program, mutant: Mutant, steps: Iterable[StepInputs | Mapping[str, Any]]) -> Guilt:
    """Run `mutant` over `steps` and compare each op with that of `program` on the same inputs."""
    guilty: dict[str, int] = {}
    apart: list[float] = []
    own_eps = torch.finfo(getattr(torch, str(program.metadata.get("dtype", "float32")))).eps
    apart_in_dtype: list[float] = []
    caches: dict[str, Tensor] = {}
    for number, inputs in enumerate(steps):
        own: dict[str, Any] = {}

        def keep(node: Node, value: Any, own: dict[str, Any] = own) -> None:
            own[node.name] = value

        named = inputs.named() if isinstance(inputs, StepInputs) else named_inputs(inputs)
        if program.layout is not None and not caches:
            caches = empty_caches(program, named)
        outputs = run_program(mutant.program, {**named, **caches}, keep)
        user = {port.node: {**named, **caches}[port.name] for port in program.inputs}
        values = user | {ours: own[theirs] for ours, theirs in mutant.moved.items() if theirs in own}
        values |= {ours: user[theirs] for ours, theirs in mutant.moved.items() if theirs in user}
        evaluate = _Evaluation(program, values)
        for node in program.graph.nodes:
            if not is_tensor_node(node) or node.name not in values:
                continue
            site = program.sites.by_node[node.name][0]
            valid = valid_mask(site, values[node.name], inputs) if isinstance(inputs, StepInputs) else None
            found = evaluate.difference(node, valid)
            if found is None:
                continue
            guilty.setdefault(node.name, number)
            apart.append(found)
            dtype = values[node.name].dtype
            is_finer = dtype.is_floating_point and torch.finfo(dtype).eps < own_eps
            # Half a unit of the coarser dtype; the half that rounding adds is negligible in the finer one.
            apart_in_dtype.append(2 * found * torch.finfo(dtype).eps / own_eps if is_finer else found)
        caches = {past: outputs[present] for past, present in mutant.program.caches.items()}
    return Guilt(guilty, max(apart, default=2.0) <= 1.0, max(apart_in_dtype, default=2.0) <= 1.0)


class _Evaluation:
    """The original's ops on the mutant's values of one step."""

    def __init__(self, program: Program, values: dict[str, Any]) -> None:
        self._values = values
        self._weights = program.weights()

    def difference(self, node: Node, valid: Tensor | None) -> float | None:
        """Return how many units in the last place the value is from the float64 result, None where no bit differs."""
        value = self._values[node.name]
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), self._value)
        try:
            native = target_of(node)(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError):
            return None
        if native.shape != value.shape:
            return float("inf")
        differs = ~((native == value) | (native.isnan() & value.isnan()))
        if valid is not None:
            differs = differs & valid
        if not bool(differs.any()):
            return None
        if not native.is_floating_point() or native.dtype is not value.dtype:
            return float("inf")
        exact_args, exact_kwargs = pytree.tree_map(retarget, (args, kwargs))
        exact = target_of(node)(*exact_args, **exact_kwargs)
        unit = torch.finfo(value.dtype).eps * torch.exp2(exact.abs().log2().floor())
        unit = unit.nan_to_num(0.0).clamp(min=torch.finfo(value.dtype).tiny)
        apart = torch.where(differs, (value.double() - exact).abs() / unit, 0.0)
        return float(apart.nan_to_num(nan=float("inf")).max())

    def _value(self, node: Node) -> Any:
        if node.name in self._values:
            return self._values[node.name]
        if node.name in self._weights:
            return self._weights[node.name]
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), self._value)
        self._values[node.name] = value = target_of(node)(*args, **kwargs)
        return value
