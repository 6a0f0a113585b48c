"""Results of functions beside references: figures of each tensor, kinds of mistakes, sweeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from glassengine.results.base import Result, Verdict

MistakeKind = Literal[
    "accumulation", "activation", "argument ignored", "axis", "bias missing", "constant", "eps", "input returned",
    "inputs written", "layout", "mask", "operands swapped", "operation left out", "operation replaced",
    "out of bounds", "overflow", "permuted", "position", "precision", "raises", "scale", "shape or dtype",
    "stale or unstable", "statistics", "tail", "other",
]  # fmt: skip
"""What a kernel does wrong, in one word."""


@dataclass(frozen=True)
class TensorMatch(Result):
    """One tensor of a result beside that of the reference.

    Attributes:
        path: Where it is in the result: "" for a single tensor, "[1]", "['lse']", "inputs[2]" after the call.
        shape: Of the reference.
        dtype: Of the candidate.
        verdict: "identical" and "rounding" are right; "suspicious" is, too, where there is no bound.
        noise_ratio: Error over the noise floor, in the worst slice; None where no number decided.
        bound_ratio: Error over the rounding bound of the worst element, 1 for at most 1; None where it was not needed
            or is not known.
        reason: What decided, where it was not the ratios.
        index: The worst element; None where the tensor is right or has none.
        expected: Its value in float64.
        actual: The candidate's value there.
        ulp: Their distance in units in the last place of the candidate's dtype.
        where: Which elements are beyond rounding: "the last 3 columns".
        num_beyond: How many these are.
        num_tied: Elements of which another value is legal, because of a tie.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    verdict: Verdict
    noise_ratio: float | None
    bound_ratio: float | None
    reason: str | None = None
    index: tuple[int, ...] | None = None
    expected: float | None = None
    actual: float | None = None
    ulp: float | None = None
    where: str | None = None
    num_beyond: int = 0
    num_tied: int = 0


@dataclass(frozen=True)
class KernelMistake(Result):
    """A kind of mistake that makes what the candidate made.

    Attributes:
        kind: In one word.
        text: In a sentence.
        proven: Whether the reference with this mistake gives the candidate's tensors up to rounding.
        unexplained: Share of the error that is left with it, 0 to 1; None where nothing was computed.
    """

    kind: MistakeKind
    text: str
    proven: bool = False
    unexplained: float | None = None


@dataclass(frozen=True)
class Match(Result):
    """A result beside its reference.

    Attributes:
        ok: Whether rounding explains every difference.
        verdict: The worst of the tensors.
        tensors: One after the other; those after the first failure, too.
        mistakes: What kind of mistake it is, the likeliest first; empty where the result is right.
        num_ops: Of the traced reference; 0 where it could not be traced.
        not_traced: Why the reference could not be traced, which makes the floor coarser; None where it was.
        accumulation: How products may be summed.
        notes: What was done that one would not expect.
    """

    ok: bool
    verdict: Verdict
    tensors: tuple[TensorMatch, ...]
    mistakes: tuple[KernelMistake, ...] = ()
    num_ops: int = 0
    not_traced: str | None = None
    accumulation: str = "float32"
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> TensorMatch | None:
        """The first tensor with the worst verdict."""
        return next((one for one in self.tensors if one.verdict == self.verdict), None)


@dataclass(frozen=True)
class SweepCase(Result):
    """One case of a sweep.

    Attributes:
        name: Of its values and variant: "cancellation, non-contiguous".
        shapes: Of the tensors that were given.
        dtype: Of the floating ones.
        ok: Whether the candidate is right.
        match: How it compares; None where it raised.
        error: What it raised; None where it did not.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    ok: bool
    match: Match | None
    error: str | None = None


@dataclass(frozen=True)
class Sweep(Result):
    """A candidate beside its reference on many inputs.

    Attributes:
        ok: Whether it is right on all of them.
        num_cases: How many were run.
        failures: Those in which it is wrong, the smallest first.
        smallest: The smallest of them; None where there is none.
        when: What the failures have in common: "S % 64 != 0", "values of 1e4".
        mistakes: What kind of mistake it is, the likeliest first.
        skipped: Cases that the reference itself does not take, by its error.
    """

    ok: bool
    num_cases: int
    failures: tuple[SweepCase, ...] = ()
    smallest: SweepCase | None = None
    when: str | None = None
    mistakes: tuple[KernelMistake, ...] = ()
    skipped: tuple[str, ...] = ()
