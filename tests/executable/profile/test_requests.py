"""Requests that nobody should send: each is refused, none costs the process much, and the next good one is answered."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from glassengine.executable.profile import requests as profile_requests
from glassengine.executable.profile.requests import (
    MAX_CONNECTIONS,
    MAX_RECEIVED,
    Connection,
    Listener,
    Reply,
)

TOKEN = "the-token-of-these-tests"
HEAD = f"POST /capture HTTP/1.1\r\nHost: localhost:9012\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
GOOD = HEAD + b"Content-Length: 2\r\n\r\n{}"


class Served:
    """A listener that answers with what it was asked, and what came of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.left = 0
        self.listener = Listener(0, TOKEN, self.answer, self.on_left, lambda: None)
        self.listener.start()

    def answer(self, method: str, body: bytes, client: Connection) -> Reply | None:
        self.asked.append((method, body))
        return None if body == b"later" else Reply(200, {"body": body.decode("latin-1")})

    def on_left(self, client: Connection) -> None:
        self.left += 1


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(profile_requests, "REQUEST_S", 0.5)
    monkeypatch.setattr(profile_requests, "ACCEPTS_PER_S", 1000.0)
    monkeypatch.setattr(profile_requests, "CLOSING_S", 0.1)
    served = Served()
    yield served
    served.listener.close()
    assert not served.listener._thread.is_alive() and not served.listener._connections


