"""`python -m glassengine.workers.pipe MODULE FUNCTION` answers the process that started it: pickles through a pipe."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import signal
import sys
from collections.abc import Callable
from typing import IO, Any

from glassengine.workers.protocol import result_or_error


def send(file: IO[bytes], value: object) -> None:
    """Write one value."""
    pickle.dump(value, file, protocol=5)
    file.flush()


def receive(file: IO[bytes]) -> Any:
    """Return the next value.

    Raises:
        EOFError: The other side has ended.
        pickle.UnpicklingError: It ended within a value.
    """
    return pickle.load(file)  # noqa: S301 (of a process that this one started, or that started it)


def serve(function: Callable[[Any], Any]) -> None:
    """Answer requests on stdin until it ends; what the function prints goes to stderr.

    An interrupt is for the parent process, which ends this one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = os.fdopen(os.dup(0), "rb")
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdin = io.StringIO()
    while True:
        try:
            send(results, result_or_error(function, receive(requests)))
        except (EOFError, BrokenPipeError):
            return


if __name__ == "__main__":
    serve(getattr(importlib.import_module(sys.argv[1]), sys.argv[2]))
