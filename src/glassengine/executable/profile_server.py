"""Takes profiles of a running process, on request over loopback or by a file; and the client that asks for one.

The process calls `glass.profiler.start_server(9012)` once. Then

    glass profile --capture localhost:9012 --steps 5

in another terminal of the same user takes a profile of the next five steps. So does writing `5` into the file `capture`
in the server's directory; `0` ends a profile. The process alone decides where profiles are written.

Server and client prove to each other that they know a key of this user (`multiprocessing.connection`). Messages are
JSON documents of bounded size, never pickles. The number of clients is bounded, and each of them has a deadline, so
that no client delays the process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import msgspec

from glassengine import environment
from glassengine.errors import CorruptError, GlassError, UsageError, logger
from glassengine.executable.profile_taker import DEFAULT_PORT, DEFAULT_S, Asked, Taker, check
from glassengine.executable.profiling import prepare
from glassengine.reading.documents import parsed
from glassengine.reading.files import read_text, user_key
from glassengine.writing import local

TRIGGER = "capture"
MAX_REQUEST = 4096
"""Bytes of a request."""
MAX_CLIENTS = 16
"""At a time; the oldest one that has sent no request makes room."""
REQUEST_S = 5.0
"""Time of a client from its connection to the end of its request."""
ACCEPT_S = 0.01
"""Least time between two connections; faster ones wait in the kernel."""
BACKLOG = 512
POLL_S = 0.25
_MAX_TRIGGER = 40
_MAX_WRITING_S = 60.0
_running: list[ProfileServer] = []
KEY_FILE = "profile-key"
_MAX_ANSWER = 64 << 10
_FIRST_WORD_S = 10.0
"""How long a server may take until it asks for the key."""
_WRITING_S = 120.0
"""How long a program may take to write a profile."""


class ProfileServer:
    """Takes profiles on request until `stop` or the end of the process.

    Attributes:
        directory: Of the profiles.
        port: On loopback.
    """

    def __init__(self, port: int, directory: Path) -> None:
        self.directory = directory.absolute()  # clients may have another working directory
        self._taker = Taker(self.directory)
        self._seen: tuple[int, int, int] | None = None
        self._stopped = threading.Event()
        self._deadlines: dict[socket.socket, float] = {}  # of the clients, in the order of their connections
        self._threads: set[threading.Thread] = set()
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / TRIGGER).unlink(missing_ok=True)
        key = user_key(KEY_FILE, make=True)
        if key is None:
            raise UsageError(
                "the key of the profile server cannot be used",
                got=str(environment.config_dir() / KEY_FILE),
                expected="a file of 32 bytes that only you can read",
                hint="remove it: a new one is made",
            )
        self._key = key
        try:
            self._socket = socket.create_server(("127.0.0.1", port), backlog=BACKLOG)
        except OSError as error:
            raise UsageError(
                "the profile server cannot listen", got=f"port {port}: {error.strerror}", hint="name another port"
            ) from error
        self._socket.settimeout(POLL_S)
        self.port = int(self._socket.getsockname()[1])
        self._thread(self._listen, "glass-profile-server")
        atexit.register(self.stop)

    def capture(self, steps: int, timeout_s: float = DEFAULT_S) -> dict[str, Any]:
        """Take a profile of the next `steps` steps and return what it holds.

        Args:
            steps: From 1 to 10000.
            timeout_s: Most seconds of the profile, up to 600.

        Raises:
            UsageError: A profile is being taken, or nothing can be written.
        """
        return self._taker.take(check(steps, timeout_s))

    def cancel(self) -> bool:
        """End the profile that is being taken, with the steps so far; return whether there is one."""
        return self._taker.cancel()

    def stop(self) -> None:
        """Stop listening; a profile that is being taken ends with the steps so far."""
        atexit.unregister(self.stop)
        self._stopped.set()
        self._taker.finish(_MAX_WRITING_S)  # torch's profiler must not outlive the process
        for client, deadline in list(self._deadlines.items()):
            if math.isfinite(deadline):
                _end(client)
        self._taker.finish(_MAX_WRITING_S)  # of a request that came in between
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(timeout=_MAX_WRITING_S)
        self._socket.close()
        if self in _running:
            _running.remove(self)

    def _abandon(self) -> None:
        """Close the port and the clients in a forked child; the parent goes on."""
        atexit.unregister(self.stop)
        self._socket.close()
        for client in self._deadlines:
            client.close()
        self._deadlines, self._threads = {}, set()
        self._taker = Taker(self.directory)

    def _thread(self, work: Callable[[], None], name: str) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:
                logger.warning("profile server: an internal error", exc_info=error)
            finally:
                self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except BaseException:
            self._threads.discard(thread)
            raise

    def _listen(self) -> None:
        polled = 0.0
        while not self._stopped.is_set():
            with contextlib.suppress(OSError, RuntimeError):  # nobody came, or no more files or threads
                client, _ = self._socket.accept()
                self._deadlines[client] = time.monotonic() + REQUEST_S
                try:
                    self._thread(lambda client=client: self._serve(client), "glass-profile-client")  # type: ignore[misc]
                except RuntimeError:
                    self._leave(client)
            waiting = [client for client, deadline in list(self._deadlines.items()) if math.isfinite(deadline)]
            now, num_more = time.monotonic(), len(self._deadlines) - MAX_CLIENTS
            for number, client in enumerate(waiting):
                if number < num_more or self._deadlines.get(client, math.inf) < now:
                    _end(client)
            if now - polled >= POLL_S:
                polled = now
                try:
                    self._look_at_trigger()
                except Exception as error:  # no more threads, say: the server goes on
                    logger.warning("profile server: no look at %s", self.directory / TRIGGER, exc_info=error)
            self._stopped.wait(ACCEPT_S)

    def _serve(self, client: socket.socket) -> None:
        """Answer a client; its errors end its connection alone."""
        try:
            with Connection(client.dup().detach()) as connection:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                request = connection.recv_bytes(MAX_REQUEST)
                self._deadlines[client] = math.inf
                connection.send_bytes(json.dumps(self._answer(request, connection.poll)).encode())
        except (OSError, EOFError, AuthenticationError, AssertionError, ValueError) as error:  # Python 3.11 asserts
            logger.debug("profile server: a client is refused: %s", error)
        finally:
            self._leave(client)

    def _leave(self, client: socket.socket) -> None:
        self._deadlines.pop(client, None)
        _end(client)
        client.close()

    def _answer(self, request: bytes, is_left: Callable[[], bool]) -> dict[str, Any]:
        try:
            asked = parsed(request, Asked, "the message", what="the request")
        except GlassError as error:
            return {"error": str(error)}
        return self._taken(asked, is_left)

    def _taken(self, asked: Asked, is_left: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Return a description of the profile that is taken, or an error."""
        try:
            return self._taker.take(asked, is_left)
        except GlassError as error:
            return {"error": str(error)}
        except Exception as error:  # of torch's profiler, which the program may use itself
            logger.warning("no profile was taken", exc_info=error)
            return {"error": f"{type(error).__name__}: {error}"}

    def _look_at_trigger(self) -> None:
        trigger = self.directory / TRIGGER
        try:
            found = trigger.lstat()
        except OSError:
            self._seen = None
            return
        state = (found.st_ino, found.st_size, found.st_mtime_ns)
        if state != self._seen:  # it may still be being written
            self._seen = state
            return
        try:
            text = self._trigger_text(trigger, found)
        except GlassError as error:
            text, reason = "", str(error)
        else:
            reason = "" if text.isascii() and (text or "1").isdigit() else f"it holds {text!r}"
        try:
            trigger.unlink()
        except OSError as error:  # what cannot be taken away would start one profile after another
            logger.debug("profile server: %s stays: %s", trigger, error)
            return
        if reason:
            logger.warning("no profile: %s: %s", trigger, reason)
        elif int(text or 1) == 0:
            self.cancel()
        else:
            try:
                asked = check(int(text or 1), DEFAULT_S)
            except UsageError as error:
                logger.warning("no profile: %s: %s", trigger, error)
                return
            self._thread(lambda: logger.warning("profile: %s", self._taken(asked)), "glass-profile-capture")

    def _trigger_text(self, trigger: Path, found: os.stat_result) -> str:
        # In a directory that others may write to, their files ask for nothing.
        if not stat.S_ISREG(found.st_mode) or (hasattr(os, "geteuid") and found.st_uid not in (os.geteuid(), 0)):
            raise UsageError("not a plain file of this user")
        return read_text(trigger, most=_MAX_TRIGGER, inside=self.directory).strip()


