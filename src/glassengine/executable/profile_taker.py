"""One profile at a time of a process that runs, bounded in steps, seconds and memory, and ended when asked."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from glassengine import environment, spans
from glassengine.errors import UsageError
from glassengine.executable.profiling import Profile

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

DEFAULT_PORT = 9012
DEFAULT_S = 60.0
MAX_STEPS = 10_000
MAX_S = 600.0
_LOOK_S = 0.2
# The trace is some five times larger while it is written than while it is taken.
_SHARE = 0.1
_LEAST_ROOM, _MOST_ROOM = 256 << 20, 2 << 30

Ended = Literal["steps", "time", "memory", "cancelled"]


class Asked(msgspec.Struct):
    """A request for a profile."""

    steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_STEPS)] = 1
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_S)] = DEFAULT_S


def check(steps: int, timeout_s: float) -> Asked:
    """Return a request that is within bounds.

    Raises:
        UsageError: It is not.
    """
    if not 1 <= steps <= MAX_STEPS:
        raise UsageError(
            "invalid number of steps of a profile", got=f"{steps} steps", expected=f"1 to {MAX_STEPS}", hint="--steps N"
        )
    if not 0 <= timeout_s <= MAX_S:
        raise UsageError("invalid timeout", got=f"timeout_s={timeout_s}", expected=f"0 to {MAX_S:g} seconds")
    return Asked(int(steps), float(timeout_s))


class Taker:
    """Takes profiles into one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._taking = threading.Lock()
        self._enough = threading.Event()
        self._cancelled = False

    def take(self, asked: Asked, is_left: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Take a profile and return what it holds.

        It ends when the client that asked `is_left`.

        Raises:
            UsageError: Another one is being taken, or nothing can be written.
        """
        if not self._taking.acquire(blocking=False):
            raise UsageError("another profile is being taken in this process", hint="wait until it has ended")
        self._enough.clear()
        self._cancelled = False
        try:
            taken = Profile(self._directory)
            taken.start()
            undo = spans.on_step_end(lambda: self._enough.set() if taken.num_steps >= asked.steps else None)
            try:
                ended = self._wait(asked.timeout_s, is_left)
            finally:
                undo()
                taken.stop()
        finally:
            self._taking.release()
        complete = taken.num_steps >= asked.steps
        return {
            "directory": str(taken.directory),
            "num_steps": taken.num_steps,
            "complete": complete,
            "ended": "steps" if complete else ended,
        }

    def cancel(self) -> bool:
        """End the profile that is being taken with the steps that it has; return whether there is one."""
        if not self._taking.locked():
            return False
        self._cancelled = True
        self._enough.set()
        return True

    def finish(self, timeout_s: float) -> None:
        """End what is being taken, and wait until it is written."""
        self.cancel()
        if self._taking.acquire(timeout=timeout_s):
            self._taking.release()

    def _wait(self, timeout_s: float, is_left: Callable[[], bool]) -> Ended:
        end = time.monotonic() + timeout_s
        most = _resident() + _room()
        while (left := end - time.monotonic()) > 0:
            if self._enough.wait(min(left, _LOOK_S)):
                return "cancelled" if self._cancelled else "steps"
            if is_left():
                return "cancelled"
            if _resident() > most:
                return "memory"
        return "time"


def _resident() -> int:
    """Return the most bytes of memory that this process has held so far; 0 where the system does not tell."""
    if resource is None:
        return 0
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


def _room() -> int:
    """Return by how many bytes a process may grow while a profile of it is taken."""
    available = environment.memory_bytes()[1]
    return _MOST_ROOM if available is None else min(_MOST_ROOM, max(_LEAST_ROOM, int(available * _SHARE)))