def send(served: Served, *pieces: bytes, pause_s: float = 0.0, leave: bool = False) -> bytes:
    """Send pieces and return all that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", served.listener.port), timeout=20) as client:
        received = b""
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                client.sendall(piece)
                time.sleep(pause_s)
        if leave:
            return b""
        with contextlib.suppress(ConnectionError):
            while data := client.recv(65536):
                received += data
        return received


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def still_answers(served: Served) -> None:
    assert status(send(served, GOOD)) == 200


def head(*lines: str, first: str = "POST /capture HTTP/1.1") -> bytes:
    return "\r\n".join([first, *lines, "", ""]).encode("latin-1")


AUTHORIZED = f"Authorization: Bearer {TOKEN}"

BAD: dict[str, tuple[bytes, set[int]]] = {
    "a length below zero": (HEAD + b"Content-Length: -1\r\n\r\n" + b"x" * 5000, {400}),
    "a length that is none": (HEAD + b"Content-Length: many\r\n\r\n", {400}),
    "two lengths": (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", {400}),
    "a length of many digits": (HEAD + b"Content-Length: " + b"9" * 4000 + b"\r\n\r\n", {400, 413}),
    "a length and chunks": (HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", {200, 400}),
    "another encoding": (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", {400, 501}),
    "a large body": (HEAD + b"Content-Length: 100000\r\n\r\n" + b"x" * 100_000, {413}),
    "half a body in chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n400\r\n" + b"x" * 1024 + b"\r\n", {408}),
    "many chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 20000, {413}),
    "a chunk of many digits": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 3000 + b"\r\n", {400}),
    "chunks with long extensions": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"e" * 50_000, {400, 413, 431}),
    "a large header": (HEAD + b"X: " + b"x" * 100_000 + b"\r\n\r\n", {431}),
    "many headers": (HEAD + b"A: b\r\n" * 20_000 + b"\r\n", {431}),
    "a long line": (b"POST /" + b"x" * 100_000, {431}),
    "a line without an end": (b"x" * 100_000, {400, 431}),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 TLS\r\n\r\n", {400}),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 403, 505}),
    "HTTP/0.9": (b"GET /capture\r\n\r\n", {400}),
    "a bare line end": (b"\n\n\n\n" + b"\r\n" * 10, {400, 408}),
    "a folded header": (HEAD + b"X: a\r\n b\r\nHost: localhost\r\n\r\n", {400, 403}),
    "a NUL in a header": (HEAD + b"X: \0\r\n\r\n", {400}),
    "another method": (head("Host: localhost", AUTHORIZED, first="GET /capture HTTP/1.1"), {405}),
    "a method of its own": (head("Host: localhost", AUTHORIZED, first="BREW /capture HTTP/1.1"), {405}),
    "HEAD": (head("Host: localhost", AUTHORIZED, first="HEAD /capture HTTP/1.1"), {405}),
    "CONNECT": (head("Host: localhost", AUTHORIZED, first="CONNECT localhost:80 HTTP/1.1"), {404, 405}),
    "an upgrade": (head("Host: a", AUTHORIZED, "Upgrade: websocket", "Connection: Upgrade"), {403}),
    "another path": (head("Host: localhost", AUTHORIZED, first="POST / HTTP/1.1"), {404}),
    "a path that climbs": (head("Host: localhost", AUTHORIZED, first="POST /../../etc/passwd HTTP/1.1"), {404}),
    "a path in other letters": (head("Host: localhost", AUTHORIZED, first="POST /capture%00/..%2f HTTP/1.1"), {404}),
    "a whole address": (head("Host: localhost", AUTHORIZED, first="POST http://evil.example/capture HTTP/1.1"), {404}),
    "no token": (head("Host: localhost", "Content-Length: 2") + b"{}", {401}),
    "an empty token": (head("Host: localhost", "Authorization:", "Content-Length: 2") + b"{}", {401}),
    "another token": (head("Host: localhost", f"Authorization: Bearer {TOKEN[:-1]}x") + b"{}", {401}),
    "half a token": (head("Host: localhost", f"Authorization: Bearer {TOKEN[:-1]}") + b"{}", {401}),
    "a token of another kind": (head("Host: localhost", f"Authorization: Basic {TOKEN}") + b"{}", {401}),
    "a token beyond ASCII": (head("Host: localhost", "Authorization: Bearer \xe9\xff") + b"{}", {400, 401}),
    "two tokens": (head("Host: localhost", "Authorization: Bearer x", AUTHORIZED) + b"{}", {401}),
    "another host": (head("Host: evil.example:9012", AUTHORIZED, "Content-Length: 2") + b"{}", {403}),
    "a host that ends alike": (head("Host: localhost.evil.example", AUTHORIZED) + b"{}", {403}),
    "a host that begins alike": (head("Host: 127.0.0.1.nip.example:9012", AUTHORIZED) + b"{}", {403}),
    "a host with a word for a port": (head("Host: localhost:x", AUTHORIZED) + b"{}", {400, 403}),
    "two hosts": (head("Host: localhost", "Host: evil.example", AUTHORIZED) + b"{}", {400, 403}),
    "no host": (head(AUTHORIZED), {400}),
    "no host, in HTTP/1.0": (head(AUTHORIZED, first="POST /capture HTTP/1.0"), {403}),
}


@pytest.mark.parametrize("name", BAD)
def test_s5_it_is_refused(served: Served, name: str) -> None:
    data, expected = BAD[name]
    answer = send(served, data)
    assert status(answer) in expected, answer[:200]
    if 200 not in expected:
        assert not served.asked and (b'"error"' in answer or name == "HEAD")
    still_answers(served)


@pytest.mark.parametrize(
    "data",
    [
        GOOD,
        GOOD.replace(b"localhost:9012", b"127.0.0.1:1"),
        GOOD.replace(b"localhost:9012", b"[::1]:9012"),
        GOOD.replace(b"localhost:9012", b"LOCALHOST"),
        GOOD.replace(b"HTTP/1.1", b"HTTP/1.0"),
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1;x=y\r\n}\r\n0\r\nX: trailer\r\n\r\n",
        HEAD + b"\r\n",
        HEAD.replace(b"POST", b"DELETE") + b"\r\n",
        HEAD + b"X: " + b"x" * 4000 + b"\r\nContent-Length: 4000\r\n\r\n" + b" " * 4000,
    ],
)
def test_s5_its_twin_is_answered(served: Served, data: bytes) -> None:
    assert status(send(served, data)) == 200
    assert len(served.asked) == 1
    # And in as many pieces as there are bytes, within the time there is.
    assert len(data) > 1000 or status(send(served, *(data[place : place + 1] for place in range(len(data))))) == 200


def test_s5_a_client_that_asks_first_is_told_to_go_on(served: Served) -> None:
    answer = send(served, HEAD + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n", b"{}", pause_s=0.05)
    assert answer.startswith(b"HTTP/1.1 100 ") and b"HTTP/1.1 200 " in answer
    wrong = HEAD.replace(TOKEN.encode(), b"x")
    assert status(send(served, wrong + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")) == 401


def test_s5_of_requests_one_after_another_the_first_counts(served: Served) -> None:
    assert send(served, GOOD * 5).count(b"HTTP/1.1 ") == 1
    assert len(served.asked) == 1


def test_s5_a_request_has_a_deadline_and_not_only_each_of_its_bytes(served: Served) -> None:
    begin = time.monotonic()
    answer = send(served, *[b"X"] * 20, pause_s=0.1)  # a byte in time, again and again
    assert status(answer) in (0, 408) and time.monotonic() - begin < 4
    begin = time.monotonic()
    assert status(send(served, HEAD)) == 408 and 0.3 < time.monotonic() - begin < 3
    assert status(send(served, HEAD + b"Content-Length: 2\r\n\r\n{")) == 408
    assert status(send(served, b"")) == 408


def test_s5_300_half_sent_requests_hold_neither_threads_nor_the_server(served: Served) -> None:
    before = threading.active_count()
    with contextlib.ExitStack() as held:
        for number in range(300):
            client = held.enter_context(socket.create_connection(("127.0.0.1", served.listener.port), timeout=20))
            with contextlib.suppress(ConnectionError):
                client.sendall(HEAD if number % 2 else b"P")
        assert threading.active_count() == before
        assert len(served.listener._connections) <= MAX_CONNECTIONS
        still_answers(served)


def test_s5_whoever_comes_too_fast_waits_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_requests, "ACCEPTS_PER_S", 20.0)
    served = Served()
    try:
        begin = time.monotonic()
        for _ in range(MAX_CONNECTIONS + 20):
            still_answers(served)
        assert time.monotonic() - begin > 0.8
    finally:
        served.listener.close()


def test_s5_no_file_may_be_opened(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port stays ready to be read from: that may not keep a core busy."""
    calls = 0

    def full(_: socket.socket) -> Any:
        nonlocal calls
        calls += 1
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "accept", full)
        client = socket.create_connection(("127.0.0.1", served.listener.port), timeout=20)
        time.sleep(0.3)
        assert calls == 1
    with client:  # it is taken a second later
        client.sendall(GOOD)
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")


