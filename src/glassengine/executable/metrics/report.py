"""A report of metrics: its numbers, its text, and several of them merged.

The text has the grammar of PyTorch/XLA. Two things are better. A duration is cut to whole nanoseconds from the front,
never rounded in its parts, so that larger durations never print as smaller ones. And a rate is given only over a window
of at least `MIN_WINDOW_NS` that begins before the first sample that it counts: where times are summed the window
includes the first of them, and where values are, the first one only begins the window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from glassengine.errors import UsageError
from glassengine.results.metrics import (
    MetricsReport,
    MetricSummary,
    Samples,
    Unit,
)

PERCENTILES = (1, 5, 10, 20, 50, 80, 90, 95, 99)
MIN_WINDOW_NS = 100_000_000


def summarize(name: str, unit: Unit, total_samples: int, accumulator: float, samples: Samples) -> MetricSummary:
    """Return the summary of a metric with totals and latest samples, oldest first."""
    value_rate = rate = None
    if len(samples) > 1:
        start, counted = samples[0][0], samples[1:]
        if unit == "ns":  # a duration is taken down when it ends
            start, counted = int(start - samples[0][1]), samples
        window = samples[-1][0] - start
        if window >= MIN_WINDOW_NS:
            value_rate = sum(value for _, value in counted) * 1e9 / window
            rate = len(counted) * 1e9 / window
    return MetricSummary(
        name, unit, total_samples, accumulator, value_rate, rate, _percentiles(samples), samples=samples
    )


def merge_metrics(reports: Sequence[MetricsReport]) -> MetricsReport:
    """Return one report of several processes.

    Totals, counters and rates are added, and percentiles are those of all latest samples together.

    Raises:
        UsageError: There is none, two are of one rank, or one was read from text, which holds no samples.
    """
    ranks = [rank for report in reports for rank in report.ranks]
    if not reports or len(set(ranks)) < len(ranks):
        raise UsageError(
            "metrics to merge must be of different ranks", got=f"ranks {sorted(ranks)}" if ranks else "no report"
        )
    counters: Counter[str] = Counter()
    groups: dict[str, list[MetricSummary]] = {}
    for report in reports:
        counters.update(report.counters)
        for metric in report.metrics:
            groups.setdefault(metric.name, []).append(metric)
    merged = tuple(_merge(group) for _, group in sorted(groups.items()))
    return MetricsReport(merged, dict(sorted(counters.items())), tuple(sorted(ranks)))


def _merge(group: Sequence[MetricSummary]) -> MetricSummary:
    first = group[0]
    for metric in group:
        if not metric.samples or metric.unit != first.unit:
            raise UsageError(
                f"metric {metric.name!r} cannot be merged",
                got=f"no samples, as in a report read from text, or another unit than {first.unit!r}",
                hint="merge the JSON forms: json.dumps(glass.metrics.current().to_dict())",
            )
    samples = tuple(sorted(sample for metric in group for sample in metric.samples))
    rates = [metric.rate for metric in group if metric.rate is not None]
    value_rates = [metric.value_rate for metric in group if metric.value_rate is not None]
    return MetricSummary(
        first.name,
        first.unit,
        sum(metric.total_samples for metric in group),
        sum(metric.accumulator for metric in group),
        sum(value_rates) if value_rates else None,
        sum(rates) if rates else None,
        _percentiles(samples),
        samples=samples,
    )


def _percentiles(samples: Samples) -> dict[int, float]:
    values = sorted(value for _, value in samples)
    return {percent: values[percent * len(values) // 100] for percent in PERCENTILES} if values else {}
