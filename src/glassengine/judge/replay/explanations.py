"""Explanations of a tensor that looks wrong but is what the baseline makes of the candidate's own tensors.

`EXPLANATIONS` is the one list, in the order in which they are tried: what assumes the least comes first. Each cuts the
piece in another way, or looks at its result in another way, and the first that holds decides. Where none holds, the
verdict is that of the first. Each needs a proof from the candidate's own values: none is granted for the name of an
op, and a mistake beside what is explained exceeds floor and bound of the other piece as well. Pieces of several ops are
judged as read only: the noise of all of them has room for any of this.

Two of them are exemptions: the candidate chose otherwise, legally; what depends on the choice is excluded and counted.
What is no number (`noise_ratio` is None) was not rounded: only the explanations of choices apply, and the last one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from glassengine.judge.exclusions.ties import chosen_along, is_unordered, tied_choices
from glassengine.judge.replay.expected import Claim, ReplayedTensor, expected_of
from glassengine.judge.replay.op import MOST_DEPTH, CandidateCall, OneOp, Ops
from glassengine.numerics.judgement import Judgement
from glassengine.numerics.verdict import TIE
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import FLAGGED

ROUNDED_IN_STEPS = "written out, and the same in float64: rounded in several steps"

_EQUAL = 2.0**-20
"""Of constants that are written with some ten digits."""


def as_read(one: OneOp, first: ReplayedTensor | None) -> Iterator[ReplayedTensor]:
    """The tensor is within floor and bound of what the piece makes of what was observed; integers are equal."""
    if not _may_be_in_any_order(one):
        yield one.replayed(one.claim.candidate)


def in_any_order(one: OneOp, first: ReplayedTensor | None) -> Iterator[ReplayedTensor]:
    """The op promises no order of the values that it chooses, and sorted they are within floor and bound."""
    if not _may_be_in_any_order(one):
        return
    dim, operation = chosen_along(one.op), one.operation

    def in_order(*args: Any, **kwargs: Any) -> torch.Tensor:
        value: torch.Tensor = operation.target(*args, **kwargs)
        return value.sort(dim).values

    ordered = dataclasses.replace(operation, target=in_order, exact=operation.exact.sort(dim).values)
    ours, theirs = (side.sort(dim) for side in (one.reference.native, one.claim.candidate))
    found = one.read(ordered, ours.values).judge(theirs.values)
    if found.verdict not in FLAGGED and not torch.equal(ours.indices, theirs.indices):
        found = dataclasses.replace(found, verdict="rounding", reason=TIE, is_tie=True)
    yield ReplayedTensor(found, operation.exact, one.judge)


def another_choice(one: OneOp, first: ReplayedTensor | None) -> Iterator[ReplayedTensor]:
    """Wherever integers differ, what the op compared is within the rounding of the inputs, and no value is settled."""
    if one.is_float or not one.ops.values.compiled:
        return
    claim, exact, u_in = one.claim, one.operation.exact, one.ops.values.roundoff_of_inputs(one.op)
    tied = tied_choices(one.op, one.operation.args, exact, claim.candidate, u_in, claim.known.settled)
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
        read = one.ops.computed_again.read(one.op, one.operation.target, depth)
        if read is None or read[0].exact.shape != one.operation.exact.shape:
            return
        made, carried = read
        again = one.read(made, made.exact.to(one.claim.candidate.dtype), carried)
        again = dataclasses.replace(again, args=made.args, kwargs=made.kwargs)
        yield again.replayed(one.claim.candidate)


def weights_folded(one: OneOp, first: ReplayedTensor | None) -> Iterator[ReplayedTensor]:
    """An input was rounded while it was made of weights alone, and the tensor is within floor and bound of the op on
    what other kernels make of these weights.
    """
    if not _may_be_rounded_otherwise(one, first):
        return
    read = one.ops.folded.read(one.op, one.operation.target)
    if read is not None:
        operation, runs = read
        folded = one.read(operation, one.reference.native, runs=runs)
        yield folded.replayed(one.claim.candidate)


def written_out(one: OneOp, first: ReplayedTensor | None) -> Iterator[ReplayedTensor]:
    """The op is an activation, the candidate's program computes it by other ops, and these make the same in float64.

    1 + erf(x) and 1 + tanh(x) cancel, so that gelu by hand in a half precision is far from gelu in one op where x is
    small or negative: by more than the rounding of one op explains, and still by rounding alone. The tensor must be
    what the candidate's own ops make, with a rounding after each of them.
    """
    # What is periodic is not among them: a coarse argument of a sine is a mistake, not a rounding.
    claim, traits = one.claim, traits_of(one.claim.node)
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
        judgement = dataclasses.replace(first.judgement, verdict="rounding", reason=ROUNDED_IN_STEPS)
        yield dataclasses.replace(first, judgement=judgement)


def _may_be_in_any_order(one: OneOp) -> bool:
    return one.is_float and one.ops.values.compiled and is_unordered(one.op)


def _may_be_rounded_otherwise(one: OneOp, first: ReplayedTensor | None) -> bool:
    """Whether another kernel may have rounded inputs otherwise: what is no number was not rounded."""
    is_number = first is not None and first.judgement.noise_ratio is not None
    return is_number and one.is_float and one.ops.values.compiled and not is_unordered(one.op)


@dataclass(frozen=True)
class Explanation:
    """One of the list.

    Attributes:
        name: In a few words.
        replays: Yields what it finds; nothing where it does not apply. Its docstring says what proof it needs.
        is_exemption: Whether what it explains is excluded and counted, rather than right.
    """

    name: str
    replays: Callable[[OneOp, ReplayedTensor | None], Iterator[ReplayedTensor]]
    is_exemption: bool = False


EXPLANATIONS = (
    Explanation("as read", as_read),
    Explanation("in any order", in_any_order, is_exemption=True),
    Explanation("another choice", another_choice, is_exemption=True),
    Explanation("computed again", computed_again),
    Explanation("weights folded", weights_folded),
    Explanation("written out", written_out),
)


def replayed(call: CandidateCall) -> ReplayedTensor | None:
    """Judge what a candidate's op made; None where the baseline's op does not fit what it read.

    One comparison proves what is bitwise equal to what the program's own kernel makes of the same values.
    """
    if call.is_reproduced():
        return ReplayedTensor(Judgement("identical", 0.0, None), call.predicted, partial(_judged_again, call))
    one = call.in_float64()
    return None if one is None else explained(one)


def proven(claim: Claim, ops: Ops) -> ReplayedTensor:
    """Return what a replay finds where the tensor, and all that its op reads, are bitwise those of the baseline."""

    def call() -> CandidateCall:
        found = ops.called(claim)
        assert found is not None  # the baseline has computed it of the same values
        return found

    identical = Judgement("identical", 0.0, None)
    return ReplayedTensor(identical, lambda: call().predicted(), lambda result: _judged_again(call(), result))


def _judged_again(call: CandidateCall, result: torch.Tensor) -> Judgement:
    one = call.in_float64()
    return call.by_native().judge(result) if one is None else _explained_again(one, result)


def explained(one: OneOp) -> ReplayedTensor | None:
    """Return the first explanation of the candidate's tensor that holds; the first of all where none does."""
    first = None
    for explanation in EXPLANATIONS:
        for found in explanation.replays(one, first):
            found = dataclasses.replace(found, explanation=explanation.name, again=partial(_explained_again, one))
            if found.judgement.verdict not in FLAGGED:
                return found
            first = first or found
    return first


def _explained_again(one: OneOp, result: torch.Tensor) -> Judgement:
    found = explained(dataclasses.replace(one, claim=dataclasses.replace(one.claim, candidate=result)))
    assert found is not None  # the same explanations are tried
    return found.judgement
