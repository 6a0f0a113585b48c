"""Counters and metrics of this process, and their reports: summarized, merged, and read from JSON or text.

A metric keeps all-time totals and its latest samples; percentiles and rates are of the samples. Names are those of
PyTorch/XLA: CompileTime, ExecuteTime, TensorsGraphSize, CachedCompile, ... ExecuteTime is the wall time of a run that
ended with its devices idle; without waiting for an accelerator the time until control returns is DispatchTime.

The text has the grammar of PyTorch/XLA. Two things are better. A duration is cut to whole nanoseconds from the front,
never rounded in its parts, so that larger durations never print as smaller ones. And a rate is given only over a window
of at least `MIN_WINDOW_NS` that begins before the first sample that it counts: where times are summed the window
includes the first of them, and where values are, the first one only begins the window.

PyTorch/XLA rounds each part of a duration while it subtracts the part rounded down: it prints 8.97 s as
"09s969ms486.408us". This cannot always be undone, so durations of its reports are read as they are printed. Old reports
say "Server" where new ones say "Device"; they are read under the new names.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from glassengine import environment
from glassengine.errors import CorruptError, UsageError
from glassengine.reading.documents import parsed
from glassengine.reading.files import read_text
from glassengine.results.metrics import TIME_PARTS, MetricsReport, MetricSummary, Samples, Unit, number_from
from glassengine.stores.places import place

PERCENTILES = (1, 5, 10, 20, 50, 80, 90, 95, 99)
MIN_WINDOW_NS = 100_000_000
MAX_BYTES = 64 << 20
"""A report is a few kilobytes; JSON with all samples of many metrics is a few megabytes."""
_NEW_NAMES = {
    "TransferToServerTime": "TransferToDeviceTime",
    "TransferFromServerTime": "TransferFromDeviceTime",
    "TransferToServerTransformTime": "TransferToDeviceTransformTime",
}
_HEAD = re.compile(r"\s*(Metric|Counter): (\S.*?)\s*$")
_FIELD = re.compile(r"\s*(TotalSamples|Accumulator|Mean|StdDev|ValueRate|Rate|Percentiles|Value): (.*?)\s*$")
_TIME = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+)s)?(?:(\d+)ms)?(\d+(?:\.\d+)?)us")
_BYTES = re.compile(r"(-?\d+(?:\.\d+)?)(B|KB|MB|GB|TB|PB)")


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


def read_metrics(source: str | Path) -> MetricsReport:
    """Read a report.

    Args:
        source: A file, or lines of text: what `metrics_report()` or `torch_xla.debug.metrics.metrics_report()` gave, a
            log that contains one of them, or JSON: `metrics().to_dict()` or what a command printed with
            `--json --metrics`.

    Raises:
        UsageError: There is no such file.
        CorruptError: It holds no report, or a damaged one.
    """
    if isinstance(source, str) and ("\n" in source or source.lstrip().startswith("{")):
        return _read(source, "the report")
    file = place(source)
    if not file.is_file():
        raise UsageError("unknown file of metrics", got=str(source))
    return _read(read_text(file, most=MAX_BYTES, errors="replace"), file.name)


def _read(text: str, name: str) -> MetricsReport:
    if not text.lstrip().startswith("{"):
        return parse_metrics(text)
    data = parsed(text, dict[str, Any], name, what="the report", nonfinite=True)
    inner = data.get("metrics")
    return MetricsReport.from_dict(inner if isinstance(inner, dict) else data)


def parse_metrics(text: str) -> MetricsReport:
    """Return the report in `text`; lines around its blocks are left out, so that a whole log may be given.

    Raises:
        CorruptError: There is no block in it, or a value within one cannot be read.
    """
    metrics: dict[str, dict[str, str]] = {}
    counters: dict[str, dict[str, str]] = {}
    block: dict[str, str] | None = None
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name = _NEW_NAMES.get(head[2], head[2])
            # A log may hold several reports; the last one counts.
            block = (metrics if head[1] == "Metric" else counters)[name] = {}
        elif block is not None and (field := _FIELD.match(line)):
            block[field[1]] = field[2]
        else:
            block = None
    if not metrics and not counters:
        raise CorruptError("not a metrics report", expected='lines like "Metric: CompileTime" or "Counter: MarkStep"')
    try:
        summaries = tuple(_metric(name, fields) for name, fields in sorted(metrics.items()))
        values = {name: int(fields["Value"]) for name, fields in sorted(counters.items())}
    except (KeyError, ValueError) as error:
        raise CorruptError("a block of the report is damaged", got=f"{type(error).__name__}: {error}") from error
    return MetricsReport(summaries, values)


def _metric(name: str, fields: dict[str, str]) -> MetricSummary:
    try:
        accumulator, unit = _value(fields["Accumulator"])

        def optional(key: str) -> float | None:
            return _value(fields[key].removesuffix(" / second"))[0] if key in fields else None

        percentiles = {}
        for part in fields["Percentiles"].split("; ") if fields.get("Percentiles") else ():
            percent, _, value = part.partition("%=")
            percentiles[int(percent)] = _value(value)[0]
        rate = float(fields["Rate"].removesuffix(" / second")) if "Rate" in fields else None
        total = int(fields["TotalSamples"])
        mean, std_dev = optional("Mean"), optional("StdDev")
        return MetricSummary(name, unit, total, accumulator, optional("ValueRate"), rate, percentiles, mean, std_dev)
    except (KeyError, ValueError) as error:
        raise ValueError(f"metric {name}: {error}") from error


def _value(text: str) -> tuple[float, Unit]:
    """Inverse of `metrics_report.format_value`; times in whole nanoseconds."""
    if found := _TIME.fullmatch(text):
        *parts, ms, us = found.groups()
        sizes = [size for _, size in TIME_PARTS]
        whole = sum(int(part or 0) * size for part, size in zip(parts, sizes, strict=True))
        return number_from(whole + int(ms or 0) * 1_000_000 + round(number_from(float(us)) * 1000)), "ns"
    if found := _BYTES.fullmatch(text):
        return number_from(float(found[1]) * 1024 ** ("B", "KB", "MB", "GB", "TB", "PB").index(found[2])), "bytes"
    return number_from(float(text)), "count"


RING = 1024
"""Latest samples that a metric keeps, as in PyTorch/XLA."""

CounterSource = Callable[[], Mapping[str, int]]


class Metric:
    """One metric: totals, and a ring of (time in ns since the epoch, value)."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.total_samples = 0
        self.accumulator: float = 0
        self.ring: deque[tuple[int, float]] = deque(maxlen=RING)


