"""Requests and results through a pipe: eight bytes that say how many follow, and these.

`python -m glassengine.workers.pipe MODULE FUNCTION` answers the process that started it.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import IO

_LENGTH = 8


def send(file: IO[bytes], data: bytes) -> None:
    """Write one message."""
    file.write(len(data).to_bytes(_LENGTH, "little"))
    file.write(data)
    file.flush()


def receive(file: IO[bytes]) -> bytes | None:
    """Return the next message; None where the other side has ended."""
    length = file.read(_LENGTH)
    if len(length) < _LENGTH:
        return None
    size = int.from_bytes(length, "little")
    data = file.read(size)
    return data if len(data) == size else None


def serve(function: Callable[[bytes], bytes]) -> None:
    """Answer requests on stdin until it ends; what the function prints goes to stderr.

    An interrupt is for the process that asks: it ends this one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = os.fdopen(os.dup(0), "rb")
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdin = io.StringIO()
    while (request := receive(requests)) is not None:
        try:
            send(results, function(request))
        except BrokenPipeError:
            return


if __name__ == "__main__":
    serve(getattr(importlib.import_module(sys.argv[1]), sys.argv[2]))
