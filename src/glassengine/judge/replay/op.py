"""Pieces of one op: reverse replay. What should this op have made of the candidate's own inputs?

The baseline's op, with the baseline's weights and literal arguments, is run on the values that the candidate fed to
its own op: in float64 (the prediction), in the candidate's dtype, and with Monte-Carlo rounding (the floor). What is
left is the error that this op introduced; what its inputs carried in is gone.

Two interpreted programs share their kernels, so a clean op is bitwise equal and the floor alone decides. An engine has
kernels of its own, keeps unrounded values in registers where what was dumped is rounded, and may hold its weights in a
coarser dtype: there the floor and an analytic rounding bound (`numerics.bounds`) must both be exceeded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.replay.composites import NUM_RUNS, bound_of, rounded_inside
from glassengine.judge.replay.computed_again import ComputedAgain
from glassengine.judge.replay.folded import Folded
from glassengine.judge.replay.piece import Claim, OneOp, Piece
from glassengine.judge.replay.reference import NUM_NOISE_RUNS
from glassengine.judge.replay.values import DOES_NOT_FIT, NoCounterpart, Values, called, part_of
from glassengine.numerics.bounds import rounding_bound
from glassengine.numerics.float64 import retarget, unwritten_nodes
from glassengine.numerics.known import Known
from glassengine.numerics.noise import disturbed, noisy, other_kernel, rounds
from glassengine.numerics.nonfinite import is_broken
from glassengine.numerics.ops import Operation, Roundoff
from glassengine.numerics.verdict import Reference
from glassengine.ops.traits import traits_of
from glassengine.program.onnx.operators.function import Composite
from glassengine.program.representation.naming import op_name
from glassengine.program.representation.program import Program


class Ops:
    """Cuts pieces of one op out of the baseline.

    Args:
        program: The baseline program.
        values: What the candidate has.
        seed: Of the noise.
        worth_a_bound: See `Piece`.
    """

    def __init__(self, program: Program, values: Values, *, seed: int, worth_a_bound: float) -> None:
        self.values = values
        self.worth_a_bound = worth_a_bound
        self.generator = torch.Generator().manual_seed(seed)
        self.folded = Folded(program, values, self.generator)
        self.computed_again = ComputedAgain(values)
        self._unwritten = unwritten_nodes(program.graph)
        self._relative_floors: dict[str, float] = {}

    def piece(self, claim: Claim) -> Piece | None:
        """Return the op as the candidate's inputs of it read; None where they are unknown or do not fit it."""
        op, call = called(claim.node)
        if traits_of(op).is_arbitrary:
            return None
        try:
            args, kwargs = self.values.arguments(op)
        except NoCounterpart:
            return None
        if any(is_broken(value) for value in pytree.tree_leaves((args, kwargs))):
            # What kernels make of NaN is their own affair: the op that made it is the guilty one.
            return None
        try:
            exact_args, exact_kwargs = pytree.tree_map(retarget, (args, kwargs))
            exact = call(*exact_args, **exact_kwargs)
            native = self._native(op, call, args, kwargs, exact)
        except DOES_NOT_FIT:
            # The candidate's inputs do not fit the baseline's op: their own shapes are judged where they are made.
            return None
        if not isinstance(exact, Tensor) or exact.shape != claim.candidate.shape:
            return None
        operation = Operation(op_name(op), call, exact_args, exact_kwargs, exact)
        one = OneOp(op, call, args, kwargs, operation, native)
        if not claim.candidate.is_floating_point() or not exact.is_floating_point():

            def exactly(runs: Sequence[Tensor]) -> Reference:
                return Reference(exact, native, runs, dtype=torch.float64, valid=claim.valid)

            return Piece(exact, exactly, one=one)
        return self.of(claim, one)

    def of(
        self, claim: Claim, one: OneOp, *, carried: Tensor | float = 0.0, runs: Sequence[Tensor] | None = None
    ) -> Piece:
        """Return the piece of an op.

        Args:
            claim: What is judged.
            one: The op.
            carried: How far other rounding of what the inputs were made of may lead, beyond the bound.
            runs: Results on other legal inputs, in place of the noise of the op alone.
        """
        name, exact, op = claim.node.name, one.operation.exact, one.op
        floors = self._relative_floors if runs is None else {}
        roundoff = self.values.roundoff(op, claim.candidate)

        def reference(behind: Sequence[Tensor]) -> Reference:
            floor = floors.get(name, 0.0)
            known, dtype = Known(hidden=claim.known.hidden), claim.candidate.dtype
            return Reference(
                exact, one.native, behind, dtype=dtype, valid=claim.valid, known=known, relative_floor=floor
            )

        def noise() -> Sequence[Tensor]:
            if runs is not None:
                return runs
            return [*self._noise(claim.node, one, roundoff), *other_kernel(op, one.args, one.kwargs)]

        def bound(behind: Sequence[Tensor]) -> Tensor | None:
            if isinstance(op.target, Composite):
                return bound_of(exact, behind)
            found = rounding_bound(one.operation, roundoff)
            return None if found is None else found + carried

        written = claim.valid if name in self._unwritten else None
        remember = partial(floors.__setitem__, name)
        return Piece(
            exact,
            reference,
            noise,
            bound,
            one,
            written=written,
            worth_a_bound=self.worth_a_bound,
            remember=remember,
        )

    def allowed(self, node: Node, candidate: Tensor) -> Tensor | None:
        """Return the rounding bound that the candidate's result of `node` is judged by; None where there is none."""
        op, call = called(node)
        try:
            args, kwargs = pytree.tree_map(retarget, self.values.arguments(op))
            operation = Operation(op_name(op), call, args, kwargs, call(*args, **kwargs))
            roundoff = self.values.roundoff(op, candidate)
            if isinstance(op.target, Composite):
                one = OneOp(op, call, args, kwargs, operation, operation.exact)
                return bound_of(operation.exact, self._noise(node, one, roundoff))
            return rounding_bound(operation, roundoff)
        except DOES_NOT_FIT:
            return None

    def _native(self, op: Node, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], exact: Any) -> Any:
        """One sample of legal error: the op in the candidate's own dtypes, or P rounded where they do not mix."""
        if self.values.dtype is not None:
            args, kwargs = self.values.narrowed(op)
        try:
            return call(*args, **kwargs)
        except RuntimeError:
            if not self.values.compiled:
                raise
            return exact

    def _noise(self, node: Node, one: OneOp, roundoff: Roundoff) -> list[Tensor]:
        """Return results of the op with rounded inputs, weights and result."""
        operation, op, u_in = one.operation, one.op, max(roundoff.u_in, roundoff.u_w)
        how = self.values.accumulation

        def read(tensor: Tensor) -> Tensor:
            return disturbed(tensor, u_in, self.generator, roundoff.tiny_in)

        if isinstance(op.target, Composite):
            inside = rounded_inside(op.target, roundoff.u, self.generator, how, roundoff.tiny)
            part = part_of(node, op)
            operation = dataclasses.replace(operation, target=lambda *a, **k: part(inside(*a, **k)))
            return [operation.on(read) for _ in range(NUM_RUNS)]
        runs = []
        for _ in range(NUM_NOISE_RUNS):
            value = operation.on(read) if u_in else operation.exact
            if rounds(op):
                arguments = (operation.args, operation.kwargs)
                value = noisy(op, value, *arguments, roundoff.u, self.generator, how, roundoff.tiny)
            runs.append(value)
        return runs
