"""Every result that Glass Engine reports, as frozen dataclasses with `.to_dict()`.

A `Comparison` is what `glass compare` and `glass check` return, what `--json` prints and what a report draws. Its
keys are those of design section 7; `SCHEMA_VERSION` changes when a key changes its meaning.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_VERSION = 1

Verdict = Literal["identical", "rounding", "suspicious", "wrong"]
VERDICTS: tuple[Verdict, ...] = ("identical", "rounding", "suspicious", "wrong")
FLAGGED = VERDICTS[2:]


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst verdict of `verdicts`; `identical` when there is none."""
    return max(verdicts, key=VERDICTS.index, default="identical")


class Result:
    """Shared behaviour of result dataclasses."""

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict: non-finite floats become the strings "nan", "inf" and "-inf"."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    if isinstance(value, Result):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


@dataclass(frozen=True)
class Summary(Result):
    """Statistics of one tensor (row B8 of the compatibility table).

    `min`, `mean`, `median`, `max` and `std` ignore NaN and Inf and are None when nothing finite is left.
    """

    shape: tuple[int, ...]
    dtype: str
    num_elements: int
    min: float | None
    mean: float | None
    median: float | None
    max: float | None
    std: float | None
    num_nan: int
    num_inf: int


@dataclass(frozen=True)
class Figures(Result):
    """Difference of a candidate tensor to its baseline; all errors are candidate - baseline, in float64.

    Relative errors are |c - b| / |b| over elements with b != 0. `worst_index` is where |c - b| is largest. Elements
    that are NaN on both sides, or the same infinity on both, agree. `num_nonfinite_mismatch` counts elements that are
    finite on one side only or differ in the kind of non-finite value.
    """

    num_elements: int
    num_different: int
    max_abs_diff: float
    mean_abs_diff: float
    rms_diff: float
    max_rel_diff: float
    mean_rel_diff: float
    cosine_similarity: float
    snr_db: float
    worst_index: tuple[int, ...] | None
    baseline_at_worst: float | None
    candidate_at_worst: float | None
    num_nonfinite_mismatch: int
    num_beyond_tolerance: int
    rtol: float
    atol: float

    @property
    def allclose(self) -> bool:
        """Whether every element satisfies |c - b| <= atol + rtol * |b|."""
        return self.num_beyond_tolerance == 0


@dataclass(frozen=True)
class UlpDistance(Result):
    """How many representable values lie between candidate and baseline, over elements finite on both sides.

    `histogram[0]` counts the distance 0, `histogram[k]` distances from 2 ** (k - 1) to below 2 ** k. -0 and +0 are the
    same value. `worst_index` is the first element that far away, None when all agree; `max_ulp` is None when nothing
    was counted.
    """

    num_finite: int
    num_nonfinite_mismatch: int
    max_ulp: int | None
    worst_index: tuple[int, ...] | None
    histogram: tuple[int, ...]


@dataclass(frozen=True)
class ErrorHistogram(Result):
    """How large the errors |c - b| are: `counts[e]` of them are at least 2 ** e and below 2 ** (e + 1).

    `num_zero` counts elements that agree, `num_nonfinite_mismatch` those without a finite error.
    """

    num_zero: int
    num_nonfinite_mismatch: int
    counts: Mapping[int, int]


@dataclass(frozen=True)
class SliceMaxima(Result):
    """The largest |c - b| within every slice of one axis; `maxima[i]` is of the indices from `i * step`, `step` many.

    `step` is 1 but for very long axes. A mismatch of non-finite values counts as an infinite error.
    """

    axis: int
    size: int
    step: int
    maxima: tuple[float, ...]

    @property
    def worst_index(self) -> int | None:
        """The first index along the axis (of the first `step` many) with the largest error; None where none differs."""
        largest = max(self.maxima, default=0.0)
        return self.maxima.index(largest) * self.step if largest > 0 else None


@dataclass(frozen=True)
class PatternMismatches(Result):
    """Elements whose kind differs: sign of non-zero numbers, zero or not, mask sentinel or not (or of other sign).

    The indices are of the first such element, None where there is none.
    """

    num_elements: int
    num_sign: int
    num_zero: int
    num_sentinel: int
    sign_index: tuple[int, ...] | None
    zero_index: tuple[int, ...] | None
    sentinel_index: tuple[int, ...] | None


