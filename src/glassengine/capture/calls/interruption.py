"""Tells what a signal handler raised from what goes wrong where it was raised."""

from __future__ import annotations

import signal
from types import MethodType


def is_interruption(error: BaseException) -> bool:
    """Return whether a signal handler raised `error`, as one that limits the time of a call does.

    It can arrive anywhere, in our code too, and is meant for the caller of the model.
    """
    if not isinstance(error, Exception):
        return True
    if isinstance(error, RecursionError):
        return False  # nor is there room to look
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__ if handlers else None
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code(handler: object) -> object:
    if isinstance(handler, MethodType):
        handler = handler.__func__
    elif not hasattr(handler, "__code__"):
        handler = type(handler).__dict__.get("__call__")
    return getattr(handler, "__code__", None)
