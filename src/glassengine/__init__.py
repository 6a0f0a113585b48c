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
    from glassengine import compat, lazy, metrics, profiler, snapshots, testing
    from glassengine.backends.registry import list_backends
    from glassengine.capture.record import record
    from glassengine.compare.compare import compare
    from glassengine.diagnose import check
    from glassengine.diagnose.invariance.check import check_invariant
    from glassengine.diagnose.snapshot_replay import replay
    from glassengine.diagnose.training_check import check_training
    from glassengine.engine.build.build import build
    from glassengine.engine.run.engine import Engine
    from glassengine.engine.run.load import load
    from glassengine.engine.session.session import Session
    from glassengine.errors import GlassError
    from glassengine.executable.steps import mark_step
    from glassengine.kernels.match import assert_matches, matches
    from glassengine.program import sites
    from glassengine.prompt.check import check_prompt
    from glassengine.recording.export import export
    from glassengine.recording.reader import Recording
    from glassengine.recording.source import open_dump as open
    from glassengine.recording.write.policy import Watch
    from glassengine.results import Comparison, Divergence
    from glassengine.rollouts.check import check_rollout
    from glassengine.taps import tap

__version__ = "0.2.0"

__all__ = [
    "Comparison",
    "Divergence",
    "Engine",
    "GlassError",
    "Recording",
    "Session",
    "Watch",
    "__version__",
    "assert_matches",
    "build",
    "check",
    "check_invariant",
    "check_prompt",
    "check_rollout",
    "check_training",
    "compare",
    "compat",
    "export",
    "lazy",
    "list_backends",
    "load",
    "mark_step",
    "matches",
    "metrics",
    "open",
    "profiler",
    "record",
    "replay",
    "sites",
    "snapshots",
    "tap",
    "testing",
]

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
    "open": "glassengine.recording.source:open_dump",
    "profiler": "glassengine.profiler",
    "record": "glassengine.capture.record",
    "replay": "glassengine.diagnose.snapshot_replay",
    "sites": "glassengine.program",
    "snapshots": "glassengine.snapshots",
    "tap": "glassengine.taps",
    "testing": "glassengine.testing",
}


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
