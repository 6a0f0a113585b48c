"""`torch_xla.debug.metrics`, imported as `met`: counters and metrics by the functions of PyTorch/XLA."""

from __future__ import annotations

from collections.abc import Sequence

from glassengine.executable.counters import metrics, registry, reset_metrics
from glassengine.executable.counters import metrics_report as metrics_report
from glassengine.results.metrics import MetricsReport

_COUNTERS = ("CachedCompile", "MarkStep")
_METRICS = ("CompileTime", "ExecuteTime", "ExecuteReplicatedTime", "TransferToDeviceTime", "TransferFromDeviceTime")


def short_metrics_report(counter_names: Sequence[str] | None = None, metric_names: Sequence[str] | None = None) -> str:
    """Return the report of some counters and metrics, and of all operations that were not recorded.

    Args:
        counter_names: None or none for `CachedCompile` and `MarkStep`.
        metric_names: None or none for the times of compilations, executions and transfers.
    """
    report = metrics()
    wanted, times = counter_names or _COUNTERS, metric_names or _METRICS
    counters = {name: value for name, value in report.counters.items() if name in wanted or name.startswith("aten::")}
    return str(MetricsReport(tuple(metric for metric in report.metrics if metric.name in times), counters))


def counter_names() -> list[str]:
    """Return the names of all counters that are not zero."""
    return list(metrics().counters)


def counter_value(name: str) -> int | None:
    """Return the value of a counter; None for one that nothing has counted."""
    return metrics().counters.get(name)


def metric_names() -> list[str]:
    """Return the names of all metrics."""
    return [metric.name for metric in metrics().metrics]


def metric_data(name: str) -> tuple[int, float, list[tuple[float, float]]] | None:
    """Return a metric; None for one of which nothing was measured.

    Returns:
        How many samples there were, their sum, and the latest of them as (seconds since the epoch, value). Times are
        in nanoseconds.
    """
    metric = metrics().metric(name)
    if metric is None:
        return None
    return metric.total_samples, metric.accumulator, [(when / 1e9, value) for when, value in metric.samples]


def executed_fallback_ops() -> list[str]:
    """Return the operations that were not recorded; `glass.lazy.fallbacks()` names their reasons and lines."""
    return [name for name in counter_names() if name.startswith("aten::")]


def clear_all() -> None:
    """Forget all counters and metrics."""
    reset_metrics()


def clear_counters() -> None:
    """Forget all counters."""
    registry.reset(metrics=False)


def clear_metrics() -> None:
    """Forget all metrics."""
    registry.reset(counters=False)
