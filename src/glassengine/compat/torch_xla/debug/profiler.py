"""`torch_xla.debug.profiler`, imported as `xp`: a server that profiles are asked of, and named spans."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from glassengine.errors import GlassError, UsageError, logger
from glassengine.executable.profile_server import ProfileServer, request_profile
from glassengine.executable.profile_server import start_server as start_glass_server
from glassengine.executable.profile_taker import MAX_STEPS
from glassengine.executable.profiling import Profile
from glassengine.executable.steps import is_master_ordinal, mark_step
from glassengine.spans import Trace as Span
from glassengine.writing import next_directory

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


def trace(
    service_addr: str, logdir: str | Path, duration_ms: float = 1000, delay_ms: float = 0, **options: Any
) -> None:
    """Take a profile of the program behind a server, and copy it into a directory.

    Args:
        service_addr: "localhost:PORT" of a `start_server` on this machine, in this program or another one.
        logdir: Where a directory is made for it.
        duration_ms: How long at most, and for 10 000 steps at most.
        delay_ms: How long to wait before it begins.
        options: Without effect: how often to try, and in how much detail XLA is looked at.

    Raises:
        UsageError: No server answers, or it takes no profile.
        OSError: It cannot be copied.
    """
    time.sleep(delay_ms / 1000)
    taken = request_profile(service_addr, steps=MAX_STEPS, timeout_s=duration_ms / 1000)
    target = Path(logdir)
    target.mkdir(parents=True, exist_ok=True)
    place = next_directory(target, "profile", digits=6)
    shutil.copytree(taken["directory"], place, dirs_exist_ok=True)
    logger.info("a profile of %d steps is in %s", taken["num_steps"], place)


def trace_detached(*args: Any, **kwargs: Any) -> None:
    """Do what `trace` does in a thread, for which the program waits at its end; an error of it is logged."""

    def run() -> None:
        try:
            trace(*args, **kwargs)
        except (GlassError, OSError) as error:
            logger.error("no profile was taken: %s", error)

    threading.Thread(target=run, name="glass-trace-detached").start()


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
