"""Glass Engine: compile a Hugging Face model into an engine you can see through.

The public names below are imported when they are first used, so that `import glassengine` costs nothing and changes
nothing. Three of them, `compare`, `sites` and `eager_debug`, are also names of submodules: `glassengine.compare` is
always the public function, and what the submodule defines is imported with `from glassengine.compare... import ...`.
"""

from __future__ import annotations

import atexit
import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glassengine.backends.accuracy.calibration import calibrate as calibrate
    from glassengine.backends.registry import list_backends as list_backends
    from glassengine.capture.observers.hooks import NetworkOutputs as NetworkOutputs
    from glassengine.capture.observers.hooks import named_network_outputs as named_network_outputs
    from glassengine.capture.runs.model_debugger import (
        model_addition_debugger_context as model_addition_debugger_context,
    )
    from glassengine.capture.runs.record import record as record
    from glassengine.capture.runs.target import record_target as record_target
    from glassengine.capture.scripts.run_script import record_script as record_script
    from glassengine.compare.compare import compare as compare
    from glassengine.compare.many import compare_many as compare_many
    from glassengine.diagnose import check as check
    from glassengine.diagnose.engines.side_by_side import side_by_side as side_by_side
    from glassengine.diagnose.noise_floor import measure_noise_floor as measure_noise_floor
    from glassengine.diagnose.snapshot.replay import replay as replay
    from glassengine.diagnose.training.check import check_training as check_training
    from glassengine.engine.build.build import build as build
    from glassengine.engine.run.engine import load as load
    from glassengine.engine.run.step_files import StepFiles as StepFiles
    from glassengine.engine.store.signing import verify_engine as verify_engine
    from glassengine.errors import BackendError as BackendError
    from glassengine.errors import CorruptError as CorruptError
    from glassengine.errors import GlassError as GlassError
    from glassengine.errors import IncomparableError as IncomparableError
    from glassengine.errors import UnknownNameError as UnknownNameError
    from glassengine.errors import UsageError as UsageError
    from glassengine.executable.cache.report import examine_cache as examine_cache
    from glassengine.executable.metrics.compilation import compilations as compilations
    from glassengine.executable.metrics.metrics import metrics as metrics
    from glassengine.executable.metrics.metrics import metrics_report as metrics_report
    from glassengine.executable.metrics.metrics import reset_metrics as reset_metrics
    from glassengine.executable.metrics.reader import read_metrics as read_metrics
    from glassengine.executable.metrics.report import merge_metrics as merge_metrics
    from glassengine.executable.metrics.steps import add_step_closure as add_step_closure
    from glassengine.executable.metrics.steps import current_step as current_step
    from glassengine.executable.metrics.steps import is_master_ordinal as is_master_ordinal
    from glassengine.executable.metrics.steps import mark_step as mark_step
    from glassengine.executable.profile.client import request_profile as request_profile
    from glassengine.executable.profile.profile import profile as profile
    from glassengine.executable.profile.reader import read_profiles as read_profiles
    from glassengine.executable.profile.server import start_server as start_server
    from glassengine.executable.run.snapshots import snapshots as snapshots
    from glassengine.executable.snapshot.callback import (
        register_hlo_snapshot_callback as register_hlo_snapshot_callback,
    )
    from glassengine.executable.snapshot.callback import register_snapshot_callback as register_snapshot_callback
    from glassengine.executable.snapshot.listing import list_snapshots as list_snapshots
    from glassengine.executable.snapshot.nonfinite import NonFiniteError as NonFiniteError
    from glassengine.executable.snapshot.reader import Snapshot as Snapshot
    from glassengine.frontends.eager_debug import eager_debug as eager_debug
    from glassengine.program import sites as sites
    from glassengine.program.listing.artifacts import compare_artifacts as compare_artifacts
    from glassengine.recording.read.dump import Dump as Dump
    from glassengine.recording.read.dump import open_dump as open_dump
    from glassengine.recording.read.export import export as export
    from glassengine.recording.read.reader import Recording as Recording
    from glassengine.spans import Trace as Trace
    from glassengine.taps import register_network_output as register_network_output
    from glassengine.taps import tap as tap

__version__ = "0.1.0"

