"""Glass Engine compares a port, export, engine or training run with its reference, and names the first wrong operation.

The public names below are imported when they are first used, so that `import glassengine` costs nothing and changes
nothing. Beside them there are six modules for one purpose each: `lazy`, `metrics`, `profiler`, `snapshots`, `testing`,
and `compat` for what other tools call by name. Three more are to be imported: `glassengine.results` has the type of
every result, `glassengine.errors` every error, and `glassengine.commands` the other commands of `glass` as functions.

Two of the names, `compare` and `sites`, are also names of submodules: `glassengine.compare` is always the public
function, and what the submodule defines is imported with `from glassengine.compare... import ...`.
"""

from __future__ import annotations

import atexit
import sys
import types
from typing import TYPE_CHECKING

from glassengine.deferred import deferred

if TYPE_CHECKING:
    from glassengine import compat as compat
    from glassengine import lazy as lazy
    from glassengine import metrics as metrics
    from glassengine import profiler as profiler
    from glassengine import snapshots as snapshots
    from glassengine import testing as testing
    from glassengine.backends.registry import list_backends as list_backends
    from glassengine.capture.record import record as record
    from glassengine.compare.compare import compare as compare
    from glassengine.diagnose import check as check
    from glassengine.diagnose.invariance.check import check_invariant as check_invariant
    from glassengine.diagnose.snapshot_replay import replay as replay
    from glassengine.diagnose.training_check import check_training as check_training
    from glassengine.engine.build.build import build as build
    from glassengine.engine.run.engine import Engine as Engine
    from glassengine.engine.run.load import load as load
    from glassengine.engine.session.session import Session as Session
    from glassengine.errors import GlassError as GlassError
    from glassengine.executable.steps import mark_step as mark_step
    from glassengine.kernels.match import assert_matches as assert_matches
    from glassengine.kernels.match import matches as matches
    from glassengine.program import sites as sites
    from glassengine.prompt.check import check_prompt as check_prompt
    from glassengine.recording.export import export as export
    from glassengine.recording.reader import Recording as Recording
    from glassengine.recording.source import open as open
    from glassengine.recording.write.policy import Watch as Watch
    from glassengine.results import Comparison as Comparison
    from glassengine.results import Divergence as Divergence
    from glassengine.rollouts.check import check_rollout as check_rollout
    from glassengine.taps import tap as tap

__version__ = "0.2.0"

# Public name -> module that defines it; a test keeps the block above equal to it.
_PUBLIC = {
    "Comparison": "glassengine.results",
    "Divergence": "glassengine.results",
    "Engine": "glassengine.engine.run.engine",
    "GlassError": "glassengine.errors",
    "Recording": "glassengine.recording.reader",
    "Session": "glassengine.engine.session.session",
    "Watch": "glassengine.recording.write.policy",
    "assert_matches": "glassengine.kernels.match",
    "build": "glassengine.engine.build.build",
    "check": "glassengine.diagnose",
    "check_invariant": "glassengine.diagnose.invariance.check",
    "check_prompt": "glassengine.prompt.check",
    "check_rollout": "glassengine.rollouts.check",
    "check_training": "glassengine.diagnose.training_check",
    "compare": "glassengine.compare.compare",
    "compat": "glassengine.compat",
    "export": "glassengine.recording.export",
    "lazy": "glassengine.lazy",
    "list_backends": "glassengine.backends.registry",
    "load": "glassengine.engine.run.load",
    "mark_step": "glassengine.executable.steps",
    "matches": "glassengine.kernels.match",
    "metrics": "glassengine.metrics",
    "open": "glassengine.recording.source",
    "profiler": "glassengine.profiler",
    "record": "glassengine.capture.record",
    "replay": "glassengine.diagnose.snapshot_replay",
    "sites": "glassengine.program",
    "snapshots": "glassengine.snapshots",
    "tap": "glassengine.taps",
    "testing": "glassengine.testing",
}
__all__ = ["__version__", *_PUBLIC]


class _Package(types.ModuleType):
    """The type of this package: a submodule never takes the place of a public name."""

    def __setattr__(self, name: str, value: object) -> None:
        # The import system binds every imported submodule to its package, which would hide the function of that name.
        if not isinstance(value, types.ModuleType) or _PUBLIC.get(name) in (None, value.__name__):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
__getattr__, __dir__ = deferred(__name__, _PUBLIC)


def _tell_of_nothing() -> None:
    loaded = sys.modules
    # A command runs what it runs; only with a script it is the user's own code that may have run nothing.
    is_users = "glassengine.cli.main" not in loaded or "glassengine.capture.run_script" in loaded
    # Without torch there was nothing to run, and what takes long to import is not imported for this.
    if not is_users or "torch" not in loaded:
        return
    from glassengine.environment import snapshot_request

    # What reads the request imports half of torch, which takes seconds.
    if snapshot_request() is not None:
        from glassengine.executable.snapshot.snapshots import warn_without_executions

        warn_without_executions()


atexit.register(_tell_of_nothing)
