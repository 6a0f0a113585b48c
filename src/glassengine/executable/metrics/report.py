"""A report of metrics: its numbers, its text, and several of them merged.

The text has the grammar of PyTorch/XLA. Two things are better. A duration is cut to whole nanoseconds from the front,
never rounded in its parts, so that larger durations never print as smaller ones. And a rate is given only over a window
of at least `MIN_WINDOW_NS` that begins before the first sample that it counts: where times are summed the window
includes the first of them, and where values are, the first one only begins the window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from glassengine.errors import CorruptError, UsageError
from glassengine.results import Result

SCHEMA_VERSION = 1

Unit = Literal["ns", "bytes", "count"]
Samples = tuple[tuple[int, float], ...]

PERCENTILES = (1, 5, 10, 20, 50, 80, 90, 95, 99)
MIN_WINDOW_NS = 100_000_000


@dataclass(frozen=True)
class MetricSummary(Result):
    """One metric of a report.

    Attributes:
        name: E.g. "ExecuteTime".
        unit: Of the values: "ns", "bytes" or "count".
        total_samples: All samples there ever were.
        accumulator: Their sum.
        value_rate: Sum of the latest samples per second; None where the window is too short to say.
        rate: Number of the latest samples per second; None likewise.
        percentiles: Percent -> value, of the latest samples.
        mean: Of all samples; only old reports of PyTorch/XLA state it.
        std_dev: Likewise.
        samples: The latest samples, each (time in ns since the epoch, value), oldest first; empty where the report was
            read from text.
    """

    name: str
    unit: Unit
    total_samples: int
    accumulator: float
    value_rate: float | None
    rate: float | None
    percentiles: dict[int, float]
    mean: float | None = None
    std_dev: float | None = None
    samples: Samples = ()

    def __str__(self) -> str:
        def spell(value: float) -> str:
            return format_value(value, self.unit)

        lines = [f"Metric: {self.name}", f"  TotalSamples: {self.total_samples}"]
        lines.append(f"  Accumulator: {spell(self.accumulator)}")
        if self.mean is not None:
            lines.append(f"  Mean: {spell(self.mean)}")
        if self.std_dev is not None:
            lines.append(f"  StdDev: {spell(self.std_dev)}")
        if self.value_rate is not None:
            lines.append(f"  ValueRate: {spell(self.value_rate)} / second")
        if self.rate is not None:
            lines.append(f"  Rate: {self.rate:.6g} / second")
        if self.percentiles:
            lines.append(f"  Percentiles: {'; '.join(f'{p}%={spell(v)}' for p, v in self.percentiles.items())}")
        return "\n".join(lines)


@dataclass(frozen=True)
class MetricsReport(Result):
    """Counters and metrics of one process, or of several.

    Attributes:
        metrics: By name.
        counters: Name -> value, by name; none is zero.
        ranks: Which processes of a distributed run it covers.
    """

    metrics: tuple[MetricSummary, ...]
    counters: dict[str, int] = field(default_factory=dict)
    ranks: tuple[int, ...] = (0,)
    schema_version: int = SCHEMA_VERSION

    def metric(self, name: str) -> MetricSummary | None:
        """Return one metric, None where nothing was measured."""
        return next((metric for metric in self.metrics if metric.name == name), None)

    def __str__(self) -> str:
        blocks = [str(metric) for metric in self.metrics]
        blocks += [f"Counter: {name}\n  Value: {value}" for name, value in self.counters.items()]
        return "".join(f"{block}\n" for block in blocks)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> MetricsReport:
        """Inverse of `to_dict`.

        Raises:
            CorruptError: The data are of a newer schema, or not a report.
        """
        try:
            if data["schema_version"] > SCHEMA_VERSION:
                raise CorruptError(
                    "the metrics were written by a newer version",
                    got=f"schema {data['schema_version']}",
                    expected=f"at most {SCHEMA_VERSION}",
                    hint="upgrade glassengine",
                )
            metrics = tuple(_metric_from_dict(entry) for entry in data["metrics"])
            counters = {str(name): int(value) for name, value in data["counters"].items()}
            return MetricsReport(metrics, counters, tuple(int(rank) for rank in data["ranks"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError("not a metrics report", got=f"{type(error).__name__}: {error}") from error


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


def format_value(value: float, unit: Unit) -> str:
    """Return a value as reports spell it: "01s023ms004.567us", "1.50KB", "17.00"."""
    if unit == "ns":
        return _format_time(int(value))
    if unit == "bytes":
        suffixes = ["B", "KB", "MB", "GB", "TB", "PB"]
        while value >= 1024 and len(suffixes) > 1:
            value /= 1024
            suffixes.pop(0)
        return f"{value:.2f}{suffixes[0]}"
    return f"{value:.2f}"


TIME_PARTS = (("d", 86_400_000_000_000), ("h", 3_600_000_000_000), ("m", 60_000_000_000), ("s", 1_000_000_000))
"""Parts of a duration above the millisecond, in ns; two digits each."""


def _format_time(ns: int) -> str:
    text = ""
    for suffix, size in TIME_PARTS:
        if text or ns >= size:
            text += f"{ns // size:02d}{suffix}"
            ns %= size
    if text or ns >= 1_000_000:
        text += f"{ns // 1_000_000:03d}ms"
        ns %= 1_000_000
    return f"{text}{ns // 1000:03d}.{ns % 1000:03d}us"


def _percentiles(samples: Samples) -> dict[int, float]:
    values = sorted(value for _, value in samples)
    return {percent: values[percent * len(values) // 100] for percent in PERCENTILES} if values else {}


def _metric_from_dict(entry: Mapping[str, Any]) -> MetricSummary:
    if entry["unit"] not in ("ns", "bytes", "count"):
        raise ValueError(f"unit {entry['unit']!r}")
    percentiles = {int(percent): value for percent, value in entry["percentiles"].items()}
    samples = tuple((int(when), value) for when, value in entry["samples"])
    return MetricSummary(**{**entry, "percentiles": percentiles, "samples": samples})
