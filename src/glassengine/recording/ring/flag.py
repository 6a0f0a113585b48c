"""A flag that one thread raises and another one waits for."""

from __future__ import annotations

import contextlib
import threading


class Flag:
    """Like `threading.Event`, for one thread that waits, and proof against signals.

    An event has a lock that is taken in Python code: an exception that a signal handler raises right then (Ctrl-C, a
    time limit) leaves it locked, and the next to set the event waits for ever. Here every method is one call of
    a lock.
    """

    def __init__(self) -> None:
        self._lowered = threading.Lock()
        self._lowered.acquire()

    def set(self) -> None:
        """Raise the flag, if it is not raised."""
        with contextlib.suppress(RuntimeError):  # it is raised
            self._lowered.release()

    def clear(self) -> None:
        """Lower the flag, if it is raised."""
        self._lowered.acquire(blocking=False)

    def wait(self, timeout: float = -1) -> bool:
        """Wait until the flag is raised, at most `timeout` seconds, and lower it; return whether it was."""
        return self._lowered.acquire(timeout=timeout)