def test_s5_a_reply_that_is_said_later_and_a_client_that_leaves(served: Served) -> None:
    later = HEAD + b"Content-Length: 5\r\n\r\nlater"
    with socket.create_connection(("127.0.0.1", served.listener.port), timeout=20) as client:
        client.sendall(later)
        while not served.asked:
            time.sleep(0.01)
        time.sleep(0.7)  # longer than a request may take: it waits for us
        (connection,) = served.listener._connections.values()
        served.listener.reply(connection, Reply(200, {"late": True}))
        assert b'{"late": true}' in b"".join(iter(lambda: client.recv(4096), b""))
    send(served, later, pause_s=0.05, leave=True)
    deadline = time.monotonic() + 10
    while not served.left:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    # One that waits is dropped when it sends more than a request may hold, and makes no room for others.
    send(served, later, *[b"x" * 1024] * (MAX_RECEIVED // 1024 + 2))
    still_answers(served)


def test_s5_a_client_that_reads_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_requests, "REPLY_S", 0.3)
    asked = threading.Event()

    def answer(*_: object) -> Reply:
        asked.set()
        return Reply(200, {"large": "x" * 8_000_000})

    monkeypatch.setattr(served.listener, "_answer", answer)
    with socket.create_connection(("127.0.0.1", served.listener.port), timeout=20) as client:
        client.sendall(GOOD)
        assert asked.wait(10)
        deadline = time.monotonic() + 10
        while served.listener._connections:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_s5_an_error_of_ours_ends_one_connection(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> Reply:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(served.listener, "_answer", broken)
        patched.setattr(served.listener, "_tick", broken)
        assert send(served, GOOD) == b""
        time.sleep(0.5)
    assert "a connection was dropped" in caplog.text and "an error of ours" in caplog.text
    still_answers(served)
