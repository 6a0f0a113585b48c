"""Counters and times of this process: what was compiled, run and transferred, how often, and why.

`report()` is the text that `torch_xla.debug.metrics.metrics_report()` prints, `current()` the same as data. `read()`
takes such a text, of either age of that program, or the JSON of ours; `merge()` puts the reports of several ranks into
one. `compilations()` names the cause of each compilation, `cache()` every hit and miss of the cache on disk.
"""

from typing import TYPE_CHECKING

from glassengine.deferred import deferred

if TYPE_CHECKING:
    from glassengine.executable.cache import examine_cache as cache
    from glassengine.executable.compilation import compilations
    from glassengine.executable.counters import merge_metrics as merge
    from glassengine.executable.counters import metrics as current
    from glassengine.executable.counters import metrics_report as report
    from glassengine.executable.counters import read_metrics as read
    from glassengine.executable.counters import reset_metrics as reset
    from glassengine.results import Compilation, MetricsReport

__all__ = ["Compilation", "MetricsReport", "cache", "compilations", "current", "merge", "read", "report", "reset"]

_PUBLIC = {
    "Compilation": "glassengine.results",
    "MetricsReport": "glassengine.results",
    "cache": "glassengine.executable.cache:examine_cache",
    "compilations": "glassengine.executable.compilation",
    "current": "glassengine.executable.counters:metrics",
    "merge": "glassengine.executable.counters:merge_metrics",
    "read": "glassengine.executable.counters:read_metrics",
    "report": "glassengine.executable.counters:metrics_report",
    "reset": "glassengine.executable.counters:reset_metrics",
}
__getattr__, __dir__ = deferred(__name__, _PUBLIC)