# Public name -> module that defines it. `__all__` is taken from it; a test keeps the block above equal to it.
_PUBLIC = {
    "BackendError": "glassengine.errors",
    "CorruptError": "glassengine.errors",
    "Dump": "glassengine.recording.read.dump",
    "GlassError": "glassengine.errors",
    "IncomparableError": "glassengine.errors",
    "NetworkOutputs": "glassengine.capture.observers.hooks",
    "NonFiniteError": "glassengine.executable.snapshot.nonfinite",
    "Recording": "glassengine.recording.read.reader",
    "Snapshot": "glassengine.executable.snapshot.reader",
    "StepFiles": "glassengine.engine.run.step_files",
    "Trace": "glassengine.spans",
    "UnknownNameError": "glassengine.errors",
    "UsageError": "glassengine.errors",
    "add_step_closure": "glassengine.executable.metrics.steps",
    "build": "glassengine.engine.build.build",
    "calibrate": "glassengine.backends.accuracy.calibration",
    "check": "glassengine.diagnose",
    "check_training": "glassengine.diagnose.training.check",
    "compare": "glassengine.compare.compare",
    "compare_artifacts": "glassengine.program.listing.artifacts",
    "compare_many": "glassengine.compare.many",
    "compilations": "glassengine.executable.metrics.compilation",
    "current_step": "glassengine.executable.metrics.steps",
    "eager_debug": "glassengine.frontends.eager_debug",
    "examine_cache": "glassengine.executable.cache.report",
    "export": "glassengine.recording.read.export",
    "is_master_ordinal": "glassengine.executable.metrics.steps",
    "list_backends": "glassengine.backends.registry",
    "list_snapshots": "glassengine.executable.snapshot.listing",
    "load": "glassengine.engine.run.engine",
    "mark_step": "glassengine.executable.metrics.steps",
    "measure_noise_floor": "glassengine.diagnose.noise_floor",
    "merge_metrics": "glassengine.executable.metrics.report",
    "metrics": "glassengine.executable.metrics.metrics",
    "metrics_report": "glassengine.executable.metrics.metrics",
    "model_addition_debugger_context": "glassengine.capture.runs.model_debugger",
    "named_network_outputs": "glassengine.capture.observers.hooks",
    "open_dump": "glassengine.recording.read.dump",
    "profile": "glassengine.executable.profile.profile",
    "read_metrics": "glassengine.executable.metrics.reader",
    "read_profiles": "glassengine.executable.profile.reader",
    "record": "glassengine.capture.runs.record",
    "record_script": "glassengine.capture.scripts.run_script",
    "record_target": "glassengine.capture.runs.target",
    "register_hlo_snapshot_callback": "glassengine.executable.snapshot.callback",
    "register_network_output": "glassengine.taps",
    "register_snapshot_callback": "glassengine.executable.snapshot.callback",
    "replay": "glassengine.diagnose.snapshot.replay",
    "request_profile": "glassengine.executable.profile.client",
    "reset_metrics": "glassengine.executable.metrics.metrics",
    "side_by_side": "glassengine.diagnose.engines.side_by_side",
    "sites": "glassengine.program",
    "snapshots": "glassengine.executable.run.snapshots",
    "start_server": "glassengine.executable.profile.server",
    "tap": "glassengine.taps",
    "verify_engine": "glassengine.engine.store.signing",
}

__all__ = ["__version__", *_PUBLIC]


class _Package(types.ModuleType):
    """The type of this package: a submodule never takes the place of a public name."""

    def __setattr__(self, name: str, value: object) -> None:
        # The import system binds every imported submodule to its package, which would hide the function of that name.
        if not (name in _PUBLIC and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def _tell_of_nothing() -> None:
    loaded = sys.modules
    # A command runs what it runs; only with a script it is the user's own code that may have run nothing.
    is_users = "glassengine.cli.main" not in loaded or "glassengine.capture.scripts.run_script" in loaded
    # Without torch there was nothing to run, and what takes long to import is not imported for this.
    if not is_users or "torch" not in loaded:
        return
    from glassengine.environment import snapshot_request

    # What reads the request imports half of torch, which takes seconds.
    if snapshot_request() is not None:
        from glassengine.executable.snapshot.environment import tell_of_nothing

        tell_of_nothing()


atexit.register(_tell_of_nothing)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
