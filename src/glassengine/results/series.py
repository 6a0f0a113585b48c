"""The comparison of the series of two watched runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from glassengine.results.base import Result
from glassengine.results.comparison import SCHEMA_VERSION

SeriesStanding = Literal["same", "within the variation", "apart", "uncalibrated"]


@dataclass(frozen=True)
class SeriesPoint:
    """A step and a series in which two runs differ.

    Attributes:
        step: The step.
        site: The series: a site, or the name of a number.
        baseline: Its value there; None where it is not finite.
        candidate: Likewise.
        difference: Between the two: of logarithms for norms, of values for numbers; None where one is not finite.
        variation: What the difference is held against: the largest change of the baseline from one step to the next in
            the 32 steps before, or the largest difference in the first 16 steps, whichever is larger.
    """

    step: int
    site: str
    baseline: float | None
    candidate: float | None
    difference: float | None
    variation: float | None


@dataclass(frozen=True)
class SeriesComparison(Result):
    """What the series of two watched runs say of each other. They are norms, so equal series do not prove equal values.

    Attributes:
        baseline: Where it is.
        candidate: Likewise.
        ok: Whether no series parts from the other run's.
        standing: "same": no number differs; "within the variation"; "apart"; "uncalibrated": too few steps to know the
            variation, and numbers differ.
        num_steps: Steps that both have.
        num_series: Series that both have.
        first_difference: The first number that differs by more than a millionth.
        first_parting: The first number beyond the variation, and in the steps after it as well.
        partings: The first one of each series, in order of steps, at most 100.
        num_apart: Series that part.
        num_uncalibrated: Series with too few steps to know their variation.
        only_one: Series, and numbers of steps, that only one side has.
        notes: Sentences about the comparison as a whole.
    """

    baseline: str
    candidate: str
    ok: bool
    standing: SeriesStanding
    num_steps: int
    num_series: int
    first_difference: SeriesPoint | None
    first_parting: SeriesPoint | None
    partings: tuple[SeriesPoint, ...]
    num_apart: int
    num_uncalibrated: int
    only_one: tuple[str, ...]
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION
