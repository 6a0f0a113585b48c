"""Pieces of one op: reverse replay. What should this op have made of the candidate's own inputs?

The baseline's op, with the baseline's weights and literal arguments, is run on the values that the candidate fed to
its own op: in float64 (the prediction), in the candidate's dtype, and with Monte-Carlo rounding (the floor). What is
left is the error that this op introduced; what its inputs carried in is gone.

Two interpreted programs share their kernels, so a clean op is bitwise equal and the floor alone decides. An engine has
kernels of its own, keeps unrounded values in registers where what was dumped is rounded, and may hold its weights in a
coarser dtype: there the floor and an analytic rounding bound (`numerics.bounds`) must both be exceeded.

What a kernel read need not be what was dumped. `ComputedAgain` computes inputs once more from what they were made of, a
few ops back: fused code rounds a value for its readers in another place than for the dump. `Folded` does so with values
that are made of weights alone, which compilers fold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.replay.expected import Claim, Expected
from glassengine.judge.replay.reference import NUM_NOISE_RUNS, NUM_RUNS, bound_of, sampled
from glassengine.judge.replay.values import DOES_NOT_FIT, Values, called, in_float64, part_of, predicted_in_float64
from glassengine.numerics.bounds import rounding_bound
from glassengine.numerics.exemptions import UNWRITTEN
from glassengine.numerics.float64 import (
    U_ACCUMULATE,
    Operation,
    Roundoff,
    double,
    in_double,
    is_broken,
    is_real,
    num_newly_broken,
    retargeted,
    target_of,
)
from glassengine.numerics.judgement import Judgement, unit_roundoff
from glassengine.numerics.kinds import KnownValues
from glassengine.numerics.mask_values import is_finite
from glassengine.numerics.noise import disturbed, noisy, other_kernel, rounds
from glassengine.numerics.verdict import Reference
from glassengine.ops.row import Rounding
from glassengine.ops.traits import traits_of
from glassengine.program.onnx.function import Composite
from glassengine.program.representation.naming import op_name


class Ops:
    """Pieces of one op, for one candidate.

    Args:
        values: What the candidate has.
        worth_a_bound: From this noise ratio on the rounding bound is worked out; the verdict does not depend on it
            below `INTRODUCED_SUSPICIOUS`, but the bound ratio is known for more tensors.
    """

    def __init__(self, values: Values, *, worth_a_bound: float) -> None:
        self.values = values
        self.worth_a_bound = worth_a_bound
        self.generator = torch.Generator()
        self.folded = Folded(values, self.generator)
        self.computed_again = ComputedAgain(values)
        self.relative_floors: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """Start a case: its noise and its floors do not depend on the cases before it."""
        self.generator.manual_seed(0)
        self.relative_floors.clear()

    def called(self, claim: Claim) -> CandidateCall | None:
        """Return the op on what the candidate fed to its own; None where that is unknown or does not fit it."""
        op, call = called(claim.node)
        if traits_of(op).is_arbitrary:
            return None
        try:
            args, kwargs = self.values.arguments(op)
            args, room = self.values.as_read(op, args)
            if any(is_broken(value) for value in pytree.tree_leaves((args, kwargs))):
                # What kernels make of NaN is their own affair: the op that made it is the guilty one.
                return None
            native = self._native(op, call, args, kwargs)
        except DOES_NOT_FIT:
            # The candidate's inputs do not fit the baseline's op: their own shapes are judged where they are made.
            return None
        return CandidateCall(self, claim, op, call, args, kwargs, room, native)

    def _native(self, op: Node, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One sample of legal error: the op in the candidate's own dtypes; None where they do not mix."""
        if self.values.dtype is not None:
            args, kwargs = self.values.arguments(op, are_narrowed=True)
            args, _ = self.values.as_read(op, args)
        try:
            return call(*args, **kwargs)
        except RuntimeError:
            if not self.values.compiled:
                raise
            return None


