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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.replay.computed_again import ComputedAgain
from glassengine.judge.replay.expected import Claim, Expected
from glassengine.judge.replay.folded import Folded
from glassengine.judge.replay.reference import NUM_NOISE_RUNS
from glassengine.judge.replay.sampling import NUM_RUNS, bound_of, sampled
from glassengine.judge.replay.values import DOES_NOT_FIT, Values, called, part_of
from glassengine.numerics.bounds import rounding_bound
from glassengine.numerics.exemptions import UNWRITTEN
from glassengine.numerics.float64 import retargeted
from glassengine.numerics.judgement import Judgement
from glassengine.numerics.known import Known
from glassengine.numerics.noise import disturbed, noisy, other_kernel, rounds
from glassengine.numerics.nonfinite import is_broken, num_newly_broken
from glassengine.numerics.ops import Operation, Roundoff
from glassengine.numerics.verdict import Reference
from glassengine.ops.traits import traits_of
from glassengine.program.onnx.operators.function import Composite
from glassengine.program.representation.naming import op_name
from glassengine.program.representation.program import Program


class Ops:
    """Pieces of one op, for one candidate.

    Args:
        program: The baseline program.
        values: What the candidate has.
        seed: Of the noise.
        worth_a_bound: From this noise ratio on the rounding bound is worked out; the verdict does not depend on it
            below `INTRODUCED_SUSPICIOUS`, but the bound ratio is known for more tensors.
    """

    def __init__(self, program: Program, values: Values, *, seed: int, worth_a_bound: float) -> None:
        self.values = values
        self.worth_a_bound = worth_a_bound
        self.generator = torch.Generator()
        self._seed = seed
        self.folded = Folded(program, values, self.generator)
        self.computed_again = ComputedAgain(values)
        self.relative_floors: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """Start a case: its noise and its floors do not depend on the cases before it."""
        self.generator.manual_seed(self._seed)
        self.relative_floors.clear()

    def expected(self, claim: Claim) -> OneOp | None:
        """Return what the op should give; None where its inputs are unknown or do not fit it."""
        op, call = called(claim.node)
        if traits_of(op).is_arbitrary:
            return None
        try:
            args, kwargs = self.values.arguments(op)
            args, room = self.values.as_read(op, args)
            if any(is_broken(value) for value in pytree.tree_leaves((args, kwargs))):
                # What kernels make of NaN is their own affair: the op that made it is the guilty one.
                return None
            exact_args, exact_kwargs = retargeted((args, kwargs))
            exact = call(*exact_args, **exact_kwargs)
            native = self._native(op, call, args, kwargs, exact)
            carried: Tensor | float = 0.0 if room is None else call(*room, **exact_kwargs).abs()
        except DOES_NOT_FIT:
            # The candidate's inputs do not fit the baseline's op: their own shapes are judged where they are made.
            return None
        if not isinstance(exact, Tensor) or exact.shape != claim.candidate.shape or not _fits(claim.valid, exact):
            return None
        operation = Operation(op_name(op), call, exact_args, exact_kwargs, exact)
        is_float = claim.candidate.is_floating_point() and exact.is_floating_point()
        if not is_float:
            dtype = native.dtype if native.is_floating_point() else torch.float64
            reference = Reference(exact, native, [], dtype=dtype, valid=claim.valid)
        else:
            reference = _reference(claim, exact, native, [], self.relative_floors.get(claim.node.name, 0.0))
        return OneOp(
            reference,
            ops=self,
            claim=claim,
            op=op,
            args=args,
            kwargs=kwargs,
            operation=operation,
            is_float=is_float,
            carried=carried,
        )

    def _native(
        self, op: Node, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], exact: Any
    ) -> Any:
        """One sample of legal error: the op in the candidate's own dtypes, or P rounded where they do not mix."""
        if self.values.dtype is not None:
            args, kwargs = self.values.narrowed(op)
            args, _ = self.values.as_read(op, args)
        try:
            return call(*args, **kwargs)
        except RuntimeError:
            if not self.values.compiled:
                raise
            return exact


