"""The result of `glass compare` and `glass check`: `--json` prints it, and a report draws it.

`SCHEMA_VERSION` changes when a key changes its meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from glassengine.results import notebook
from glassengine.results.answer import CaseInputs, DriftRow, Exemption, Granularity, ResultComparison, Standing
from glassengine.results.base import Result, Verdict
from glassengine.results.hints import Hint, Quantization
from glassengine.results.pairs import Counts, Pair, TokenAgreement
from glassengine.results.without_tensors import PromptComparison, RolloutComparison

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Skipped(Result):
    """A tensor that was not judged, and why.

    Attributes:
        site: Its name, or a pattern for several.
        side: "baseline", "candidate" or "both".
        reason: Why, in words.
        step: Of the tensor; None where all steps are meant.
        level: Which implementation, of several.
    """

    site: str
    side: str
    reason: str
    step: int | None = None
    level: str | None = None


@dataclass(frozen=True)
class Divergence(Result):
    """An op that made an error.

    Attributes:
        level: Which implementation; None where there is one.
        step: In which it first did.
        site: Of the baseline.
        node: Of the baseline's graph; None for records.
        candidate_site: Of the candidate.
        source: "file:line: line" of the baseline.
        verdict: The worst of the chain of tensors that it leads to.
        noise_ratio: Error over the noise floor, in the worst slice.
        bound_ratio: Error over the rounding bound, of the worst element.
        introduced: RMS of the error that the op made.
        inherited: RMS of the error that its inputs carried in.
        hints: Which kind of mistake it is, tried.
        reproduction: Directory of a test that shows it without the models.
        candidate_source: "file:line: line" of the candidate, where it has one of its own.
        group: What sites at the same place of repeated layers have in common, where several of them went wrong.
        also_at: The others of the group, of the first of them.
        num_alike: How many such places there are.
        rank: Process that made it, of several; None where all did, or where there is one.
        num_untried: Families of mistakes that were not tried, since what one divergence may cost was spent.
    """

    level: str | None
    step: int
    site: str
    node: str | None
    candidate_site: str
    source: str | None
    verdict: Verdict
    noise_ratio: float | None = None
    bound_ratio: float | None = None
    introduced: float | None = None
    inherited: float | None = None
    hints: tuple[Hint, ...] = ()
    reproduction: str | None = None
    candidate_source: str | None = None
    group: str | None = None
    also_at: tuple[str, ...] = ()
    num_alike: int = 1
    rank: int | None = None
    num_untried: int = 0

    @classmethod
    def without_run(
        cls,
        site: str,
        verdict: Verdict,
        hints: tuple[Hint, ...],
        *,
        level: str,
        noise_ratio: float | None = None,
        candidate_site: str | None = None,
    ) -> Divergence:
        """Return the origin of an error that belongs to no op: a weight, or a result as a whole.

        Args:
            site: Of the baseline.
            verdict: On it.
            hints: Which kind of mistake it is.
            level: Which implementation.
            noise_ratio: Error over the noise floor, or in steps of a grid.
            candidate_site: Of the candidate; None for the baseline's.
        """
        return cls(level, 0, site, None, candidate_site or site, None, verdict, noise_ratio, hints=hints)

    @property
    def noun(self) -> str:
        """What its site is: an op of a graph, or a tensor of a record."""
        return "tensor" if self.node is None else "op"

    @property
    def leads(self) -> bool:
        """Whether it stands for its group, or for itself alone."""
        return self.group is None or bool(self.also_at)

    @property
    def where(self) -> str | None:
        """In how many layers, or places of one module, it is; None where it stands for itself alone."""
        if not self.also_at:
            return None
        number, modules = len(self.also_at) + 1, {site.rpartition("/")[0] for site in (self.site, *self.also_at)}
        unit = "place" if len(modules) == 1 else "layer"
        return f"in every {unit} ({number})" if number == self.num_alike else f"in {number} of {self.num_alike} {unit}s"

    @property
    def name_of_all(self) -> str:
        """What the names of its group have in common, without the line."""
        return (self.group or self.site).partition(" in ")[0]


@dataclass(frozen=True)
class LevelResult(Result):
    """One level of the ladder: what was compared with what, and how it ended.

    Attributes:
        name: "program", "engine", "release", "candidate", ...
        baseline: What it was compared with.
        candidate: What ran.
        verdict: The worst of its tensors.
        guarantee: How finely it was judged: "judged op by op", "judged by segments", ...
        num_judged: How many tensors.
        coverage: Share of the float-valued sites that were judged finely enough.
        first_divergence: The first op in order of execution that introduced an error.
        note: A sentence about it.
    """

    name: str
    baseline: str
    candidate: str
    verdict: Verdict
    guarantee: str
    num_judged: int
    coverage: float | None = None
    first_divergence: Divergence | None = None
    note: str | None = None


@dataclass(frozen=True)
class WrittenDifferently(Result):
    """An op of both sides whose literal arguments or kind differ; it may make no difference.

    Attributes:
        site: Of the baseline.
        candidate_site: Of the candidate.
        difference: What differs, in words.
        verdict: The worst of its tensors.
        level: Which implementation.
    """

    site: str
    candidate_site: str
    difference: str
    verdict: Verdict
    level: str


@dataclass(frozen=True)
class WeightsComparison(Result):
    """Weights of two sides.

    Attributes:
        compared: How many are on both; of two programs those that ops read which are each other's counterparts.
        different: Names, the baseline's, of those that differ by more than rounding.
        only_baseline: Names of those that only the baseline has.
        only_candidate: Names of those that only the candidate has.
        how: How those that differ are related, in words.
    """

    compared: int
    different: tuple[str, ...]
    only_baseline: tuple[str, ...]
    only_candidate: tuple[str, ...]
    how: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison(Result):
    """The result of judging two sides.

    Attributes:
        baseline: What it is, as it was given.
        candidate: Likewise.
        ok: By the rule of `docs/concepts.md`.
        verdict: The worst of all tensors and results.
        first_divergence: The first op in order of execution that introduced an error; None where none did.
        origins: All of them.
        counts: Of tensors: how many were compared, and why others were not.
        pairs: Every tensor that was judged.
        skipped: Every tensor that was not.
        environment: Of both sides: versions, processor, flags.
        coverage: Share of the baseline's float-valued sites that were judged finely enough.
        levels: Of a check, one per implementation.
        severity: Of a check, level -> agreement of tokens and KL divergence of the logits; decides nothing by itself.
        not_ok_because: Why not, in one sentence.
        other_reasons: Parts of it beside `results` and `first_divergence`.
        too_little: Whether nothing was found wrong, but too little was judged (exit status 4).
        calibration: What verdicts on two records rest on: "uncalibrated", or what they were calibrated by; None where
            models were run.
        same_weights: Whether two records of one class and dtype were made with the same weights; None where unknown.
        weights: Those of both sides; None where they are from one place.
        written_differently: Ops that both sides have and write otherwise.
        quantization: Of a quantized candidate.
        standing: Why it is ok or not, as one of eight words.
        results: Those of both sides end to end, on each level.
        granularity: How finely the inside was judged, the level first that the verdict rests on.
        inputs: What all sides ran on.
        drift: Of a less precise candidate, tensors in order of execution, results last.
        exemptions: Elements that did not count, by reason.
        num_elements: How many the two sides have in common, on the level that was judged finest.
        notes: Sentences about the candidate as a whole.
        generates: Whether step 0 is a prefill, and the others decode.
        reads: Of a check, site -> sites whose tensors its op reads.
        prompt: Tokens, templates and settings of both sides; None where a side has none, or they were not compared.
        rollout: Of `check-rollout`: the gap of the log-probabilities and its causes; None of other commands.
        schema_version: Changes when a key changes its meaning.
    """

    baseline: str
    candidate: str
    ok: bool
    verdict: Verdict
    first_divergence: Divergence | None
    origins: tuple[Divergence, ...]
    counts: Counts
    pairs: Sequence[Pair]
    skipped: tuple[Skipped, ...]
    environment: Mapping[str, Any]
    coverage: float
    levels: tuple[LevelResult, ...] = ()
    severity: Mapping[str, TokenAgreement] = field(default_factory=dict)
    not_ok_because: str | None = None
    other_reasons: tuple[str, ...] = ()
    too_little: bool = False
    calibration: str | None = None
    same_weights: bool | None = None
    weights: WeightsComparison | None = None
    written_differently: tuple[WrittenDifferently, ...] = ()
    quantization: Quantization | None = None
    standing: Standing = "ok"
    results: tuple[ResultComparison, ...] = ()
    granularity: tuple[Granularity, ...] = ()
    inputs: tuple[CaseInputs, ...] = ()
    drift: tuple[DriftRow, ...] = ()
    exemptions: tuple[Exemption, ...] = ()
    num_elements: int = 0
    notes: tuple[str, ...] = ()
    generates: bool = False
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    prompt: PromptComparison | None = None
    rollout: RolloutComparison | None = None
    schema_version: int = SCHEMA_VERSION

    def __repr__(self) -> str:
        """Return one line: whether it is ok, and why not."""
        why = self.verdict if self.ok else f"{self.not_ok_because or self.standing}"
        sides = f"{self.baseline} (baseline), {self.candidate} (candidate)"
        return f"<Comparison {'ok' if self.ok else 'NOT OK'}: {why}; {sides}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return notebook.comparison_card(self)

    def to_pandas(self) -> Any:
        """Return a data frame with a row for each tensor that was judged.

        Raises:
            UsageError: pandas is not installed (extra `notebook`).
        """
        return notebook.pairs_frame(self.pairs)

    def plot(self, ax: Any = None) -> Any:
        """Draw the error of each tensor in order of execution, by verdict, with the noise floor; returns the axes.

        Args:
            ax: Axes of matplotlib; None makes new ones.

        Raises:
            UsageError: matplotlib is not installed (extra `notebook`), or nothing was measured.
        """
        return notebook.plot_pairs(self.pairs, ax)


@dataclass(frozen=True)
class Comparisons(Result):
    """The comparisons of several candidates with one baseline.

    Attributes:
        baseline: Where it is.
        ok: Whether all of them are.
        verdict: The worst of all.
        comparisons: One per candidate, in the order given.
        too_little: Whether what is not ok is so only because too little was judged (exit status 4).
    """

    baseline: str
    ok: bool
    verdict: Verdict
    comparisons: tuple[Comparison, ...]
    too_little: bool
    schema_version: int = SCHEMA_VERSION


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
