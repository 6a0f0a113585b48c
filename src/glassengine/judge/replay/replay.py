"""A replay: what did the ops of the baseline between a candidate's tensors make of the candidate's own values?

A candidate runs a step, and hands over what it was given and made. Then each of its tensors is judged by what the piece
of the baseline that ends there should give (`Expected`), and what exceeds that by the `EXPLANATIONS`. Replays differ
only in where their pieces begin.

Explanations of a tensor that looks wrong but is what the baseline makes of the candidate's own tensors: `EXPLANATIONS`
is the one list, in the order in which they are tried: what assumes the least comes first. Each cuts the piece in
another way, or looks at its result in another way, and the first that holds decides. Where none holds, the verdict is
that of the first. Each needs a proof from the candidate's own values: none is granted for the name of an op, and a
mistake beside what is explained exceeds floor and bound of the other piece as well. Pieces of several ops are judged as
read only: the noise of all of them has room for any of this.

Two of them are exemptions: the candidate chose otherwise, legally; what depends on the choice is excluded and counted.
Where `noise_ratio` is None nothing was rounded: only the explanations of choices apply, and the last one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.cases import Given, by_name, empty_caches
from glassengine.judge.exclusions.masked import valid_in_step
from glassengine.judge.exclusions.perturbation import unread_nodes
from glassengine.judge.exclusions.ties import is_unordered, tied_choices
from glassengine.judge.pieces import Piece
from glassengine.judge.replay.expected import Claim, ReplayedTensor, SegmentReplay, expected_of
from glassengine.judge.replay.op import MOST_DEPTH, CandidateCall, OneOp, Ops
from glassengine.judge.replay.values import Values
from glassengine.numerics.float64 import Accumulation
from glassengine.numerics.judgement import Judgement
from glassengine.numerics.kinds import NOTHING, KnownValues, in_kind
from glassengine.numerics.verdict import TIE
from glassengine.ops.row import argument
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.program.representation.program import Program
from glassengine.results import FLAGGED

ROUNDED_IN_STEPS = "written out, and the same in float64: rounded in several steps"
_EQUAL = 2.0**-20
"""Of constants that are written with some ten digits."""


class Cut(Enum):
    """Where pieces begin.

    OP: at the inputs of each op; an op that reads a tensor that was not observed is not replayed.
    REGION: at the inputs of each op, and where one of these was not observed, at the observed tensors above it.
    SEGMENT: at the observed tensors above, for sides that have few of them.
    """

    OP = "op"
    REGION = "region"
    SEGMENT = "segment"


@dataclass(eq=False, repr=False, kw_only=True)
class Replay(Values):
    """Replays pieces of the baseline program on a candidate's values.

    Attributes:
        cut: Where pieces begin.
        worth_a_bound: See `Ops`.
        of_regions: How products inside of regions are summed, where that is coarser: what they read was not observed.
        ops: Pieces of one op.
    """

    cut: Cut = Cut.OP
    worth_a_bound: float = 1.6
    of_regions: Accumulation | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        tensors = ((node.name, node.meta.get("val")) for node in self.program.graph.nodes)
        self._dtypes = {name: value.dtype for name, value in tensors if isinstance(value, torch.Tensor)}
        # Without a circle the tensors of a step are freed at once, not when the garbage collector runs.
        self.ops = Ops(weakref.proxy(self), worth_a_bound=self.worth_a_bound)
        segments = SegmentReplay(self.program, coarsest=self.dtype, rounded=self.rounded)
        self._segments = None if self.cut is Cut.OP else segments
        self.begin()

    @property
    def method(self) -> str:
        """What judges, in words."""
        return "segment" if self.cut is Cut.SEGMENT else "reverse replay"

    @property
    def values(self) -> Mapping[str, Any]:
        """What the candidate was given and made in this step, by baseline node; of segments up to the present one."""
        if self._segments is not None and self.cut is Cut.SEGMENT:
            return self._segments.values
        return self.observed

    def begin(self) -> None:
        """Start a case, with an empty cache; nothing of earlier cases has a part in it."""
        self.ops.begin()
        if self._segments is not None:
            self._segments.begin(self.of_regions or self.accumulation)

    def begin_step(
        self, given: Given, made: Mapping[str, torch.Tensor], caches: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Take over a step of the candidate.

        Args:
            given: Its inputs.
            made: Its tensors, by baseline node.
            caches: Its own, as they were before the step, by the name of the input; None where they are not known.
        """
        named = by_name(given)
        made = {
            name: in_kind(value, self._dtypes.get(name, value.dtype)) if isinstance(value, torch.Tensor) else value
            for name, value in made.items()
        }
        if self.cut is not Cut.SEGMENT:
            self.take({**named, **(caches or {})}, made)
        if self._segments is not None:
            valid = partial(valid_in_step, self.program, given)
            # Caches are the baseline's, for any candidate: empty before the first step, and kept by the run from there.
            empty = {} if self._segments.has_run else empty_caches(self.program, named)
            asked = (lambda _: True) if self.cut is Cut.SEGMENT else self.lacks_inputs
            self._segments.begin_step({**named, **empty}, made.get, valid, asked)

    @torch.no_grad()
    def judge(
        self,
        node: Node,
        candidate: torch.Tensor,
        valid: torch.Tensor | None,
        known: KnownValues = NOTHING,
        piece_of: Callable[[Node], Piece | None] | None = None,
        native: torch.Tensor | None = None,
    ) -> ReplayedTensor | None:
        """Judge what the piece that ends in `node` introduced; None where its inputs are not known. See `Claim`.

        `native` is what the baseline's own run has there, where the candidate's tensor was found identical.
        """
        if self._segments is not None and (self.cut is Cut.SEGMENT or self.lacks_inputs(node)):
            found = self._segments.expected(node, candidate)
            return None if found is None else found[0].replayed(found[1])
        claim = Claim(node, candidate.to(self.rounded.get(node.name, candidate.dtype)), valid, known, piece_of)
        if native is not None and self.take_same(node, claim.candidate, native) and self.reads_same(node):
            return proven(claim, self.ops)
        call = self.ops.called(claim)
        return None if call is None else replayed(call)

    @torch.no_grad()
    def allowed(self, node: Node, candidate: torch.Tensor) -> torch.Tensor | None:
        """Return the bound that the candidate's result of `node` is judged by; None where noise alone judges it."""
        call = self.ops.called(Claim(node, candidate))
        one = None if call is None else call.in_float64()
        return None if one is None else one.allowed()

    def inside(self, judged: Collection[str]) -> dict[str, set[str]]:
        """Return the nodes within pieces that were judged at their ends: node -> ends, of these `judged` nodes."""
        return {} if self.cut is Cut.OP else covered(self.program, judged)


def as_read(one: OneOp, first: ReplayedTensor | None) -> Iterator[ReplayedTensor]:
    """The tensor is within floor and bound of what the piece makes of what was observed; integers are equal."""
    if not _may_be_in_any_order(one):
        yield one.replayed(one.call.claim.candidate)


def in_any_order(one: OneOp, first: ReplayedTensor | None) -> Iterator[ReplayedTensor]:
    """The op promises no order of the values that it chooses, and sorted they are within floor and bound."""
    if not _may_be_in_any_order(one):
        return
    dim, operation = argument(one.call.op, "dim"), one.operation

    def in_order(*args: Any, **kwargs: Any) -> torch.Tensor:
        value: torch.Tensor = operation.target(*args, **kwargs)
        return value.sort(dim).values

    ordered = replace(operation, target=in_order, exact=operation.exact.sort(dim).values)
    ours, theirs = (side.sort(dim) for side in (one.reference.native, one.call.claim.candidate))
    found = one.read(ordered, ours.values).judge(theirs.values)
    if found.verdict not in FLAGGED and not torch.equal(ours.indices, theirs.indices):
        found = replace(found, verdict="rounding", reason=TIE, is_tie=True)
    yield ReplayedTensor(found, operation.exact, one.judge)


def another_choice(one: OneOp, first: ReplayedTensor | None) -> Iterator[ReplayedTensor]:
    """Wherever integers differ, what the op compared is within the rounding of the inputs, and no value is settled."""
    if one.is_float or not one.call.ops.values.compiled:
        return
    claim, exact, u_in = one.call.claim, one.operation.exact, one.call.ops.values.roundoff_of_inputs(one.call.op)
    tied = tied_choices(one.call.op, one.operation.args, exact, claim.candidate, u_in, claim.known.settled)
    if tied is None:
        return
    differs = (claim.candidate != exact.to(claim.candidate.dtype)) & ~tied
    if not bool((differs if claim.valid is None else differs & claim.valid).any()):
        yield ReplayedTensor(Judgement("rounding", None, None, TIE, is_tie=True), exact, one.judge)


def computed_again(one: OneOp, first: ReplayedTensor | None) -> Iterator[ReplayedTensor]:
    """The tensor is within floor and bound of the op on inputs that were not rounded, or are computed again.

    Fused code computes a sum once for its readers and once more for the dump, rounded in other places; where terms
    cancel the two are far apart. So an op is right if it is right on what its inputs were made of, up to three cheap
    ops back; what these may round is added to the bound, where it exceeds that.
    """
    if not _may_be_rounded_otherwise(one, first):
        return
    for depth in range(MOST_DEPTH + 1):
        read = one.call.ops.computed_again.read(one.call.op, one.operation.target, depth)
        if read is None or read[0].exact.shape != one.operation.exact.shape:
            return
        made, carried = read
        again = one.read(made, made.exact.to(one.call.claim.candidate.dtype), carried)
        again = replace(again, call=replace(one.call, args=made.args, kwargs=made.kwargs))
        yield again.replayed(one.call.claim.candidate)


def weights_folded(one: OneOp, first: ReplayedTensor | None) -> Iterator[ReplayedTensor]:
    """An input was rounded while it was made of weights alone, and the tensor is within floor and bound of the op on
    what other kernels make of these weights.
    """
    if not _may_be_rounded_otherwise(one, first):
        return
    read = one.call.ops.folded.read(one.call.op, one.operation.target)
    if read is not None:
        operation, runs = read
        folded = one.read(operation, one.reference.native, runs=runs)
        yield folded.replayed(one.call.claim.candidate)