def _end(client: socket.socket) -> None:
    """End a connection, also for a forked child that has a copy of it."""
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


def start_server(port: int = DEFAULT_PORT, *, directory: str | Path = "profiles") -> ProfileServer:
    """Let programs of the same user on this machine ask for profiles of this process.

    Args:
        port: On loopback; 0 selects a free one.
        directory: Of the profiles, and of the file `capture` that asks for one.

    Raises:
        UsageError: The port is taken, or the directory or the key cannot be made.
    """
    if not 0 <= port < 1 << 16:
        raise UsageError("the profile server cannot listen", got=f"port {port}", expected="0 to 65535")
    prepare()
    try:
        server = ProfileServer(port, local(directory))
    except OSError as error:
        raise UsageError(
            "the profile server cannot write its directory or its key", got=f"{error.filename}: {error.strerror}"
        ) from error
    _running.append(server)  # kept alive whether or not the caller keeps it
    return server


def _reset_in_child() -> None:
    """Let a forked worker of a data loader hold neither the port nor a connection of its parent."""
    for server in _running:
        server._abandon()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)


class _Answer(msgspec.Struct):
    """Answer of the server: the first four fields describe a profile; otherwise there is an error."""

    directory: str = ""
    num_steps: int = 0
    complete: bool = False
    ended: str = ""
    error: str = ""


