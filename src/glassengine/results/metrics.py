"""A report of metrics: its numbers, its text, and its JSON read again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from glassengine.errors import CorruptError
from glassengine.reading.documents import converted, refuse_newer
from glassengine.results.base import Result

SCHEMA_VERSION = 1
_LARGEST = 1e300
_WHAT = "a report of metrics"

Unit = Literal["ns", "bytes", "count"]


Samples = tuple[tuple[int, float], ...]


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
        known = ("Mean", self.mean, ""), ("StdDev", self.std_dev, ""), ("ValueRate", self.value_rate, " / second")
        lines += [f"  {name}: {spell(value)}{unit}" for name, value, unit in known if value is not None]
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
        refuse_newer(data.get("schema_version"), SCHEMA_VERSION, "the report", _WHAT)
        report = converted(data, MetricsReport, "the report", what=_WHAT, words=True)
        for one in report.metrics:
            totals = [one.total_samples, one.accumulator, one.value_rate, one.rate, one.mean, one.std_dev]
            numbers = [*totals, *one.percentiles.values(), *(value for _, value in one.samples)]
            if not all(abs(value) < _LARGEST for value in numbers if value is not None):
                raise CorruptError(f"{_WHAT} is damaged", got=f"{one.name}: a number that is not finite")
        return report


def number_from(value: object) -> float:
    """Return a number that a file holds.

    Raises:
        ValueError: It is none, or no finite one.
    """
    if not isinstance(value, int | float) or not abs(value) < _LARGEST:
        raise ValueError(f"{str(value)[:80]!r} is not a number")
    return value


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