@dataclass(frozen=True)
class LogitsDifference(Result):
    """How much two sets of logits disagree, over rows of the last dimension; entropies and likelihoods are in nats.

    `kl` is KL(softmax(baseline) || softmax(candidate)). `top1_agreement` and `topk_agreement` are the share of the
    baseline's 1 and k likeliest tokens that are among the candidate's 1 and k likeliest (ties included). Rows without
    a distribution on some side (NaN, +inf, all -inf) are only counted, in `num_undefined`. The perplexities are those
    of the targets, None without targets; everything is None when no row is left.
    """

    num_rows: int
    num_undefined: int
    vocab_size: int
    k: int
    top1_agreement: float | None
    topk_agreement: float | None
    mean_kl: float | None
    max_kl: float | None
    worst_row: tuple[int, ...] | None
    num_targets: int
    baseline_perplexity: float | None
    candidate_perplexity: float | None

    @property
    def perplexity_diff(self) -> float | None:
        """Candidate minus baseline."""
        if self.baseline_perplexity is None or self.candidate_perplexity is None:
            return None
        return self.candidate_perplexity - self.baseline_perplexity


@dataclass(frozen=True)
class Pair(Result):
    """One tensor of the baseline judged against one of the candidate.

    `method` says how the two were paired ("name", "name+fingerprint", "alias", "map", "output", "consumer"; "content"
    by what they compute; "region" for an op that the candidate does not have, judged where the region it is in ends)
    and `judged_by` which guarantee the verdict has ("reverse replay", "segment", "noise floor", "given tolerance",
    "tolerance (uncalibrated)", "shape"). `rho` is the error over the noise floor, `beta` over the rounding bound.
    `case` names the batch of prompts of a check; `inherited` marks an error that was carried in by the inputs.
    """

    step: int
    site: str
    candidate_site: str
    method: str
    confidence: float
    verdict: Verdict
    judged_by: str
    figures: Figures | None = None
    rho: float | None = None
    beta: float | None = None
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
class Hint(Result):
    """A guess at the kind of mistake."""

    kind: str
    text: str
    score: float


@dataclass(frozen=True)
class Divergence(Result):
    """An op that introduced an error; `introduced` and `inherited` are RMS errors.

    `source` is "file:line: line" of the baseline, `candidate_source` that of the candidate where it has one of its own.
    """

    rung: str | None
    step: int
    site: str
    node: str | None
    candidate_site: str
    source: str | None
    verdict: Verdict
    rho: float | None
    beta: float | None
    introduced: float | None
    inherited: float | None
    hints: tuple[Hint, ...] = ()
    reproduction: str | None = None
    candidate_source: str | None = None


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
    """Weights of two sides by name: how many are on both, which of them differ by more than rounding, and the rest."""

    compared: int
    different: tuple[str, ...]
    only_baseline: tuple[str, ...]
    only_candidate: tuple[str, ...]


@dataclass(frozen=True)
class QuantizedWeight(Result):
    """What quantisation did to one weight, alone: everything else is the unquantised baseline's.

    Attributes:
        name: Of the parameter.
        verdict: "rounding" where its own step explains the difference; "wrong" is a mistake, `hints` say which.
        snr_db: Of the weight.
        rms_steps: Its difference in steps, root mean square; rounding to nearest makes 0.29.
        max_steps: The largest, ends of the range excepted.
        output_snr_db: Of the output of its module, on the baseline's inputs; None where that was not called.
        output_over_rounding: That error over the error that rounding to nearest would make there.
        logits_snr_db: Of the logits, or of the result of a model without.
        kl: Mean divergence of the next token, in nats; None for a model without logits.
        share: Of the errors (as powers) that all weights make at the logits one by one.
        is_rescaled: Whether it was scaled before it was quantised, and a layer before or after it by the inverse.
        hints: What kind of mistake it is.
    """

    name: str
    verdict: Verdict
    snr_db: float
    rms_steps: float
    max_steps: float | None
    output_snr_db: float | None
    output_over_rounding: float | None
    logits_snr_db: float
    kl: float | None
    share: float
    is_rescaled: bool
    hints: tuple[Hint, ...] = ()


@dataclass(frozen=True)
class Quantization(Result):
    """A quantised candidate beside its unquantised baseline: each weight, the largest share of the error first.

    `kl`, `logits_snr_db` and `token_agreement` are of all of it together, over `num_tokens` positions. `different` are
    weights that are not quantised and differ nevertheless.
    """

    method: str
    num_tokens: int
    logits_snr_db: float
    kl: float | None
    token_agreement: float | None
    weights: tuple[QuantizedWeight, ...]
    different: tuple[str, ...]


@dataclass(frozen=True)
class Comparison(Result):
    """The result of judging two sides.

    `ok` is decided by the rule of design section 6; `too_little` says that nothing was found wrong but too little was
    judged (exit status 4). `weights` is None where both sides have theirs from one place. `calibration` says what the
    verdicts on two records rest on: "uncalibrated", or what they were calibrated by; None where models were run.
    `quantization` is there for a
    quantised candidate. `same_weights` says of two records of one class and dtype whether they were made with the same
    weights; None where nobody knows.
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
