"""Pieces of the baseline: the ops from tensors that a candidate has to one that is judged.

A piece is run on the candidate's own tensors, so that what they carried in is gone. However it is cut, it gives four
things: the float64 prediction P, one native result, results with Monte-Carlo rounding, and how far rounding may lead. A
piece of one op has a rounding bound, and an error counts only where floor and bound agree. One of several ops (a
region, a segment) has none: the noise of all of them decides alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.judge.graphs import cut
from glassengine.numerics.exemptions import Masks
from glassengine.numerics.judgement import Judgement
from glassengine.numerics.known import NOTHING, Known
from glassengine.numerics.nonfinite import num_newly_broken
from glassengine.numerics.ops import Operation
from glassengine.numerics.verdict import Reference

Valid = Callable[[Node, Tensor], Tensor | None]
"""Which elements of the value of a node count; None where all do."""


@dataclass(frozen=True)
class Claim:
    """That a tensor of a candidate is what the baseline makes of the candidate's own tensors, up to rounding.

    Attributes:
        node: Of the baseline.
        candidate: The candidate's tensor.
        valid: Bool mask of the elements that count; None where all do.
        known: What the graph says of the baseline's tensor.
        own: Gives what the candidate's program computes there, from tensors that both sides have; None where it has no
            program, or none of its own.
    """

    node: Node
    candidate: Tensor
    valid: Tensor | None = None
    known: Known = NOTHING
    own: Callable[[Node], cut.Piece | None] | None = None


@dataclass(frozen=True)
class Replayed:
    """What a replay found: the judgement, P, and the explanation that it rests on.

    `exempt` are the elements that it left out, see `Piece`.
    """

    judgement: Judgement
    predicted: Tensor
    exempt: Masks | None = None
    explanation: str = ""


@dataclass(frozen=True)
class OneOp:
    """The op of a piece of one.

    Attributes:
        op: What is called.
        call: What computes the value of the node: of several results of the op, one is taken.
        args: What the candidate fed to its own.
        kwargs: Likewise.
        operation: The same in float64.
        native: One sample of legal error, in the candidate's own dtypes.
    """

    op: Node
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operation: Operation
    native: Tensor


@dataclass(frozen=True)
class Piece:
    """A piece with what rounding makes of it.

    Attributes:
        exact: P.
        reference: Returns the reference of the result with the given runs behind its floor.
        noise: Returns results with Monte-Carlo rounding.
        bound: Returns how far rounding may lead, given these; None for pieces that the floor judges alone.
        one: The op, of a piece of one.
        exempt: Elements that it leaves out, by reason, where they are not those of the accumulated reference.
        seen: How a candidate's tensor is looked at: with the slots that its cache does not have yet, or sorted.
        written: Elements that were written, where memory may hold others; None where all were.
        worth_a_bound: From this noise ratio on noise and bound are worked out; the verdict does not depend on it below
            `INTRODUCED_SUSPICIOUS`, but the bound ratio is known for more tensors.
        remember: Takes the relative floor, where it was measured with noise.
    """

    exact: Tensor
    reference: Callable[[Sequence[Tensor]], Reference]
    noise: Callable[[], Sequence[Tensor]] = list
    bound: Callable[[Sequence[Tensor]], Tensor | None] | None = None
    one: OneOp | None = None
    exempt: Masks | None = None
    seen: Callable[[Tensor], Tensor] = field(default=lambda tensor: tensor)
    written: Tensor | None = None
    worth_a_bound: float = 0.0
    remember: Callable[[float], None] = field(default=lambda floor: None)

    @torch.no_grad()
    def judge(self, candidate: Tensor, known: Known = NOTHING) -> Judgement:
        """Judge what a candidate made of the same tensors."""
        candidate = self.seen(candidate)
        quick = self.reference(())
        if self.bound is None:
            return quick.judge(candidate)
        assert self.one is not None
        broken = num_newly_broken(self.one.operation, candidate, self.written, known.hidden)
        if broken:
            return Judgement("wrong", None, None, f"{broken} values are not finite though all inputs are")
        # Most ops are within the floor of one run; the rest is worth the other runs, and the bound.
        found = quick.measured(candidate)
        if found.noise_ratio is None or found.verdict == "identical":
            return found
        # Terms of a product are of one size, and so are the errors of its elements, however small these are.
        is_even = self.one.operation.traits.reads_memory or not quick.has_outliers(candidate)
        if found.noise_ratio <= self.worth_a_bound and is_even:
            return found
        runs = self.noise()
        reference = self.reference(runs)
        self.remember(reference.relative_floor)
        return reference.judge_introduced(candidate, self.bound(runs))
