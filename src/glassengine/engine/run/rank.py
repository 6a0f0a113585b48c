"""`python -m glassengine.engine.run.rank FD`: one rank of an engine, which does what a connection asks it to."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from glassengine import environment
from glassengine.engine.run.load import member_of, receive, send
from glassengine.engine.run.member import Member
from glassengine.errors import GlassError

_CALLS = {"open": "", "close": "", "record": "", "end_step": "given", "end_record": "", "step": "inputs"}
"""Method of a member -> the argument that the tensors of a message are; "" where it has none."""


def serve(connection: socket.socket) -> None:
    """Answer until the connection is closed; an error is the last answer."""
    member: Member | None = None
    while (message := receive(connection)) is not None:
        document, tensors = message
        do = document.pop("do")
        try:
            if do == "join":
                member = member_of(Path(document.pop("directory")), **document)
                send(connection, {"ready": True})
                continue
            assert member is not None
            given = {_CALLS[do]: tensors} if _CALLS[do] else {}
            made = getattr(member, do)(**document, **given)
            # All ranks make the same of a step.
            if do != "close" and (member.rank == 0 or do not in ("open", "step")):
                send(connection, {"number": made} if do == "open" else {}, made if do == "step" else None)
        except Exception as error:
            send(connection, {"error": _error_fields(error)})
            raise


def _error_fields(error: Exception) -> dict[str, Any]:
    """Return the words of an error, and when it was met: of the errors of several ranks the first is the cause."""
    if isinstance(error, GlassError):
        words = {"what": error.what, "got": str(error.got or ""), "hint": str(error.hint or "")}
    else:
        words = {"what": "it failed", "got": f"{type(error).__name__}: {error}", "hint": ""}
    return {**words, "at": time.monotonic()}


def main(arguments: list[str]) -> None:
    """Serve the connection whose number is the first argument."""
    torch.set_num_threads(max(environment.num_cpus() // (environment.num_ranks() or 1), 1))
    connection: Any = socket.socket(fileno=int(arguments[0]))
    try:
        serve(connection)
    except OSError:
        return  # nobody listens any more
    finally:
        threading.Timer(1.0, os._exit, (0,)).start()  # a process group may wait for peers that are gone


if __name__ == "__main__":
    main(sys.argv[1:])