@dataclass(frozen=True)
class CandidateCall:
    """The baseline's op on what a candidate fed to its own.

    Attributes:
        ops: Of the candidate.
        claim: About its result.
        op: What is called; of several results of it, the node may be one.
        target: Computes the value of the node.
        args: What the candidate fed to its own.
        kwargs: Likewise.
        room: Arguments whose result bounds how far other reading of these may lead; None where it cannot.
        native: In the candidate's own dtypes; None where they do not mix.
    """

    ops: Ops
    claim: Claim
    op: Node
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    room: tuple[Any, ...] | None
    native: Any

    def is_reproduced(self) -> bool:
        """Whether the candidate's tensor is of numbers, and bitwise what the program's kernel makes of these values."""
        ours, theirs = self.native, self.claim.candidate
        if not isinstance(ours, Tensor) or ours.dtype is not theirs.dtype or not theirs.is_floating_point():
            return False
        return torch.equal(ours, theirs) and is_finite(theirs) and _fits(self.claim.valid, ours)

    def predicted(self) -> Tensor:
        """Return P; what it stands for where the op has no kernel in float64."""
        one = self.in_float64()
        return self.by_native().exact if one is None else one.operation.exact

    def by_native(self) -> Reference:
        """Return the reference of a result that is bitwise right."""
        return _reference(self.claim, double(self.native), self.native, [], 0.0)

    @torch.no_grad()
    def in_float64(self) -> OneOp | None:
        """Return what the op should give, with its error; None where it does not fit the candidate's tensor."""
        claim, call = self.claim, in_double(self.op, self.target)
        try:
            args, kwargs = retargeted((self.args, self.kwargs))
            exact = call(*args, **kwargs)
            carried: Tensor | float = 0.0 if self.room is None else call(*self.room, **kwargs).abs()
        except DOES_NOT_FIT:
            return None
        if not isinstance(exact, Tensor) or exact.shape != claim.candidate.shape or not _fits(claim.valid, exact):
            return None
        native = exact if self.native is None else self.native
        is_float = claim.candidate.is_floating_point() and exact.is_floating_point()
        if not is_float:
            dtype = native.dtype if native.is_floating_point() else torch.float64
            reference = Reference(exact, native, [], dtype=dtype, valid=claim.valid)
        else:
            reference = _reference(claim, exact, native, [], self.ops.relative_floors.get(claim.node.name, 0.0))
        operation = Operation(op_name(self.op), call, args, kwargs, exact)
        return OneOp(reference, call=self, operation=operation, is_float=is_float, carried=carried)


