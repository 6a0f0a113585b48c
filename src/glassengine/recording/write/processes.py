"""What ends or doubles a process that records: SIGTERM ends its recordings first, and a fork leaves them alone.

A signal is handled only if nothing else does, and only from the main thread, as Python requires. A process that
ends without notice (SIGKILL, `os._exit`, a handler of the user's) leaves its last steps in the ring's file.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from typing import Protocol

_log = logging.getLogger(__name__)


class _Writer(Protocol):
    def leave_to_parent(self) -> None:
        """Forget the files: this process was forked from the one that records."""

    def end(self, reason: str) -> None:
        """Bring what was recorded to disk: the process ends."""


_writers: weakref.WeakSet[_Writer] = weakref.WeakSet()


def watch(writer: _Writer) -> None:
    """Look after a writer until it is `forgotten`."""
    _writers.add(writer)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)


def forget(writer: _Writer) -> None:
    """Look after a writer no more."""
    _writers.discard(writer)
    # If another handler has been put in front, ours stays behind it and does nothing.
    if (
        not _writers
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is _terminated
    ):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminated(number: int, _frame: object) -> None:
    """End the recordings, and then the process as the signal would have."""
    signal.signal(number, signal.SIG_DFL)
    for writer in list(_writers):
        try:
            writer.end(f"stopped by {signal.Signals(number).name}")
        except Exception as error:
            _log.warning("not everything was recorded: %s", error)
    os.kill(os.getpid(), number)


def _forked() -> None:
    for writer in list(_writers):
        _writers.discard(writer)
        writer.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
