"""`python -m glassengine.engine.run.rank FD`: one rank of an engine, which does what a connection asks it to."""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from glassengine import environment
from glassengine.engine.ranks.children import receive, send
from glassengine.engine.ranks.member import Member
from glassengine.engine.run.load import member_of
from glassengine.errors import GlassError


def serve(connection: socket.socket) -> None:
    """Answer until the connection is closed; an error is the last answer."""
    member: Member | None = None
    while (message := receive(connection)) is not None:
        document, tensors = message
        try:
            if document["do"] == "join":
                member = member_of(
                    Path(document["directory"]), trust=document["trust"], rendezvous=document["rendezvous"]
                )
                send(connection, {"ready": True})
                continue
            assert member is not None
            if document["do"] == "open":
                number = member.open(document["batch_size"], document["length"])
                if member.rank == 0:
                    send(connection, {"number": number})
            elif document["do"] == "close":
                member.close(document["number"])
            elif document["do"] == "record":
                member.record(document["number"], document["path"], document["rows"], document["overwrite"])
                send(connection, {})
            elif document["do"] == "end_step":
                member.end_step(document["number"], document["step"], document["tokens"], tensors)
                send(connection, {})
            elif document["do"] == "end_record":
                member.end_record(document["number"], document["failed"])
                send(connection, {})
            else:
                outputs = member.step(document["number"], tensors)
                if member.rank == 0:
                    send(connection, {}, outputs)
        except Exception as error:
            send(connection, {"error": _told(error)})
            raise


def _told(error: Exception) -> dict[str, str]:
    if isinstance(error, GlassError):
        return {"what": error.what, "got": str(error.got or ""), "hint": str(error.hint or "")}
    return {"what": "it failed", "got": f"{type(error).__name__}: {error}", "hint": ""}


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
