"""Every result that Glass Engine reports, as frozen dataclasses with `.to_dict()`.

A `Comparison` is what `glass compare` and `glass check` return, what `--json` prints and what a report draws. Its
keys are those of design section 7; `SCHEMA_VERSION` changes when a key changes its meaning.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_VERSION = 1

Verdict = Literal["identical", "rounding", "suspicious", "wrong"]
VERDICTS: tuple[Verdict, ...] = ("identical", "rounding", "suspicious", "wrong")


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
class Pair(Result):
    """One tensor of the baseline judged against one of the candidate.

    `method` says how the two were paired ("name", "name+fingerprint", "alias", "map"); `judged_by` which guarantee the
    verdict has ("noise floor", "tolerance (uncalibrated)"). `rho` is the error over the noise floor. `case` names
    the batch of prompts of a check; `inherited` marks an error that was carried in by the inputs.
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
    """An op that introduced an error; `source` is "file:line: line", `introduced` and `inherited` are RMS errors."""

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
class Comparison(Result):
    """The result of judging two sides.

    `ok` is decided by the rule of design section 6; `too_little` says that nothing was found wrong but too little was
    judged (exit status 4).
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
    schema_version: int = SCHEMA_VERSION