def written_out(one: OneOp, first: ReplayedTensor | None) -> Iterator[ReplayedTensor]:
    """The op is an activation, the candidate's program computes it by other ops, and these make the same in float64.

    1 + erf(x) and 1 + tanh(x) cancel, so that gelu by hand in a half precision is far from gelu in one op where x is
    small or negative: by more than the rounding of one op explains, and still by rounding alone. The tensor must be
    what the candidate's own ops make, with a rounding after each of them.
    """
    # What is periodic is not among them: a coarse argument of a sine is a mistake, not a rounding.
    claim, traits = one.call.claim, traits_of(one.call.claim.node)
    if first is None or claim.own is None or not traits.relative_to_argument or traits.is_periodic:
        return
    own, given, right = claim.own(claim.node), one.operation.args[0], one.operation.exact
    if own is None or op_name(own.ops[-1]) == op_name(claim.node) or not isinstance(given, torch.Tensor):
        return
    try:
        (expected,) = expected_of(own)
    except (RuntimeError, IndexError, ValueError):
        return  # it holds what float64 does not have
    found, size = expected.reference.exact, torch.maximum(right.abs(), given.abs())
    is_same = found.shape == right.shape and bool(((found - right).abs() <= _EQUAL * size).all())
    if is_same and expected.judge(claim.candidate).verdict != "wrong":
        judgement = replace(first.judgement, verdict="rounding", reason=ROUNDED_IN_STEPS)
        yield replace(first, judgement=judgement)


def _may_be_in_any_order(one: OneOp) -> bool:
    return one.is_float and one.call.ops.values.compiled and is_unordered(one.call.op)


def _may_be_rounded_otherwise(one: OneOp, first: ReplayedTensor | None) -> bool:
    """Whether another kernel may have rounded inputs otherwise: what is no number was not rounded."""
    is_number = first is not None and first.judgement.noise_ratio is not None
    return is_number and one.is_float and one.call.ops.values.compiled and not is_unordered(one.call.op)


EXPLANATIONS = (as_read, in_any_order, another_choice, computed_again, weights_folded, written_out)
"""Each yields what it finds, and nothing where it does not apply. Its docstring says what proof it needs."""


def replayed(call: CandidateCall) -> ReplayedTensor | None:
    """Judge what a candidate's op made; None where the baseline's op does not fit what it read.

    One comparison proves what is bitwise equal to what the program's own kernel makes of the same values.
    """
    if call.is_reproduced():
        return _identical(lambda: call)
    one = call.in_float64()
    return None if one is None else explained(one)


def proven(claim: Claim, ops: Ops) -> ReplayedTensor:
    """Return what a replay finds where the tensor, and all that its op reads, are bitwise those of the baseline."""

    def call() -> CandidateCall:
        found = ops.called(claim)
        assert found is not None  # the baseline has computed it of the same values
        return found

    return _identical(call)


def _identical(call: Callable[[], CandidateCall]) -> ReplayedTensor:
    def again(result: torch.Tensor) -> Judgement:
        one = call().in_float64()
        return call().by_native().judge(result) if one is None else _explained_again(one, result)

    return ReplayedTensor(Judgement("identical", 0.0, None), lambda: call().predicted(), again)


def explained(one: OneOp) -> ReplayedTensor | None:
    """Return the first explanation of the candidate's tensor that holds; the first of all where none does."""
    first = None
    for explanation in EXPLANATIONS:
        for found in explanation(one, first):
            found = replace(found, explanation=explanation.__name__, again=partial(_explained_again, one))
            if found.judgement.verdict not in FLAGGED:
                return found
            first = first or found
    return first


def _explained_again(one: OneOp, result: torch.Tensor) -> Judgement:
    found = explained(replace(one, call=replace(one.call, claim=replace(one.call.claim, candidate=result))))
    assert found is not None  # the same explanations are tried
    return found.judgement


def covered(program: Program, judged: Collection[str]) -> dict[str, set[str]]:
    """Return the nodes inside of regions: node -> judged nodes at which the region ends.

    A node is inside when everything that it flows into, on a way to a result, is judged or inside of a region itself. A
    cache is a result, too, but the attention of the same step has read it: where that is judged, so is the cache.
    """
    ends: dict[str, set[str] | None] = {}
    caches = {program.output_nodes[name] for name in program.caches.values()}
    unread = unread_nodes(program)
    for node in reversed(program.graph.nodes):
        if node.op != "call_function" or node.name in judged or not node.users:
            continue
        found: set[str] | None = set()
        for user in node.users:
            if user.name in judged:
                found = None if found is None else found | {user.name}
            elif user.op == "output" and node.name in caches and len(node.users) > 1:
                continue
            elif "_assert" not in str(user.target) and user.name not in unread:
                own = ends.get(user.name)
                found = None if found is None or own is None else found | own
        ends[node.name] = found
    return {name: found for name, found in ends.items() if found}
