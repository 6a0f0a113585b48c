"""HTTP over loopback with a bound on everything: one thread, so that a training process can stand being shouted at.

h11 takes the protocol apart; sockets, clocks and bounds are here. A connection carries one request. Nothing of it is
kept, and no body is read, before its token is the right one.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import json
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple

import h11

logger = logging.getLogger("glassengine")

PATH = "/capture"
"""The only one there is."""
MAX_CONNECTIONS = 16
MAX_HEAD = 8192
"""Bytes of a request line with all headers."""
MAX_BODY = 4096
MAX_RECEIVED = 2 * (MAX_HEAD + MAX_BODY)
"""Bytes of a whole request as it is sent: a body in chunks is longer than what it says."""
REQUEST_S = 5.0
"""From the first byte that may come to the last byte of the request, however often something comes in between."""
REPLY_S = 5.0
CLOSING_S = 0.5
"""How long the rest of a refused request is thrown away: closing at once would take the reply away from its sender."""
ACCEPTS_PER_S = 100.0
"""New connections; what comes faster waits in the kernel and costs this process nothing."""
BACKLOG = 512
"""How many wait there; later ones are not answered, and retry with increasing delays."""
POLL_S = 0.25

HOSTS = frozenset({b"localhost", b"127.0.0.1", b"[::1]"})
"""What a client on this machine calls it. A page in a browser whose name was pointed at loopback says its own name."""


class Reply(NamedTuple):
    """The reply to a client."""

    status: int
    body: dict[str, Any]


Answer = Callable[[str, bytes, "Connection"], "Reply | None"]
"""(method, body, connection) -> reply; None where `Listener.reply` says it later."""


class Connection:
    """A client, from its connecting to its end."""

    def __init__(self, client: socket.socket, now: float) -> None:
        self.socket = client
        self.protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self.deadline: float | None = now + REQUEST_S
        self.received = 0
        self.request: h11.Request | None = None
        self.body = bytearray()
        self.waiting = False  # for a later reply
        self.unsent = b""
        self.answered = False


class Listener:
    """Takes requests on a port of loopback, in a thread of its own.

    Attributes:
        port: That it listens on.
    """

    def __init__(
        self, port: int, token: str, answer: Answer, left: Callable[[Connection], None], tick: Callable[[], None]
    ) -> None:
        """Bind the port; `start` begins.

        Args:
            port: 0 takes a free one.
            token: Without which nothing is answered.
            answer: Called in the thread of the listener, and returns soon.
            left: Called likewise, for a client that left while it waited for its reply.
            tick: Called likewise, about every `POLL_S`.

        Raises:
            OSError: The port is taken.
        """
        self._socket = socket.create_server(("127.0.0.1", port), backlog=BACKLOG)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._token = b"Bearer " + token.encode()
        self._answer, self._left, self._tick = answer, left, tick
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._connections: dict[socket.socket, Connection] = {}  # in the order in which they came
        self._replies: collections.deque[tuple[Connection, Reply]] = collections.deque()
        self._allowance = float(MAX_CONNECTIONS)
        self._counted = time.monotonic()
        self._accepting = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="glass-profile-server", daemon=True)

    def start(self) -> None:
        """Begin to answer.

        Raises:
            RuntimeError: No more threads can be started.
        """
        self._thread.start()

    def reply(self, connection: Connection, reply: Reply) -> None:
        """Set the reply to a waiting client, from any thread."""
        self._replies.append((connection, reply))
        self._wake_up()

    def close(self) -> None:
        """Stop answering, and drop who is there."""
        self._closing = True
        self._wake_up()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=REPLY_S)
        self.abandon()

    def abandon(self) -> None:
        """Close the files of this process and nothing else: in a forked child the parent goes on listening."""
        for held in (self._socket, self._wake, self._woken, *self._connections):
            held.close()
        self._selector.close()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # it is awake already, or gone
            self._wake.send(b"\0")

    def _run(self) -> None:
        self._selector.register(self._woken, selectors.EVENT_READ)
        polled = time.monotonic()
        try:
            while not self._closing:
                self._listen()
                for key, _ in self._selector.select(self._pause()):
                    if key.fileobj is self._woken:
                        with contextlib.suppress(OSError):
                            self._woken.recv(4096)
                    elif key.fileobj is self._socket:
                        self._accept()
                    else:
                        self._guarded(self._serve, key.data)
                self._send_replies()
                now = time.monotonic()
                for connection in [
                    c for c in self._connections.values() if c.deadline is not None and c.deadline <= now
                ]:
                    self._guarded(self._late, connection)
                if now - polled >= POLL_S:
                    polled = now
                    self._called(self._tick)
        finally:
            self._send_replies()
            for connection in list(self._connections.values()):
                self._drop(connection)

    def _send_replies(self) -> None:
        while self._replies:
            connection, reply = self._replies.popleft()
            if connection.waiting:
                self._guarded(self._send, connection, reply)

    def _pause(self) -> float:
        now = time.monotonic()
        times = [c.deadline - now for c in self._connections.values() if c.deadline is not None]
        if not self._accepting:
            times.append((1.0 - self._allowance) / ACCEPTS_PER_S)
        return max(0.001, min(POLL_S, *times)) if times else POLL_S

    def _listen(self) -> None:
        """Take connections only as fast as they are allowed to come."""
        now = time.monotonic()
        self._allowance = min(self._allowance + (now - self._counted) * ACCEPTS_PER_S, float(MAX_CONNECTIONS))
        self._counted = now
        if (self._allowance >= 1) == self._accepting:
            return
        self._accepting = not self._accepting
        if self._accepting:
            self._selector.register(self._socket, selectors.EVENT_READ)
        else:
            self._selector.unregister(self._socket)

    def _accept(self) -> None:
        self._allowance -= 1
        try:
            client, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no more files may be open: it would be tried again at once, and again
            logger.debug("profile server: no connection was taken: %s", error)
            self._allowance = 1.0 - ACCEPTS_PER_S
            return
        client.setblocking(False)
        # An idle connection makes room for a new one, which has a request.
        while len(self._connections) >= MAX_CONNECTIONS:
            self._drop(next(c for c in self._connections.values() if not c.waiting))
        connection = Connection(client, time.monotonic())
        self._connections[client] = connection
        self._selector.register(client, selectors.EVENT_READ, connection)

    def _guarded(self, work: Callable[..., None], connection: Connection, *args: Any) -> None:
        """Let what goes wrong with one client end that client only."""
        try:
            work(connection, *args)
        except Exception as error:
            if not isinstance(error, OSError):
                logger.warning("profile server: a connection was dropped", exc_info=error)
            self._drop(connection)

    def _serve(self, connection: Connection) -> None:
        if connection.socket not in self._connections:  # dropped since it was selected
            return
        if connection.unsent:
            self._flush(connection)
            return
        try:
            data = connection.socket.recv(4096)
        except BlockingIOError:
            return
        connection.received += len(data)
        if not data:
            self._drop(connection)
        elif connection.answered or connection.waiting:
            if connection.received > MAX_RECEIVED:
                self._drop(connection)
        else:
            self._read(connection, data)

    def _read(self, connection: Connection, data: bytes) -> None:
        try:
            if connection.received > MAX_RECEIVED:
                raise h11.RemoteProtocolError("the request is too large", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            connection.protocol.receive_data(data)
            while not connection.answered and not connection.waiting:
                event = connection.protocol.next_event()
                if isinstance(event, h11.Request):
                    connection.request = event
                    if (refused := self._refused(event)) is not None:
                        self._send(connection, refused)
                    elif connection.protocol.they_are_waiting_for_100_continue:
                        go_on = h11.InformationalResponse(status_code=100, headers=[])
                        connection.socket.send(connection.protocol.send(go_on) or b"")
                elif isinstance(event, h11.Data):
                    connection.body += event.data
                    if len(connection.body) > MAX_BODY:
                        raise h11.RemoteProtocolError("the body is too large", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
                elif isinstance(event, h11.EndOfMessage):
                    self._answer_to(connection)
                else:
                    return
        except h11.RemoteProtocolError as error:
            self._send(connection, Reply(int(error.error_status_hint), {"error": str(error)}))

    def _refused(self, request: h11.Request) -> Reply | None:
        """Return why a request is not for this server; what it asks is looked at last."""
        headers = request.headers.raw_items()
        hosts = [value for name, value in headers if name.lower() == b"host"]
        name, colon, port = hosts[0].rpartition(b":") if hosts else (b"", b"", b"")
        if not colon or port.endswith(b"]"):
            name, port = hosts[0] if hosts else b"", b""
        if len(hosts) != 1 or name.lower() not in HOSTS or (port and not port.isdigit()):
            return Reply(HTTPStatus.FORBIDDEN, {"error": "only for clients on this machine, which call it localhost"})
        tokens = [value for name, value in headers if name.lower() == b"authorization"]
        # Compared in the time that a right one takes, so that none can be found byte by byte.
        if len(tokens) != 1 or not hmac.compare_digest(tokens[0], self._token):
            return Reply(HTTPStatus.UNAUTHORIZED, {"error": "the token of this server is missing or another one"})
        if request.target != PATH.encode():
            return Reply(HTTPStatus.NOT_FOUND, {"error": f"not found; the path is {PATH}"})
        if request.method not in (b"POST", b"DELETE"):
            return Reply(HTTPStatus.METHOD_NOT_ALLOWED, {"error": "POST takes a profile, DELETE ends it"})
        return None

    def _answer_to(self, connection: Connection) -> None:
        assert connection.request is not None
        connection.waiting, connection.deadline = True, None
        reply = self._answer(connection.request.method.decode(), bytes(connection.body), connection)
        if reply is not None:
            self._send(connection, reply)

    def _send(self, connection: Connection, reply: Reply) -> None:
        data = json.dumps(reply.body).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(data))), ("Connection", "close")]
        if reply.status == HTTPStatus.UNAUTHORIZED:
            headers.append(("WWW-Authenticate", "Bearer"))
        if reply.status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers.append(("Allow", "POST, DELETE"))
        is_head = connection.request is not None and connection.request.method == b"HEAD"
        response = h11.Response(status_code=reply.status, headers=headers, reason=HTTPStatus(reply.status).phrase)
        connection.unsent = connection.protocol.send(response) or b""
        if not is_head:
            connection.unsent += connection.protocol.send(h11.Data(data=data)) or b""
        connection.waiting, connection.answered = False, True
        connection.body.clear()
        connection.deadline = time.monotonic() + REPLY_S
        self._selector.modify(connection.socket, selectors.EVENT_WRITE, connection)
        self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        with contextlib.suppress(BlockingIOError):
            connection.unsent = connection.unsent[connection.socket.send(connection.unsent) :]
        if not connection.unsent:
            connection.socket.shutdown(socket.SHUT_WR)
            connection.deadline = time.monotonic() + CLOSING_S
            self._selector.modify(connection.socket, selectors.EVENT_READ, connection)

    def _late(self, connection: Connection) -> None:
        if connection.answered:
            self._drop(connection)
        else:
            self._send(connection, Reply(HTTPStatus.REQUEST_TIMEOUT, {"error": "the request took too long"}))

    def _drop(self, connection: Connection) -> None:
        if self._connections.pop(connection.socket, None) is None:
            return
        self._selector.unregister(connection.socket)
        with contextlib.suppress(OSError):  # also where a child that was forked meanwhile has a copy
            connection.socket.shutdown(socket.SHUT_RDWR)
        connection.socket.close()
        if connection.waiting:
            connection.waiting = False
            self._called(self._left, connection)

    def _called(self, work: Callable[..., None], *args: Any) -> None:
        try:
            work(*args)
        except Exception as error:
            logger.warning("profile server: an error of ours", exc_info=error)
