"""Every result that Glass Engine reports, as frozen dataclasses with `.to_dict()`."""

from __future__ import annotations

from glassengine.results.answer import (
    MOST_OPS,
    CaseInputs,
    DriftRow,
    Fineness,
    ResultComparison,
    Standing,
)
from glassengine.results.artifacts import (
    ArtifactComparison,
    StageComparison,
)
from glassengine.results.base import (
    FLAGGED,
    VERDICTS,
    Result,
    Verdict,
    worst,
)
from glassengine.results.comparison import (
    SCHEMA_VERSION,
    Comparison,
    Comparisons,
    Divergence,
    Rung,
    Skipped,
    WeightsComparison,
    WrittenDifferently,
)
from glassengine.results.compilation import (
    CachedGraph,
    CacheReport,
    Cause,
    Compilation,
)
from glassengine.results.engines import (
    EngineColumn,
    Forward,
    Generation,
    SideBySide,
    StepDifference,
    TokenDifference,
)
from glassengine.results.exempt import (
    Exemption,
    ExemptionReason,
)
from glassengine.results.failure import (
    Failure,
    Message,
    failure,
)
from glassengine.results.figures import (
    ElementDifference,
    ErrorHistogram,
    Figures,
    LogitsDifference,
    PatternMismatches,
    SliceMaxima,
    Summary,
    TensorValues,
    UlpDistance,
)
from glassengine.results.findings import (
    Decision,
    Findings,
    Policy,
    decide,
    over_budget,
)
from glassengine.results.hints import (
    KINDS,
    TRIED,
    Altered,
    Hint,
    Kind,
)
from glassengine.results.inputs_used import (
    InputUsed,
)
from glassengine.results.interrupted import (
    Interrupted,
)
from glassengine.results.metrics import (
    MetricsReport,
    MetricSummary,
)
from glassengine.results.pairs import (
    Counts,
    Packed,
    Pair,
    TokenAgreement,
    added,
    counts_of,
    tally_of,
)
from glassengine.results.quantized import (
    Quantization,
    QuantizedWeight,
)
from glassengine.results.recorded import (
    ListedSnapshot,
    RecordedScript,
    RecordedTarget,
)
from glassengine.results.replay import (
    Bisection,
    MinimalOp,
    Replayed,
    ReplayedOutput,
)
from glassengine.results.report import (
    ReportPage,
    WrittenReport,
)
from glassengine.results.series import (
    SeriesComparison,
    SeriesPoint,
    SeriesStanding,
)

__all__ = [
    "FLAGGED",
    "KINDS",
    "MOST_OPS",
    "SCHEMA_VERSION",
    "TRIED",
    "VERDICTS",
    "Altered",
    "ArtifactComparison",
    "Bisection",
    "CacheReport",
    "CachedGraph",
    "CaseInputs",
    "Cause",
    "Comparison",
    "Comparisons",
    "Compilation",
    "Counts",
    "Decision",
    "Divergence",
    "DriftRow",
    "ElementDifference",
    "EngineColumn",
    "ErrorHistogram",
    "Exemption",
    "ExemptionReason",
    "Failure",
    "Figures",
    "Findings",
    "Fineness",
    "Forward",
    "Generation",
    "Hint",
    "InputUsed",
    "Interrupted",
    "Kind",
    "ListedSnapshot",
    "LogitsDifference",
    "Message",
    "MetricSummary",
    "MetricsReport",
    "MinimalOp",
    "Packed",
    "Pair",
    "PatternMismatches",
    "Policy",
    "Quantization",
    "QuantizedWeight",
    "RecordedScript",
    "RecordedTarget",
    "Replayed",
    "ReplayedOutput",
    "ReportPage",
    "Result",
    "ResultComparison",
    "Rung",
    "SeriesComparison",
    "SeriesPoint",
    "SeriesStanding",
    "SideBySide",
    "Skipped",
    "SliceMaxima",
    "StageComparison",
    "Standing",
    "StepDifference",
    "Summary",
    "TensorValues",
    "TokenAgreement",
    "TokenDifference",
    "UlpDistance",
    "Verdict",
    "WeightsComparison",
    "WrittenDifferently",
    "WrittenReport",
    "added",
    "counts_of",
    "decide",
    "failure",
    "over_budget",
    "tally_of",
    "worst",
]
