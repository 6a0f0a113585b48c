"""Counters and metrics of this process: how often, how long, how much.

A metric keeps all-time totals and its latest samples; percentiles and rates are of the samples. Names are those of
PyTorch/XLA: CompileTime, ExecuteTime, TensorsGraphSize, CachedCompile, ... ExecuteTime is the wall time of a run that
ended with its devices idle; without waiting for an accelerator the time until control returns is DispatchTime.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

from glassengine import environment
from glassengine.executable.metrics.report import summarize
from glassengine.results.metrics import MetricsReport, Unit

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
