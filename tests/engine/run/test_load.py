"""Messages between a process and its ranks."""

from __future__ import annotations

import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from glassengine.engine.run.load import Children, receive, send
from glassengine.errors import BackendError


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_messages_arrive_as_they_were_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    values = torch.arange(3_000_000, dtype=torch.float32)
    document = {"do": "step", "directory": "/x/\udc80"}
    sender = threading.Thread(target=send, args=(ours, document, {"x": values}))
    sender.start()
    found = receive(theirs)
    sender.join()
    assert found is not None and found[0] == document and torch.equal(found[1]["x"], values)
    send(ours, {})
    assert receive(theirs) == ({}, {})
    ours.close()
    assert receive(theirs) is None


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<QQ", 1 << 62, 0),
        struct.pack("<QQ", 2, 1 << 62) + b"{}",
        struct.pack("<QQ", 2, 0) + b"[]",
        struct.pack("<QQ", 2, 0) + b"\xff\xff",
        struct.pack("<QQ", 100_000, 0) + b"[" * 100_000,
        struct.pack("<QQ", 2, 12) + b"{}" + b"not a tensor",
    ],
)
def test_invalid_messages_break_the_connection(pair: tuple[socket.socket, socket.socket], frame: bytes) -> None:
    ours, theirs = pair
    ours.sendall(frame)
    with pytest.raises(OSError, match="of a rank"):
        receive(theirs)


def test_memory_is_taken_for_what_comes(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.sendall(struct.pack("<QQ", 2, 1 << 39) + b"{}" + bytes(1000))
    ours.close()
    tracemalloc.start()
    assert receive(theirs) is None
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 8 << 20


@pytest.mark.parametrize(
    ("statuses", "second", "named"),
    [
        ((1, -9), None, "rank 1 of the engine ended"),
        ((1, 3), None, "rank 1 of the engine ended"),
        ((1, 1), 5.0, "rank 1: no memory"),
        ((1, 1), 9.0, "rank 0: reset by peer"),
        ((1, None), None, "rank 0: reset by peer"),
    ],
)
def test_the_rank_that_failed_first_is_named(
    tmp_path: Path, statuses: tuple[int | None, ...], second: float | None, named: str
) -> None:
    """The message of a rank that lost its peer may be read before the peer's own, or before its death is seen."""

    class Process:
        def __init__(self, status: int | None) -> None:
            self.poll = lambda: status

    pairs = [socket.socketpair() for _ in statuses]
    ranks: Any = Children.__new__(Children)
    ranks._processes = [Process(status) for status in statuses]
    ranks._connections = [ours for ours, _ in pairs]
    ranks._folder, ranks.stop = tmp_path, lambda: None
    if second is not None:
        send(pairs[1][1], {"error": {"what": "no memory", "got": "", "hint": "", "at": second}})
    with pytest.raises(BackendError) as raised:
        ranks._fail(0, {"what": "reset by peer", "got": "", "hint": "", "at": 7.0})
    assert raised.value.what == named
    for pair in pairs:
        for connection in pair:
            connection.close()