def request_profile(address: str, *, steps: int = 1, timeout_s: float = DEFAULT_S) -> dict[str, Any]:
    """Ask the server at `address` ("localhost:9012") for a profile and return its answer.

    If the caller is interrupted while it waits, the profile ends with the steps so far.

    Args:
        address: On this machine.
        steps: Number of steps.
        timeout_s: Most seconds of the profile.

    Raises:
        UsageError: No server of this user answers, or it takes no profile.
    """
    found = re.fullmatch(r"(?:http://)?(?:localhost|127\.0\.0\.1):([0-9]{1,5})/?", address)
    port = int(found[1]) if found else 0
    if not 0 < port < 1 << 16:
        raise UsageError("not the address of a profile server", got=address, expected=f"localhost:{DEFAULT_PORT}")
    check(steps, timeout_s)
    try:
        key = user_key(KEY_FILE)
        if key is None:
            raise ConnectionRefusedError("this user has started no profile server")
        # "localhost" may resolve to an address of another server.
        with Client(("127.0.0.1", port)) as connection:
            data = _asked(connection, key, {"steps": steps, "timeout_s": timeout_s}, timeout_s + _WRITING_S)
        answer = parsed(data, _Answer, address, what="the answer of a profile server")
    except (OSError, EOFError, AuthenticationError, AssertionError, CorruptError) as error:  # Python 3.11 asserts
        raise UsageError(
            "no profile server of this user answers",
            got=f"{address}: {error or type(error).__name__}",
            hint=f"glass.profiler.start_server({port}) in the program",
        ) from error
    if answer.error:
        raise UsageError("the program takes no profile", got=answer.error)
    return {name: getattr(answer, name) for name in ("directory", "num_steps", "complete", "ended")}


def _asked(connection: Connection[Any, Any], key: bytes, request: dict[str, Any], timeout_s: float) -> bytes:
    """Return the answer to a request; both sides prove that they know the key."""
    if not connection.poll(_FIRST_WORD_S):
        raise TimeoutError("no answer: another kind of server, or a busy one")
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    connection.send_bytes(json.dumps(request).encode())
    if not connection.poll(timeout_s):
        raise TimeoutError("no answer in time")
    return connection.recv_bytes(_MAX_ANSWER)