class Registry:
    """All counters and metrics of a process; safe to use from several threads.

    Attributes:
        enabled: Whether anything is taken down; GLASS_METRICS=0 turns it off from the start.
    """

    def __init__(self) -> None:
        self.enabled = environment.metrics()
        self._lock = threading.Lock()
        self._metrics: dict[str, Metric] = {}
        self._counters: Counter[str] = Counter()
        self._sources: list[tuple[CounterSource, dict[str, int]]] = []

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter."""
        if self.enabled:
            with self._lock:
                self._counters[name] += by

    def sample(self, name: str, value: float, unit: Unit) -> None:
        """Take down one value of a metric; a time is in nanoseconds."""
        if not self.enabled:
            return
        now = time.time_ns()
        with self._lock:
            metric = self._metrics.get(name)
            if metric is None:
                metric = self._metrics[name] = Metric(unit)
            metric.total_samples += 1
            metric.accumulator += value
            metric.ring.append((now, value))

    def add_source(self, source: CounterSource) -> None:
        """Add counters kept elsewhere to reports; they count from now on, or from the last `reset`."""
        with self._lock:
            self._sources.append((source, dict(source())))

    def report(self) -> MetricsReport:
        """Return what was taken down so far."""
        with self._lock:
            counters = Counter(self._counters)
            if self.enabled:
                for source, before in self._sources:
                    counters.update({name: value - before.get(name, 0) for name, value in source().items()})
            metrics = tuple(
                summarize(name, metric.unit, metric.total_samples, metric.accumulator, tuple(metric.ring))
                for name, metric in sorted(self._metrics.items())
            )
        counted = {name: value for name, value in sorted(counters.items()) if value}
        return MetricsReport(metrics, counted, (environment.rank(),))

    def reset(self, *, metrics: bool = True, counters: bool = True) -> None:
        """Forget everything, or only one of both."""
        with self._lock:
            if metrics:
                self._metrics.clear()
            if counters:
                self._counters.clear()
                self._sources = [(source, dict(source())) for source, _ in self._sources]


registry = Registry()


def metrics() -> MetricsReport:
    """Return the counters and metrics of this process; `.to_dict()` of it is what `--json` prints."""
    return registry.report()


def metrics_report() -> str:
    """Return `metrics()` as text, in the form of `torch_xla.debug.metrics.metrics_report()`."""
    return str(metrics())


def reset_metrics() -> None:
    """Forget all counters and metrics, so that the next report covers what comes now."""
    registry.reset()