@dataclass(frozen=True, kw_only=True)
class OneOp(Expected):
    """What one op should give on what a candidate fed to its own.

    Attributes:
        call: The op on what the candidate fed to its own, in its own dtypes.
        operation: The same in float64, and P.
        is_float: Whether P and the candidate's tensor are floating; others are equal, or not.
        carried: How far other rounding of what the inputs were made of may lead, beyond the bound.
        runs: Results on other legal inputs, in place of the noise of the op.
    """

    call: CandidateCall
    operation: Operation
    is_float: bool
    carried: Tensor | float = 0.0
    runs: Sequence[Tensor] | None = None

    def read(
        self, operation: Operation, native: Tensor, carried: Tensor | float = 0.0, runs: Sequence[Tensor] | None = None
    ) -> OneOp:
        """Return the same with its inputs, or its result, read in another way."""
        claim = self.call.claim
        floor = self.call.ops.relative_floors.get(claim.node.name, 0.0) if runs is None else 0.0
        reference = _reference(claim, operation.exact, native, [], floor)
        return replace(self, reference=reference, operation=operation, carried=carried, runs=runs)

    @torch.no_grad()
    def judge(self, result: Tensor) -> Judgement:
        """Judge what a candidate made of the same tensors, by floor and bound."""
        if not self.is_float:
            return self.reference.judge(result)
        ops, claim = self.call.ops, self.call.claim
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
        if found.noise_ratio <= ops.worth_a_bound and is_even:
            return found
        if self.runs is not None:
            runs, floor = self.runs, 0.0
        else:
            runs = [*self._noise(), *other_kernel(self.call.op, self.call.args, self.call.kwargs)]
            floor = ops.relative_floors.get(claim.node.name, 0.0)
        reference = _reference(claim, quick.exact, quick.native, runs, floor)
        if self.runs is None:
            ops.relative_floors[claim.node.name] = reference.relative_floor
        return reference.judge_introduced(result, self._bound(runs))

    @torch.no_grad()
    def allowed(self) -> Tensor | None:
        """Return the rounding bound that a result is judged by; None where there is none."""
        if not self.is_float:
            return None
        return self._bound(self._noise() if isinstance(self.call.op.target, Composite) else ())

    def _roundoff(self) -> Roundoff:
        return self.call.ops.values.roundoff(self.call.op, self.call.claim.candidate)

    def _bound(self, runs: Sequence[Tensor]) -> Tensor | None:
        if isinstance(self.call.op.target, Composite):
            return bound_of(self.operation.exact, runs)
        bound = rounding_bound(self.operation, self._roundoff())
        return None if bound is None else bound + self.carried

    def _noise(self) -> list[Tensor]:
        """Return results of the op with rounded inputs, weights and result."""
        operation, op, ops, claim = self.operation, self.call.op, self.call.ops, self.call.claim
        roundoff, generator, how = self._roundoff(), ops.generator, ops.values.accumulation
        u_in = max(roundoff.u_in, roundoff.u_w)

        def read(tensor: Tensor) -> Tensor:
            return disturbed(tensor, u_in, generator, roundoff.tiny_in)

        if isinstance(op.target, Composite):
            inside = op.target.rounded(sampled(generator, lambda *_: claim.candidate.dtype, how))
            part = part_of(claim.node, op)
            operation = replace(operation, target=lambda *a, **k: part(inside(*a, **k)))
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
    known, dtype = KnownValues(hidden=claim.known.hidden), claim.candidate.dtype
    return Reference(exact, native, runs, dtype=dtype, valid=claim.valid, known=known, relative_floor=floor)


MOST_DEPTH = 3
_CANCELLED = 4.0
"""From so many times the rounding bound of the op on, what its inputs were off by is more than its own rounding."""
_TYPICAL = 1 / 8
"""Of the bound of a sum, whose terms kernels add in several lanes."""


class ComputedAgain:
    """Computes ops on the candidate's values with inputs of theirs computed again."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def read(self, op: Node, call: Callable[..., Any], depth: int) -> tuple[Operation, torch.Tensor] | None:
        """Return the op on inputs computed again, and how far from it their rounding may lead.

        Args:
            op: The op.
            call: What computes its result.
            depth: How many ops back; 0 for inputs as they were observed, which may have been rounded otherwise.
        """
        inner: dict[str, torch.Tensor] = {}
        try:
            made = self._made(op, call, depth, inner, {})
            carried = torch.zeros_like(made.exact)
            for name, bound in inner.items():
                moved = [self._made(op, call, depth, None, {name: sign * bound}) for sign in (1.0, -1.0)]
                effects = [(part.exact - made.exact).abs() for part in moved]
                carried = carried + torch.stack(effects).amax(0).nan_to_num(0.0, 0.0, 0.0)
            values = rounding_bound(made, Roundoff(U_ACCUMULATE)) if inner else None
        except DOES_NOT_FIT:
            return None  # what the candidate made an input of does not fit the input
        if values is None:
            return None
        # Only where terms cancel: elsewhere the op's own bound has room for what its inputs were off by.
        return made, torch.where(carried > _CANCELLED * values, carried, 0.0)

    def _made(
        self,
        op: Node,
        call: Callable[..., Any],
        depth: int,
        inner: dict[str, torch.Tensor] | None,
        moved: Mapping[str, torch.Tensor],
    ) -> Operation:
        read = {source: self._read(source, depth, inner, moved) for source in op.all_input_nodes}
        return in_float64(op, call, read.__getitem__)

    def _read(
        self, node: Node, depth: int, inner: dict[str, torch.Tensor] | None, moved: Mapping[str, torch.Tensor]
    ) -> Any:
        """Return what a kernel may have read for `node`: computed again up to `depth` ops back, or as it was observed.

        Args:
            node: Yields the value.
            depth: How many ops back.
            inner: Filled with the rounding bound of each value that a kernel may have rounded otherwise.
            moved: Node -> what to add to its value.
        """
        value = self._values.of(node)
        if node.name not in self._values.observed or not is_real(value) or node.op != "call_function":
            return value
        traits = traits_of(node)
        is_cheap = traits.casts or traits.rounding is Rounding.POINTWISE or traits.kind == "sum"
        if traits.moves or (depth > 0 and is_cheap):
            made = self._called(node, lambda source: self._read(source, depth - (not traits.moves), inner, moved))
            if made is None or made.exact.shape != value.shape:
                return value
            value = made.exact
        else:
            made = None
        if inner is not None and not traits.moves and not traits.casts:
            self._note(node, made or self._called(node, self._values.of), inner)
        return value.double() + moved[node.name] if node.name in moved else value

    def _called(self, node: Node, read: Callable[[Node], Any]) -> Operation | None:
        """Return the op of a node on what `read` gives; None where it cannot be computed."""
        try:
            made = in_float64(node, target_of(node), read)
        except DOES_NOT_FIT:
            return None
        return made if is_real(made.exact) else None

    def _note(self, node: Node, operation: Operation | None, inner: dict[str, torch.Tensor]) -> None:
        """Note how far a kernel may have rounded a value otherwise, in registers: it is not stored in between."""
        if operation is None or operation.exact.shape != self._values.observed[node.name].shape:
            return
        stored = self._values.roundoff(node, self._values.observed[node.name])
        u, u_sums = min(stored.u, U_ACCUMULATE), stored.u_sums
        bound = rounding_bound(operation, Roundoff(u, tiny=stored.tiny, u_sums=u_sums, kernel=stored.kernel))
        if bound is not None:
            inner[node.name] = bound * _TYPICAL if traits_of(node).rounding is Rounding.SUMS else bound


_SPREAD = 2.0
"""Rounding of another kernel, as a multiple of that of the program's own: the order of a sum, an approximation."""


