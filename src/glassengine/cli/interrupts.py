"""Ctrl-C while packages are imported: some catch every exception, and would continue in spite of it."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_AGAIN_S = 0.2


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Raise KeyboardInterrupt again where an import suppressed it; elsewhere Ctrl-C is unchanged.

    A handler outside of an import is intended: a training loop that saves and ends, say. And while something
    cleans up behind it, it does not come again.
    """
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_ours or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return
    if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:  # another owner's timer
        yield
        return

    def interrupted(number: int, frame: FrameType | None) -> None:
        if _imports(frame):
            signal.signal(signal.SIGALRM, again)
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        raise KeyboardInterrupt

    def again(number: int, frame: FrameType | None) -> None:
        if _is_handled(sys.exc_info()[1]):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        elif _imports(frame):
            interrupted(number, frame)
        else:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGALRM) is again:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM an interruption like Ctrl-C, unless the process handles it: what was found is printed."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def interrupted(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _is_handled(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__context__
    return False