@dataclass(frozen=True, kw_only=True)
class OneOp(Expected):
    """What one op should give on what a candidate fed to its own.

    Attributes:
        ops: Of the candidate.
        claim: About its result.
        op: What is called; of several results of it, the node may be one.
        args: What the candidate fed to its own.
        kwargs: Likewise.
        operation: The same in float64, and P.
        is_float: Whether P and the candidate's tensor are floating; others are equal, or not.
        carried: How far other rounding of what the inputs were made of may lead, beyond the bound.
        runs: Results on other legal inputs, in place of the noise of the op.
    """

    ops: Ops
    claim: Claim
    op: Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operation: Operation
    is_float: bool
    carried: Tensor | float = 0.0
    runs: Sequence[Tensor] | None = None

    def read(
        self, operation: Operation, native: Tensor, carried: Tensor | float = 0.0, runs: Sequence[Tensor] | None = None
    ) -> OneOp:
        """Return the same with its inputs, or its result, read in another way."""
        floor = self.ops.relative_floors.get(self.claim.node.name, 0.0) if runs is None else 0.0
        reference = _reference(self.claim, operation.exact, native, [], floor)
        return dataclasses.replace(self, reference=reference, operation=operation, carried=carried, runs=runs)

    @torch.no_grad()
    def judge(self, result: Tensor) -> Judgement:
        """Judge what a candidate made of the same tensors, by floor and bound."""
        if not self.is_float:
            return self.reference.judge(result)
        claim, name = self.claim, self.claim.node.name
        unwritten = claim.known.exempt.get(UNWRITTEN)
        broken = num_newly_broken(self.operation, result, unwritten, claim.known.hidden)
        if broken:
            return Judgement("wrong", None, None, f"{broken} values are not finite though all inputs are")
        # Most ops are within the floor of one run; the rest is worth the other runs, and the bound.
        quick = self.reference
        found = quick.measured(result)
        if found.noise_ratio is None or found.verdict == "identical":
            return found
        # Terms of a product are of one size, and so are the errors of its elements, however small these are.
        is_even = self.operation.traits.reads_memory or not quick.has_outliers(result)
        if found.noise_ratio <= self.ops.worth_a_bound and is_even:
            return found
        runs, floors = self.runs, self.ops.relative_floors
        if runs is not None:
            reference = _reference(claim, quick.exact, quick.native, runs, 0.0)
        else:
            runs = [*self._noise(), *other_kernel(self.op, self.args, self.kwargs)]
            reference = _reference(claim, quick.exact, quick.native, runs, floors.get(name, 0.0))
            floors[name] = reference.relative_floor
        return reference.judge_introduced(result, self._bound(runs))

    @torch.no_grad()
    def allowed(self) -> Tensor | None:
        """Return the rounding bound that a result is judged by; None where there is none."""
        if not self.is_float:
            return None
        return self._bound(self._noise() if isinstance(self.op.target, Composite) else ())

    def _roundoff(self) -> Roundoff:
        return self.ops.values.roundoff(self.op, self.claim.candidate)

    def _bound(self, runs: Sequence[Tensor]) -> Tensor | None:
        if isinstance(self.op.target, Composite):
            return bound_of(self.operation.exact, runs)
        bound = rounding_bound(self.operation, self._roundoff())
        return None if bound is None else bound + self.carried

    def _noise(self) -> list[Tensor]:
        """Return results of the op with rounded inputs, weights and result."""
        operation, op, roundoff, generator = self.operation, self.op, self._roundoff(), self.ops.generator
        u_in, how = max(roundoff.u_in, roundoff.u_w), self.ops.values.accumulation

        def read(tensor: Tensor) -> Tensor:
            return disturbed(tensor, u_in, generator, roundoff.tiny_in)

        if isinstance(op.target, Composite):
            inside = op.target.rounded(sampled(generator, lambda *_: self.claim.candidate.dtype, how))
            part = part_of(self.claim.node, op)
            operation = dataclasses.replace(operation, target=lambda *a, **k: part(inside(*a, **k)))
            return [operation.on(read) for _ in range(NUM_RUNS)]
        runs = []
        for _ in range(NUM_NOISE_RUNS):
            value = operation.on(read) if u_in else operation.exact
            if rounds(op):
                arguments = (operation.args, operation.kwargs)
                value = noisy(op, value, *arguments, roundoff.u, generator, how, roundoff.tiny)
            runs.append(value)
        return runs


def _fits(valid: Tensor | None, exact: Tensor) -> bool:
    """Whether a mask of the baseline is one of a tensor: a record may have another one by its name."""
    return valid is None or all(
        ours in (1, theirs) for ours, theirs in zip(reversed(valid.shape), reversed(exact.shape), strict=False)
    )


def _reference(claim: Claim, exact: Tensor, native: Tensor, runs: Sequence[Tensor], floor: float) -> Reference:
    known, dtype = Known(hidden=claim.known.hidden), claim.candidate.dtype
    return Reference(exact, native, runs, dtype=dtype, valid=claim.valid, known=known, relative_floor=floor)
