"""`torch_xla.debug.profiler`, imported as `xp`: a server that profiles are asked of, and named spans."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from glassengine.compat.torch_xla.refusals import refusing
from glassengine.errors import UsageError
from glassengine.executable.metrics.steps import is_master_ordinal, mark_step
from glassengine.executable.profile.profile import Profile
from glassengine.executable.profile.server import ProfileServer
from glassengine.executable.profile.server import start_server as start_glass_server
from glassengine.spans import Trace as Span

_ASK = "glass profile --capture localhost:PORT --steps N, or xp.start_trace(logdir) and xp.stop_trace()"

__getattr__ = refusing(__name__, {"trace": _ASK, "trace_detached": _ASK})

_profiles: list[Profile] = []


def start_server(port: int, only_on_master: bool = True) -> ProfileServer | None:
    """Let profiles of this process be asked for: `glass profile --capture localhost:PORT`. They go to `profiles`.

    Args:
        port: On loopback; 0 takes a free one.
        only_on_master: Start none in other processes than the first of the machine, where it returns None.

    Raises:
        UsageError: The port is taken, or the directory cannot be made.
    """
    return start_glass_server(port) if not only_on_master or is_master_ordinal() else None


def start_trace(log_dir: str | Path) -> None:
    """Begin a profile of this process, which `stop_trace` writes into a directory.

    Raises:
        UsageError: One is being taken.
    """
    if _profiles:
        raise UsageError("a profile is being taken", hint="xp.stop_trace()")
    profile = Profile(log_dir)
    profile.start()
    _profiles.append(profile)


def stop_trace() -> None:
    """End the profile that `start_trace` began, and write it.

    Raises:
        UsageError: None is being taken.
    """
    if not _profiles:
        raise UsageError("no profile is being taken", hint="xp.start_trace(logdir)")
    _profiles.pop().stop()


class Trace(Span):
    """A named span of the user's own code.

    Args:
        name: As a profile shows it.
        kwargs: What PyTorch/XLA keeps beside the name, e.g. step_num; shown with it.
    """

    def __init__(self, name: str, **kwargs: Any) -> None:
        super().__init__(" ".join([name, *(f"{key}={value}" for key, value in kwargs.items())]))


class StepTrace(Trace):
    """A named span that is one step: it ends with what `mark_step` does."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                mark_step()
        finally:
            super().__exit__(kind, error, trace)
