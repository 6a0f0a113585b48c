"""What `glass compare` and `glass check` return, what `--json` prints and what a report draws.

`SCHEMA_VERSION` changes when a key changes its meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from glassengine.results.answer import CaseInputs, DriftRow, Fineness, ResultComparison, Standing
from glassengine.results.base import VERDICTS, Hint, Result, Verdict
from glassengine.results.exempt import Exemption
from glassengine.results.figures import Figures, Summary
from glassengine.results.quantized import Quantization

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Pair(Result):
    """One tensor of the baseline judged against one of the candidate.

    `method` says how the two were paired ("name", "name+fingerprint", "alias", "map", "output", "consumer"; "content"
    by what they compute; "region" for an op that the candidate does not have, judged where the region it is in ends)
    and `judged_by` which guarantee the verdict has ("reverse replay", "segment", "noise floor", "given tolerance",
    "tolerance (uncalibrated)", "shape"). `noise_ratio` is the error over the noise floor, `bound_ratio`
    that over the rounding bound. `case` names the batch of prompts of a check; `inherited` marks an error that was
    carried in by the inputs.
    """

    step: int
    site: str
    candidate_site: str
    method: str
    confidence: float
    verdict: Verdict
    judged_by: str
    figures: Figures | None = None
    noise_ratio: float | None = None
    bound_ratio: float | None = None
    rung: str | None = None
    case: str | None = None
    inherited: bool = False
    reason: str | None = None
    baseline: Summary | None = None
    candidate: Summary | None = None
    abs_error: Summary | None = None
    rel_error: Summary | None = None
    rank: int = 0


@dataclass(frozen=True)
class Skipped(Result):
    """A tensor that was not judged, and why. `side` is "baseline", "candidate" or "both"."""

    site: str
    side: str
    reason: str
    step: int | None = None
    rung: str | None = None


@dataclass(frozen=True)
class Divergence(Result):
    """An op that introduced an error; `introduced` and `inherited` are RMS errors.

    `source` is "file:line: line" of the baseline, `candidate_source` that of the candidate where it has one of its own.
    `group` is what sites at the same place of repeated layers have in common, where several of them went wrong:
    `also_at` are the others, of the first of them, and `num_alike` is how many such places there are.
    `rank` is the process that made it, of several; None where all did, or where there is one.
    """

    rung: str | None
    step: int
    site: str
    node: str | None
    candidate_site: str
    source: str | None
    verdict: Verdict
    noise_ratio: float | None
    bound_ratio: float | None
    introduced: float | None
    inherited: float | None
    hints: tuple[Hint, ...] = ()
    reproduction: str | None = None
    candidate_source: str | None = None
    group: str | None = None
    also_at: tuple[str, ...] = ()
    num_alike: int = 1
    rank: int | None = None

    @property
    def leads(self) -> bool:
        """Whether it stands for its group, or for itself alone."""
        return self.group is None or bool(self.also_at)

    @property
    def where(self) -> str | None:
        """In how many layers it is; None where it stands for itself alone."""
        if not self.also_at:
            return None
        number = len(self.also_at) + 1
        return f"in every layer ({number})" if number == self.num_alike else f"in {number} of {self.num_alike} layers"


@dataclass(frozen=True)
class Rung(Result):
    """One rung of the ladder: what was compared with what, and how it ended."""

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
    """An op of both sides whose literal arguments or kind differ, with its worst verdict: it may make no difference."""

    site: str
    candidate_site: str
    difference: str
    verdict: Verdict
    rung: str


@dataclass(frozen=True)
class WeightsComparison(Result):
    """Weights of two sides: how many are on both, which of them differ by more than rounding, and the rest.

    Of two programs these are the weights that ops read which are each other's counterparts, under the baseline's names;
    `how` then says in words how those that differ are related.
    """

    compared: int
    different: tuple[str, ...]
    only_baseline: tuple[str, ...]
    only_candidate: tuple[str, ...]
    how: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison(Result):
    """The result of judging two sides.

    `ok` is decided by the rule of `docs/concepts.md`; `standing` says in one typed word why it is so or not, and
    `too_little` that nothing was found wrong but too little was judged (exit status 4). `results` are those of both
    sides end to end, on each rung. `fineness` says of each rung how finely the inside was judged, that of the rung
    that the verdict rests on first. `inputs` is what all sides ran on. `drift` is the table of a less precise
    candidate in order of execution, results last. `exemptions` are the elements that did not count, by reason, of
    `num_elements` that the two sides have in common on the rung that was judged finest; `notes` are sentences about the
    candidate as a whole. `generates` says that step 0 is a prefill, and the others decode.

    `weights` is None where both sides have theirs from one place. `calibration` says what the verdicts on two records
    rest on: "uncalibrated", or what they were calibrated by; None where models were run. `quantization` is there for a
    quantized candidate. `same_weights` says of two records of one class and dtype whether they were made with the same
    weights; None where that is unknown.
    """

    baseline: str
    candidate: str
    ok: bool
    verdict: Verdict
    first_divergence: Divergence | None
    origins: tuple[Divergence, ...]
    counts: Mapping[str, int]
    pairs: tuple[Pair, ...]
    skipped: tuple[Skipped, ...]
    environment: Mapping[str, Any]
    coverage: float
    rungs: tuple[Rung, ...] = ()
    severity: Mapping[str, Any] = field(default_factory=dict)
    not_ok_because: str | None = None
    too_little: bool = False
    calibration: str | None = None
    same_weights: bool | None = None
    weights: WeightsComparison | None = None
    written_differently: tuple[WrittenDifferently, ...] = ()
    quantization: Quantization | None = None
    standing: Standing = "ok"
    results: tuple[ResultComparison, ...] = ()
    fineness: tuple[Fineness, ...] = ()
    inputs: tuple[CaseInputs, ...] = ()
    drift: tuple[DriftRow, ...] = ()
    exemptions: tuple[Exemption, ...] = ()
    num_elements: int = 0
    notes: tuple[str, ...] = ()
    generates: bool = False
    schema_version: int = SCHEMA_VERSION


def counts_of(
    pairs: Sequence[Pair], *, unmatched_baseline: int, unmatched_candidate: int, not_recorded: int
) -> dict[str, int]:
    """Return the counts that every comparison has: of `pairs` by verdict, and of what could not be paired."""
    return {
        "compared": len(pairs),
        **{name: sum(pair.verdict == name for pair in pairs) for name in VERDICTS},
        "inherited": sum(pair.inherited for pair in pairs),
        "unmatched_baseline": unmatched_baseline,
        "unmatched_candidate": unmatched_candidate,
        "not_recorded": not_recorded,
    }


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