class Folded:
    """What a program makes of its weights alone, and what another kernel may make of them.

    Args:
        values: Of the candidate: what it has as an input, or what the program makes in its own dtype.
        generator: Of the noise.
    """

    def __init__(self, values: Values, generator: torch.Generator) -> None:
        self._in_float64: dict[str, Any] = dict(values.program.weights())
        self._values = values
        self._generator = generator

    def read(self, op: Node, call: Callable[..., Any]) -> tuple[Operation, list[torch.Tensor]] | None:
        """Return an op on such inputs in float64, and its results on others as legal; None where it has none.

        Args:
            op: The op.
            call: What computes its result.
        """
        values = {source.name: self._values.of(source) for source in op.all_input_nodes}
        made = [
            source for source in op.all_input_nodes if source.op == "call_function" and is_real(values[source.name])
        ]
        folded = {source.name: self._exact(source) for source in made if source.name in self._values.constant}
        # Those that were rounded while they were made.
        exact = {name: value.double() for name, value in folded.items() if not _are_equal(value, values[name])}
        if not exact:
            return None

        def on(inputs: Mapping[str, torch.Tensor]) -> Operation:
            return in_float64(op, call, lambda source: inputs.get(source.name, values[source.name]))

        spreads = {}
        for name, value in exact.items():
            own = float((values[name].double() - value).square().mean().sqrt())
            least = unit_roundoff(values[name].dtype) * float(value.square().mean().sqrt())
            spreads[name] = _SPREAD * max(own, least)

        def otherwise() -> dict[str, Tensor]:
            noise = {name: torch.randn(value.shape, generator=self._generator) for name, value in exact.items()}
            return {name: value + spreads[name] * noise[name] for name, value in exact.items()}

        return on(exact), [on(otherwise()).exact for _ in range(NUM_NOISE_RUNS)]

    def _exact(self, node: Node) -> Any:
        """Return a value in float64; weights, and views of them, as they are."""
        if node.name not in self._in_float64:
            self._in_float64[node.name] = predicted_in_float64(node, self._exact)
        return self._in_float64[node.name]


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) if one.dtype is other.dtype else torch.equal(one.double(), other.double())
