"""The truth that the verdict is held against: which ops of a program a mutant computes wrongly.

`find_guilt` runs a mutant and compares every op with the original's op on the same inputs and the same kernels: an op
that differs by a bit is guilty. `is_equivalent` asks whether all of it comes to nothing (a constant added to every
score of a softmax, say). Nothing of the verdict is used but the masks of elements that count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.capture.observers import run_program
from glassengine.judge.cases import StepInputs, by_name, empty_caches
from glassengine.judge.exclusions.masked import valid_mask
from glassengine.numerics.float64 import double, retarget, target_of
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import is_tensor_node
from glassengine.program.representation.program import Program
from tests.corpus.edits import Mutant

Steps = Sequence[StepInputs | Mapping[str, Any]]

_SAME = 1e-9
"""Results in float64 that are this close, relative to the largest, are the same."""


@dataclass(frozen=True)
class Guilt:
    """Which ops of the original a mutant computes wrongly.

    Attributes:
        nodes: Node -> first step in which it differs, in order of (step, graph).
        ulp: Largest distance of a value from its float64 result, in units in the last place; infinite for what is no
            number or no longer has the same shape.
        is_below_precision: Everywhere the result is a faithful rounding of the right one (within one unit in the last
            place of the float64 result, which is a shift of at most half a unit): nobody can tell.
        is_below_dtype: Likewise in units of the program's dtype, where the op computes in a finer one (a norm in
            float32 within a bfloat16 model): only who looks into the norm can tell.
    """

    nodes: Mapping[str, int]
    ulp: float
    is_below_precision: bool
    is_below_dtype: bool


@torch.no_grad()
def find_guilt(program: Program, mutant: Mutant, steps: Steps) -> Guilt:
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

        named = by_name(inputs)
        if program.layout is not None and not caches:
            caches = empty_caches(program, named)
        outputs = run_program(mutant.program, {**named, **caches}, keep)
        user = {port.node: {**named, **caches}[port.name] for port in program.inputs}
        values = user | {ours: own[theirs] for ours, theirs in mutant.moved.items() if theirs in own}
        values |= {ours: user[theirs] for ours, theirs in mutant.moved.items() if theirs in user}
        evaluate = _Evaluation(program, values)
        for node in program.graph.nodes:
            if not is_tensor_node(node) or node.name not in values or traits_of(node).is_arbitrary:
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
    largest = max(apart, default=math.inf)
    return Guilt(guilty, largest, largest <= 1.0, max(apart_in_dtype, default=2.0) <= 1.0)


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


@torch.no_grad()
def is_equivalent(program: Program, mutant: Mutant, steps: Steps) -> bool:
    """Whether the results and caches of all steps are the same in float64.

    Ops that a mistake put in are computed as they are written, so that a loss of precision remains one.
    """
    known = {node.name: node.target for node in program.graph.nodes}
    ours, theirs = (_Wide(side, known) for side in (program, mutant.program))
    for inputs in steps:
        expected, found = ours.step(inputs), theirs.step(inputs)
        for name, node in program.output_nodes.items():
            value, other = expected[name], found[name]
            if value.shape != other.shape:
                return False
            site = program.sites.by_node[node][0] if node in program.sites.by_node else None
            valid = valid_mask(site, value, inputs) if site and isinstance(inputs, StepInputs) else None
            apart = (value.double() - other.double()).abs()
            apart = apart if valid is None else torch.where(valid, apart, 0.0)
            if not bool(apart.amax() <= _SAME * value.double().abs().amax()):
                return False
    return True


class _Wide:
    """A program in float64, step by step, with its cache."""

    def __init__(self, program: Program, known: Mapping[str, Any]) -> None:
        self._program = program
        self._known = known
        self._weights = program.weights()
        self._caches: dict[str, Tensor] = {}

    def step(self, inputs: StepInputs | Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the results by name."""
        program = self._program
        named = by_name(inputs)
        if program.layout is not None and not self._caches:
            self._caches = empty_caches(program, named)
        fed = {**named, **self._caches}
        values: dict[str, Any] = {port.node: fed[port.name] for port in program.inputs} | self._weights
        for node in program.graph.nodes:
            if node.op == "placeholder":
                values[node.name] = double(values[node.name]) if node.name in values else None
            elif node.op == "get_attr":
                values[node.name] = getattr(program.exported.graph_module, str(node.target))
            elif node.op == "call_function" and "_assert" not in str(node.target):
                args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: values[n.name])
                if self._known.get(node.name) is node.target:
                    args, kwargs = pytree.tree_map(retarget, (args, kwargs))
                    values[node.name] = target_of(node)(*args, **kwargs)
                else:
                    values[node.name] = pytree.tree_map_only(torch.Tensor, double, _as_written(node, args, kwargs))
        results = {name: values[node] for name, node in program.output_nodes.items()}
        self._caches = {past: results[present] for past, present in program.caches.items()}
        return results


def _as_written(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an op that the original does not have makes of its float64 arguments."""
    if node.target is torch.ops.aten.view.dtype:
        # Bits are those of the number as the program holds it.
        source: Any = node.args[0]
        args = (args[0].to(source.meta["val"].dtype), *args[1:])
    return target_of(node)(*args, **kwargs)
