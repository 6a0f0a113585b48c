"""Reverse replay: what should this op have made of the candidate's own inputs?

The baseline's op, with the baseline's weights and literal arguments, is run on the values that the candidate fed to
its own op: in float64 (the prediction), in the candidate's dtype, and with Monte-Carlo rounding (the floor). What is
left is the error that this op introduced; what its inputs carried in is gone.

Two interpreted programs share their kernels, so a clean op is bitwise equal and the floor alone decides. An engine has
kernels of its own, keeps unrounded values in registers where what was dumped is rounded, and may hold its weights in a
coarser dtype: there the floor and an analytic rounding bound (`numerics.bounds`) must both be exceeded. Fused code also
computes a sum once for its readers and once more for the dump, rounded in other places; where terms cancel the two are
far apart. An op is right if it is right on what its inputs were made of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.errors import BackendError
from glassengine.judge.exclusions.ties import chosen_along, is_unordered, tied_choices
from glassengine.judge.replay.composites import NUM_RUNS, bound_of, rounded_inside
from glassengine.judge.replay.computed_again import MOST_DEPTH, ComputedAgain, NoCounterpart
from glassengine.judge.replay.folded import Folded
from glassengine.judge.replay.reference import NUM_NOISE_RUNS
from glassengine.judge.replay.replayed import Replayed, Valid, called, part_of
from glassengine.numerics.bounds import rounding_bound
from glassengine.numerics.float64 import retarget, target_of, unwritten_nodes
from glassengine.numerics.judgement import Judgement, smallest_precise, unit_roundoff
from glassengine.numerics.known import NOTHING, Known
from glassengine.numerics.noise import disturbed, noisy, other_kernel, reads_memory, rounds
from glassengine.numerics.nonfinite import is_broken, num_newly_broken
from glassengine.numerics.ops import FLOAT32_SUMS, Accumulation, Operation, Roundoff
from glassengine.numerics.verdict import TIE, Reference
from glassengine.ops.traits import traits_of
from glassengine.program.onnx.operators.function import Composite
from glassengine.program.representation.naming import is_tensor_node, op_name
from glassengine.program.representation.outputs import weight_only_nodes
from glassengine.program.representation.program import Program
from glassengine.results import FLAGGED


class Replay:
    """Replays single ops of the baseline program on a candidate's values.

    Args:
        program: The baseline program, with weights.
        compiled: Whether the candidate has kernels of its own, or another dtype than the baseline.
        dtype: Floating dtype of the candidate's weights; None for the baseline's own.
        wide_operands: Whether the candidate's products may read unrounded registers, as its other ops may.
        accumulation: How the candidate's products are summed.
        seed: Of the noise.
        worth_a_bound: From this noise ratio on the rounding bound is worked out; the verdict does not depend on it
            below `INTRODUCED_SUSPICIOUS`, but the bound ratio is known for more tensors.
    """

    method = "reverse replay"
    has_regions = False

    def __init__(
        self,
        program: Program,
        *,
        compiled: bool = False,
        dtype: torch.dtype | None = None,
        wide_operands: bool = False,
        accumulation: Accumulation = FLOAT32_SUMS,
        seed: int = 0,
        worth_a_bound: float = 1.6,
    ) -> None:
        self.program = program
        self.worth_a_bound = worth_a_bound
        self._compiled = compiled
        self._wide_operands = wide_operands
        self.accumulation = accumulation
        self._dtype = dtype
        self._nodes = {node.name: node for node in program.graph.nodes}
        self._weights = program.weights()
        self._constant = {node.name for node in weight_only_nodes(program)}
        self._unwritten = unwritten_nodes(program.graph)
        self._constants: dict[str, Any] = {}
        self._inputs = {port.name: port.node for port in program.inputs}
        self._generator = torch.Generator().manual_seed(seed)
        self._folded = Folded(program, self._generator)
        self._relative_floors: dict[str, float] = {}
        self._values: dict[str, Any] = {}
        self._known = NOTHING

    def begin(self) -> None:
        """Start a case; ops are judged each by itself, and know nothing of earlier steps."""

    def begin_step(self, inputs: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
        """Take over a step of the candidate.

        Args:
            inputs: Its inputs by name, caches as they were before the step.
            values: Its tensors by baseline node.
        """
        self._values = {self._inputs[name]: tensor for name, tensor in inputs.items() if name in self._inputs}
        self._values |= values

    def begin_region_step(self, inputs: Mapping[str, torch.Tensor], valid: Valid) -> None:
        """Take over a step for regions, where there are any (see `RegionReplay`)."""

    def accumulate(self, how: Accumulation) -> None:
        """Take products to be summed so from the next case on; kernels stay those of the side's runtime."""
        self.accumulation = dataclasses.replace(how, kernels=self.accumulation.kernels)

    @property
    def values(self) -> Mapping[str, Any]:
        """What the candidate was given and made in this step, by baseline node."""
        return self._values

    @torch.no_grad()
    def judge(
        self, node: Node, candidate: torch.Tensor, valid: torch.Tensor | None, known: Known = NOTHING
    ) -> Replayed | None:
        """Judge the error that `node` introduced; None where an input of it has no counterpart in the candidate.

        Args:
            node: Of the baseline.
            candidate: The candidate's tensor.
            valid: Bool mask of the elements that count; None where all do.
            known: What the graph says of the baseline's tensor.
        """
        self._known = known
        op, call = called(node)
        if traits_of(op).is_arbitrary:
            return None
        try:
            args, kwargs = torch.fx.node.map_arg((op.args, dict(op.kwargs)), self._value)
        except NoCounterpart:
            return None
        if any(is_broken(value) for value in pytree.tree_leaves((args, kwargs))):
            # What kernels make of NaN is their own affair: the op that made it is the guilty one.
            return None
        try:
            exact_args, exact_kwargs = pytree.tree_map(retarget, (args, kwargs))
            exact = call(*exact_args, **exact_kwargs)
            native = self._native(op, call, args, kwargs, exact)
        except (BackendError, RuntimeError, IndexError, ValueError):
            # The candidate's inputs do not fit the baseline's op: their own shapes are judged where they are made.
            return None
        if not isinstance(exact, torch.Tensor) or exact.shape != candidate.shape:
            return None
        if not candidate.is_floating_point() or not exact.is_floating_point():
            return Replayed(self._exactly(op, exact_args, exact, candidate, native, valid), exact)
        operation = Operation(op_name(op), call, exact_args, exact_kwargs, exact)
        if self._compiled and is_unordered(op):
            return self._in_any_order(node, op, operation, candidate, native, args, kwargs, valid)
        found = self._judged(node, op, operation, candidate, native, args, kwargs, valid)
        if self._compiled and found.verdict in FLAGGED and found.noise_ratio is not None:
            again = ComputedAgain(self._values, self._value, self._roundoff)
            for depth in range(MOST_DEPTH + 1):
                both = again.operation(op, call, depth)
                if both is None or both[0].exact.shape != candidate.shape:
                    break
                made, carried = both
                rounded = made.exact.to(candidate.dtype)
                judged = self._judged(node, op, made, candidate, rounded, made.args, made.kwargs, valid, carried)
                if judged.verdict not in FLAGGED:
                    return Replayed(judged, made.exact)
            other = self._folded.judge(op, call, self._value, candidate, native, valid, self._roundoff(op, candidate))
            if other is not None and other[0].verdict not in FLAGGED:
                return Replayed(*other)
        return Replayed(found, exact)

    @torch.no_grad()
    def allowed(self, node: Node, candidate: torch.Tensor) -> torch.Tensor | None:
        """Return the rounding bound that the candidate's result of `node` is judged by; None where there is none."""
        op, call = called(node)
        try:
            args, kwargs = torch.fx.node.map_arg((op.args, dict(op.kwargs)), self._value)
            args, kwargs = pytree.tree_map(retarget, (args, kwargs))
            operation = Operation(op_name(op), call, args, kwargs, call(*args, **kwargs))
            roundoff = self._roundoff(op, candidate)
            if isinstance(op.target, Composite):
                return bound_of(operation.exact, self._noise(node, op, operation, roundoff))
            bound = rounding_bound(operation, roundoff)
        except (NoCounterpart, BackendError, RuntimeError, IndexError, ValueError):
            return None
        return bound

    def _in_any_order(
        self,
        node: Node,
        op: Node,
        operation: Operation,
        candidate: torch.Tensor,
        native: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        valid: torch.Tensor | None,
    ) -> Replayed:
        """Judge the values that an op chose, sorted; what lies below another order is as below a tie."""
        dim = chosen_along(op)

        def in_order(*args: Any, **kwargs: Any) -> torch.Tensor:
            value: torch.Tensor = operation.target(*args, **kwargs)
            return value.sort(dim).values

        ordered = dataclasses.replace(operation, target=in_order, exact=operation.exact.sort(dim).values)
        ours, theirs = (side.sort(dim) for side in (native, candidate))
        found = self._judged(node, op, ordered, theirs.values, ours.values, args, kwargs, valid)
        if found.verdict not in FLAGGED and not torch.equal(ours.indices, theirs.indices):
            found = dataclasses.replace(found, verdict="rounding", reason=TIE, is_tie=True)
        return Replayed(found, operation.exact)

    def _judged(
        self,
        node: Node,
        op: Node,
        operation: Operation,
        candidate: torch.Tensor,
        native: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        valid: torch.Tensor | None,
        carried: torch.Tensor | float = 0.0,
    ) -> Judgement:
        roundoff = self._roundoff(op, candidate)
        written = valid if node.name in self._unwritten else None
        broken = num_newly_broken(operation, candidate, written, self._known.hidden)
        if broken:
            return Judgement("wrong", None, None, f"{broken} values are not finite though all inputs are")

        def against(runs: list[torch.Tensor]) -> Reference:
            floor = self._relative_floors.get(node.name, 0.0)
            known = Known(hidden=self._known.hidden)
            options: dict[str, Any] = {"valid": valid, "known": known, "relative_floor": floor}
            return Reference(operation.exact, native, runs, dtype=candidate.dtype, **options)

        # Most ops are within the floor of one run; the rest is worth the other runs, and the bound.
        quick = against([])
        found = quick.measured(candidate)
        if found.noise_ratio is None or found.verdict == "identical":
            return found
        # Terms of a product are of one size, and so are the errors of its elements, however small these are.
        is_even = operation.traits.reads_memory or not quick.has_outliers(candidate)
        if found.noise_ratio <= self.worth_a_bound and is_even:
            return found
        runs = [*self._noise(node, op, operation, roundoff), *other_kernel(op, args, kwargs)]
        reference = against(runs)
        self._relative_floors[node.name] = reference.relative_floor
        bound = (
            bound_of(operation.exact, runs) if isinstance(op.target, Composite) else rounding_bound(operation, roundoff)
        )
        return reference.judge_introduced(candidate, None if bound is None else bound + carried)

    def _noise(self, node: Node, op: Node, operation: Operation, roundoff: Roundoff) -> list[torch.Tensor]:
        """Return results of the op with rounded inputs, weights and result."""
        exact, u_in = operation.exact, max(roundoff.u_in, roundoff.u_w)
        runs = []
        if isinstance(op.target, Composite):
            inside = rounded_inside(op.target, roundoff.u, self._generator, self.accumulation, roundoff.tiny)
            part = part_of(node, op)
            operation = dataclasses.replace(operation, target=lambda *a, **k: part(inside(*a, **k)))
            for _ in range(NUM_RUNS):
                runs.append(operation.on(lambda tensor: disturbed(tensor, u_in, self._generator, roundoff.tiny_in)))
            return runs
        for _ in range(NUM_NOISE_RUNS):
            value = exact
            if u_in:
                value = operation.on(lambda tensor: disturbed(tensor, u_in, self._generator, roundoff.tiny_in))
            if rounds(op):
                value = noisy(
                    op,
                    value,
                    operation.args,
                    operation.kwargs,
                    roundoff.u,
                    self._generator,
                    self.accumulation,
                    roundoff.tiny,
                )
            runs.append(value)
        return runs

    def _roundoff(self, op: Node, candidate: torch.Tensor) -> Roundoff:
        of_inputs: set[torch.dtype] = set()
        of_weights: set[torch.dtype] = set()
        for source in op.all_input_nodes:
            value = self._values.get(source.name)
            if source.name in self._constant or source.op == "placeholder":
                weight = self._weights.get(source.name)
                if weight is not None and self._dtype is not None and _is_finer(weight.dtype, self._dtype):
                    of_weights.add(self._dtype)
            elif isinstance(value, torch.Tensor) and value.is_floating_point():
                of_inputs.add(value.dtype)
        if not self._compiled or (reads_memory(op, candidate.shape) and not self._wide_operands):
            of_inputs = set()
        of_inputs |= {dtype for source in op.all_input_nodes for dtype in self._to_come(source)}
        how = self.accumulation if traits_of(op).reads_memory else FLOAT32_SUMS
        return Roundoff(
            unit_roundoff(candidate.dtype),
            max([how.u_operands, *map(unit_roundoff, of_inputs)]),
            max(map(unit_roundoff, of_weights), default=0.0),
            smallest_precise(candidate.dtype),
            how.u_sums,
            max(map(smallest_precise, of_inputs | of_weights), default=0.0),
            self.accumulation.kernels.error(op_name(op), candidate.dtype),
        )

    def _to_come(self, source: Node) -> set[torch.dtype]:
        """Dtype of an input that the baseline rounds and the candidate keeps finer: it may round it later."""
        value = self._values.get(source.name)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not is_tensor_node(source):
            return set()
        own: torch.dtype = source.meta["val"].dtype
        is_of_a_finer_model = self._dtype is not None and _is_finer(self._dtype, own)
        return {own} if _is_finer(value.dtype, own) and not is_of_a_finer_model else set()

    def _native(
        self, op: Node, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], exact: Any
    ) -> Any:
        """One sample of legal error: the op in the candidate's own dtypes, or P rounded where they do not mix."""
        if self._dtype is not None:
            args, kwargs = torch.fx.node.map_arg((op.args, dict(op.kwargs)), self._narrowed)
        try:
            return call(*args, **kwargs)
        except RuntimeError:
            if not self._compiled:
                raise
            return exact

    def _narrowed(self, node: Node) -> Any:
        value = self._value(node)
        is_weight = isinstance(value, torch.Tensor) and value.is_floating_point() and node.name in self._constant
        return value.to(self._dtype) if is_weight else value

    def _exactly(
        self,
        op: Node,
        args: tuple[Any, ...],
        exact: torch.Tensor,
        candidate: torch.Tensor,
        native: torch.Tensor,
        valid: torch.Tensor | None,
    ) -> Judgement:
        """Integers and bools are equal, but for ties: choices between values that differ by less than rounding."""
        found = Reference(exact, native, [], dtype=torch.float64, valid=valid).judge(candidate)
        if found.verdict != "wrong" or not self._compiled:
            return found
        u_in = self._roundoff_of_inputs(op)
        tied = tied_choices(op, args, exact, candidate, u_in, self._known.settled)
        if tied is None:
            return found
        differs = (candidate != exact.to(candidate.dtype)) & ~tied
        if valid is not None:
            differs = differs & valid
        if bool(differs.any()):
            return found
        return Judgement("rounding", None, None, TIE, is_tie=True)

    def _roundoff_of_inputs(self, op: Node) -> float:
        values = [self._values.get(source.name) for source in op.all_input_nodes]
        floats = [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
        return max((unit_roundoff(value.dtype) for value in floats), default=0.0)

    def _value(self, node: Node) -> Any:
        if node.name in self._values:
            return self._values[node.name]
        if node.name in self._weights:
            return self._weights[node.name]
        if node.name in self._constants:
            return self._constants[node.name]
        is_constant = node.name in self._constant
        if node.op != "call_function" or (is_tensor_node(node) and not is_constant):
            raise NoCounterpart(node.name)
        # Sizes, the lists that a split returns, and what is made of weights alone.
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), self._value)
        value = target_of(node)(*args, **kwargs)
        (self._constants if is_constant else self._values)[node.name] = value
        return value


def _is_finer(dtype: torch.dtype, other: torch.dtype) -> bool:
    return dtype.is_floating_point and unit_roundoff(dtype) < unit_roundoff(other)
