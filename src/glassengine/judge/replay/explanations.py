"""Why a candidate's tensor may be what the baseline makes of the candidate's own tensors, and yet look otherwise.

`EXPLANATIONS` is the one list, in the order in which they are tried: what assumes the least comes first. Each cuts the
piece in another way, or looks at its result in another way, and the first that holds decides. Where none holds, the
verdict is that of the first. Each needs a proof from the candidate's own values: none is granted for the name of an op,
and a mistake beside what is explained exceeds floor and bound of the other piece as well.

Two of them are exemptions: the candidate chose otherwise, legally; what depends on the choice is excluded and counted.
What is no number (`noise_ratio` is None) was not rounded: only the explanations of choices apply, and the last one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from glassengine.judge.exclusions.ties import chosen_along, is_unordered, tied_choices
from glassengine.judge.replay.computed_again import MOST_DEPTH
from glassengine.judge.replay.op import Ops
from glassengine.judge.replay.piece import Claim, OneOp, Piece, Replayed
from glassengine.numerics.judgement import Judgement
from glassengine.numerics.verdict import TIE
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import FLAGGED

ROUNDED_IN_STEPS = "written out, and the same in float64: rounded in several steps"

_EQUAL = 2.0**-20
"""Of constants that are written with some ten digits."""


@dataclass(frozen=True)
class Asked:
    """A claim, and what it may be explained with.

    Attributes:
        claim: About a tensor of the candidate.
        piece: As it was cut.
        ops: Of the candidate.
        observed: What the candidate was given and made in this step, by node.
        first: What the first explanation found.
    """

    claim: Claim
    piece: Piece
    ops: Ops
    observed: Mapping[str, Any]
    first: Replayed | None = None

    @property
    def is_unordered(self) -> bool:
        """Whether kernels may give the result in any order."""
        one = self.piece.one
        return one is not None and self.piece.bound is not None and self.ops.values.compiled and is_unordered(one.op)

    @property
    def rounded(self) -> OneOp | None:
        """The op, where another kernel may have rounded otherwise: what is no number was not rounded."""
        first = self.first
        if first is None or first.judgement.noise_ratio is None or self.piece.bound is None or self.is_unordered:
            return None
        return self.piece.one if self.ops.values.compiled else None


def _as_read(asked: Asked) -> Iterator[Replayed]:
    if not asked.is_unordered:
        piece = asked.piece
        yield Replayed(piece.judge(asked.claim.candidate, asked.claim.known), piece.exact, piece.exempt)


def _in_any_order(asked: Asked) -> Iterator[Replayed]:
    one, claim = asked.piece.one, asked.claim
    if one is None or not asked.is_unordered:
        return
    dim, operation = chosen_along(one.op), one.operation

    def in_order(*args: Any, **kwargs: Any) -> torch.Tensor:
        value: torch.Tensor = operation.target(*args, **kwargs)
        return value.sort(dim).values

    ordered = dataclasses.replace(operation, target=in_order, exact=operation.exact.sort(dim).values)
    ours, theirs = (side.sort(dim) for side in (one.native, claim.candidate))
    piece = asked.ops.of(claim, dataclasses.replace(one, operation=ordered, native=ours.values))
    found = piece.judge(theirs.values, claim.known)
    if found.verdict not in FLAGGED and not torch.equal(ours.indices, theirs.indices):
        found = dataclasses.replace(found, verdict="rounding", reason=TIE, is_tie=True)
    yield Replayed(found, operation.exact)


def _another_choice(asked: Asked) -> Iterator[Replayed]:
    one, claim, values = asked.piece.one, asked.claim, asked.ops.values
    if one is None or asked.piece.bound is not None or not values.compiled:
        return
    exact, u_in = one.operation.exact, values.roundoff_of_inputs(one.op)
    tied = tied_choices(one.op, one.operation.args, exact, claim.candidate, u_in, claim.known.settled)
    if tied is None:
        return
    differs = (claim.candidate != exact.to(claim.candidate.dtype)) & ~tied
    if not bool((differs if claim.valid is None else differs & claim.valid).any()):
        yield Replayed(Judgement("rounding", None, None, TIE, is_tie=True), exact)


def _computed_again(asked: Asked) -> Iterator[Replayed]:
    one, claim = asked.rounded, asked.claim
    for depth in range(MOST_DEPTH + 1) if one is not None else ():
        assert one is not None
        read = asked.ops.computed_again.read(one.op, one.call, depth)
        if read is None or read[0].exact.shape != claim.candidate.shape:
            return
        made, carried = read
        other = OneOp(one.op, one.call, made.args, made.kwargs, made, made.exact.to(claim.candidate.dtype))
        yield Replayed(asked.ops.of(claim, other, carried=carried).judge(claim.candidate, claim.known), made.exact)


def _weights_folded(asked: Asked) -> Iterator[Replayed]:
    one, claim = asked.rounded, asked.claim
    read = None if one is None else asked.ops.folded.read(one)
    if one is not None and read is not None:
        operation, runs = read
        piece = asked.ops.of(claim, dataclasses.replace(one, operation=operation), runs=runs)
        yield Replayed(piece.judge(claim.candidate, claim.known), operation.exact)


def _written_out(asked: Asked) -> Iterator[Replayed]:
    node, first = asked.claim.node, asked.first
    traits = traits_of(node)
    # What is periodic is not among them: a coarse argument of a sine is a mistake, not a rounding.
    if first is None or asked.claim.own is None or not traits.relative_to_argument or traits.is_periodic:
        return
    given, own = asked.observed.get(node.all_input_nodes[0].name), asked.claim.own(node)
    if own is None or op_name(own.ops[-1]) == op_name(node) or not isinstance(given, torch.Tensor):
        return
    try:
        (found,) = own.exact()
    except (RuntimeError, IndexError, ValueError):
        return  # it holds what float64 does not have
    size = torch.maximum(first.predicted.abs(), given.double().abs())
    if found.shape == first.predicted.shape and bool(((found - first.predicted).abs() <= _EQUAL * size).all()):
        judgement = dataclasses.replace(first.judgement, verdict="rounding", reason=ROUNDED_IN_STEPS)
        yield dataclasses.replace(first, judgement=judgement)


@dataclass(frozen=True)
class Explanation:
    """One of the list.

    Attributes:
        name: In a few words.
        proof: What it needs to hold.
        replays: Yields what it finds, the mildest first; nothing where it does not apply.
        is_exemption: Whether what it explains is left out and counted, rather than right.
    """

    name: str
    proof: str
    replays: Callable[[Asked], Iterator[Replayed]]
    is_exemption: bool = False


EXPLANATIONS = (
    Explanation(
        "as read",
        "The tensor is within floor and bound of what the piece makes of what was observed; integers are equal.",
        _as_read,
    ),
    Explanation(
        "in any order",
        "The op promises no order of what it chooses, and sorted the values are within floor and bound.",
        _in_any_order,
        is_exemption=True,
    ),
    Explanation(
        "another choice",
        "Wherever it differs, what the op compared is within the rounding of the inputs, and no value is settled.",
        _another_choice,
        is_exemption=True,
    ),
    Explanation(
        "computed again",
        "The tensor is within floor and bound of the op on inputs that were not rounded, or are computed again from "
        "what they were made of, up to three cheap ops back. Fused code computes a sum once for its readers and once "
        "for the dump; where terms cancel the two are far apart, by as much as the ops in between round.",
        _computed_again,
    ),
    Explanation(
        "weights folded",
        "An input is made of weights alone and was rounded on the way, and the tensor is within floor and bound of the "
        "op on what other kernels make of these weights.",
        _weights_folded,
    ),
    Explanation(
        "written out",
        "The op is an activation, the candidate's own program computes it by other ops, and these make the same in "
        "float64. 1 + erf(x) and 1 + tanh(x) cancel, so that each rounding shows where x is small or negative.",
        _written_out,
    ),
)


def explained(asked: Asked) -> Replayed | None:
    """Return the first explanation that holds; the first of all where none does."""
    for explanation in EXPLANATIONS:
        for found in explanation.replays(asked):
            if found.judgement.verdict not in FLAGGED:
                return dataclasses.replace(found, explanation=explanation.name)
            if asked.first is None:
                asked = dataclasses.replace(asked, first=found)
    return asked.first
