"""What is judged at once, and what is found: both are plain values, which go to other processes and come back.

Request   what is compared, as far as a pair depends on it: paths and options
Unit      a pair of tensors, or some rows of a large one, by their numbers in the entries of both sides
Chunk     units of some 256 MB that are judged together
Outcome   figures of one unit, which can be merged
Answer    the outcomes of a chunk, or the error that ended it
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import msgspec

from glassengine import errors
from glassengine.compare.evidence import Evidence
from glassengine.compare.ranks.findings import Told
from glassengine.compare.sides import Counted
from glassengine.errors import GlassError
from glassengine.numerics.metrics.drift import DriftSums
from glassengine.results import Hint, Pair, Summary, Verdict

Kind = Literal["judge", "summarize", "trace", "explain"]


class Request(msgspec.Struct, frozen=True):
    """What is compared, as far as the verdict on a pair depends on it; see `compare.compare`."""

    baseline: str
    candidate: str
    rtol: float | None = None
    atol: float | None = None
    map: str | dict[str, Any] | None = None
    transpose: tuple[str, ...] = ()
    device: str = "cpu"
    by_drift: bool = False
    token: str = ""

    def key(self) -> bytes:
        """Return it as bytes; two comparisons have other tokens, as files may change between them."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def of(cls, key: bytes) -> Request:
        """Return what has a key."""
        return msgspec.msgpack.decode(key, type=cls)


class Unit(msgspec.Struct, frozen=True, array_like=True):
    """A pair of tensors.

    Attributes:
        number: Of the pair, in the order of the comparison.
        baseline: Place of the tensor in the entries of the baseline.
        candidates: Places of its counterparts.
        method: How they were paired.
        rule: Number of the rule of the map.
        rows: First and end, where not all rows are meant.
        added: Places of both sides of other pairs, whose candidate is added to this one's.
        is_rejected: Whether shares of a sum are known never to be added up.
        verdict: What is known already.
    """

    number: int
    baseline: int
    candidates: tuple[int, ...]
    method: str
    rule: int | None = None
    rows: tuple[int, int] | None = None
    added: tuple[tuple[int, int], ...] = ()
    is_rejected: bool = False
    verdict: Verdict | None = None


class Chunk(msgspec.Struct, frozen=True):
    """Units that are judged together.

    Attributes:
        kind: What is asked.
        units: Of which.
        context: All pairs of the same steps, where what is put together depends on them.
        asked: Of "explain": the place of the unit in question; the others are of the same tensor.
    """

    kind: Kind
    units: tuple[Unit, ...]
    context: tuple[Unit, ...] = ()
    asked: int = 0


class Statistics(msgspec.Struct, frozen=True):
    """Of one pair: of both sides and of their errors, where the shapes are the same."""

    baseline: Summary
    candidate: Summary
    abs_error: Summary | None
    rel_error: Summary | None


class Outcome(msgspec.Struct, frozen=True):
    """What was found of one unit.

    Attributes:
        number: Of the pair.
        pair: The verdict, if the unit is a whole pair.
        evidence: The figures, if it is some rows.
        drift: Sums of the difference of two precisions.
        counted: What counts.
        statistics: Where these were asked for.
    """

    number: int
    pair: Pair | None = None
    evidence: Evidence | None = None
    drift: DriftSums | None = None
    counted: Counted | None = None
    statistics: Statistics | None = None


class Failure(msgspec.Struct, frozen=True):
    """A `GlassError`, or what only a bug raises."""

    kind: str
    what: str
    got: str | None = None
    expected: str | None = None
    hint: str | None = None


class Answer(msgspec.Struct, frozen=True):
    """What was found of one chunk.

    Attributes:
        outcomes: Of its units, in their order.
        told: What was found of tensors that several ranks have parts of.
        found: Number of the unit that was asked for, of "trace"; rank, of "explain".
        hints: Of "explain".
        failure: What ended it.
    """

    outcomes: tuple[Outcome, ...] = ()
    told: tuple[Told, ...] = ()
    found: int | None = None
    hints: tuple[Hint, ...] = ()
    failure: Failure | None = None


class Asked(msgspec.Struct, frozen=True):
    """What a worker is sent."""

    request: Request
    chunk: Chunk


asked_to_bytes = msgspec.msgpack.Encoder().encode
asked_from_bytes = msgspec.msgpack.Decoder(Asked).decode
answer_to_bytes = msgspec.msgpack.Encoder().encode
answer_from_bytes = msgspec.msgpack.Decoder(Answer).decode


def failure_of(error: Exception) -> Failure:
    """Return an error as a value."""
    if isinstance(error, GlassError):
        return Failure(type(error).__name__, error.what, error.got, error.expected, error.hint)
    return Failure("", f"{type(error).__name__}: {error}")


def raised(failure: Failure) -> Exception:
    """Return the error that a value stands for."""
    kind = getattr(errors, failure.kind, None) if failure.kind else None
    if not isinstance(kind, type) or not issubclass(kind, GlassError):
        return RuntimeError(f"a worker has failed: {failure.what}")
    error = kind.__new__(kind)
    GlassError.__init__(error, failure.what, got=failure.got, expected=failure.expected, hint=failure.hint)
    return error


def with_statistics(pair: Pair, found: Statistics) -> Pair:
    """Return the pair with its statistics."""
    return dataclasses.replace(
        pair,
        baseline=found.baseline,
        candidate=found.candidate,
        abs_error=found.abs_error,
        rel_error=found.rel_error,
    )
