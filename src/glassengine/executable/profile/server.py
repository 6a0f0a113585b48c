"""Take profiles of a process that runs: asked for over loopback, or by a file.

The process says `glass.profiler.start_server(9012)` once. Then, from another terminal of the same user,

    glass profile --capture localhost:9012 --steps 5

takes a profile of the next five steps; so does writing `5` into the file `capture` in the server's directory, and `0`
ends one that is being taken. Where the profiles go is the process's choice, never the request's. A request needs the
token from a file that only this user can read (`profile_token`).
"""

from __future__ import annotations

import atexit
import logging
import os
import stat
import threading
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from glassengine.errors import CorruptError, GlassError, UsageError
from glassengine.executable.profile.profile import prepare
from glassengine.executable.profile.requests import Connection, Listener, Reply
from glassengine.executable.profile.taker import DEFAULT_PORT, DEFAULT_S, Asked, Taker, check
from glassengine.executable.profile.token import Entry, TokenFile, new_token, write
from glassengine.reading.documents import parsed
from glassengine.reading.files import read_text
from glassengine.writing.locations import local

logger = logging.getLogger("glassengine")

TRIGGER = "capture"
_MAX_TRIGGER = 40
_MAX_WRITING_S = 60.0
_running: list[ProfileServer] = []


class ProfileServer:
    """Takes profiles on request until `stop` or the end of the process.

    Attributes:
        directory: Where profiles are written.
        port: On loopback.
        token_file: Where a client finds the token that it has to send.
    """

    def __init__(self, port: int, directory: Path, token_file: Path | None = None) -> None:
        directory = directory.absolute()  # clients and the program may have other working directories
        self.directory = directory
        self._taker = Taker(directory)
        self._client: Connection | None = None
        self._thread: threading.Thread | None = None
        self._seen: tuple[int, int, int] | None = None
        self._token: TokenFile | None = None
        directory.mkdir(parents=True, exist_ok=True)
        (directory / TRIGGER).unlink(missing_ok=True)
        token = new_token()
        try:
            self._listener = Listener(port, token, self._answer, self._left, self._look_at_trigger)
        except OSError as error:
            raise UsageError(
                "the profile server cannot listen", got=f"port {port}: {error.strerror}", hint="name another port"
            ) from error
        try:
            self.port = self._listener.port
            entry = Entry(self.port, token, os.getpid(), str(directory))
            self._token = write(entry, token_file)
            self.token_file = self._token.path
            self._listener.start()
        except BaseException:
            self._listener.close()
            if self._token is not None:
                self._token.remove()
            raise
        atexit.register(self.stop)

    def capture(self, steps: int, timeout_s: float = DEFAULT_S) -> dict[str, Any]:
        """Take a profile of the next `steps` steps and return what it holds.

        Args:
            steps: From 1 to 10000.
            timeout_s: It ends after this many seconds, 600 at most.

        Raises:
            UsageError: A profile is being taken, or nothing can be written.
        """
        asked = check(steps, timeout_s)
        self._taker.reserve()
        return self._taker.take(asked)

    def cancel(self) -> bool:
        """End the profile that is being taken with the steps that it has; return whether there is one."""
        return self._taker.cancel()

    def stop(self) -> None:
        """Stop listening and watching; a profile that is being taken ends with the steps it has."""
        atexit.unregister(self.stop)
        if self._token is not None:
            self._token.remove()
        self._finish()  # before the listener, which tells the client
        self._listener.close()
        self._finish()  # what was asked for in between
        if self in _running:
            _running.remove(self)

    def _finish(self) -> None:
        """End what is being taken: torch's profiler must not outlive the process."""
        self._taker.finish(_MAX_WRITING_S)
        if self._thread is not None:
            self._thread.join(timeout=_MAX_WRITING_S)

    def _abandon(self) -> None:
        """In a forked child: the server, its port, its token and what it takes are the parent's."""
        atexit.unregister(self.stop)
        self._listener.abandon()
        if self._token is not None:
            self._token.abandon()
        self._taker = Taker(self.directory)

    def _answer(self, method: str, body: bytes, client: Connection) -> Reply | None:
        """Begin what a client asks for; the reply comes at its end."""
        if method == "DELETE":
            return Reply(HTTPStatus.OK, {"cancelled": self.cancel()})
        try:
            asked = parsed(body or b"{}", Asked, "the body", what="the request")
        except CorruptError as error:
            return Reply(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        try:
            self._begin(asked, lambda reply: self._listener.reply(client, reply))
        except UsageError as error:
            return Reply(HTTPStatus.CONFLICT, {"error": str(error)})
        self._client = client
        return None

    def _left(self, client: Connection) -> None:
        if client is self._client:
            self.cancel()

    def _begin(self, asked: Asked, then: Callable[[Reply], None]) -> None:
        """Take a profile in a thread of its own, of which there is one at a time.

        Raises:
            UsageError: One is being taken.
        """
        self._taker.reserve()
        thread = threading.Thread(target=self._take, args=(asked, then), name="glass-profile-capture", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._taker.release()
            raise UsageError("no profile can be taken", got=str(error)) from error
        self._thread = thread

    def _take(self, asked: Asked, then: Callable[[Reply], None]) -> None:
        try:
            reply = Reply(HTTPStatus.OK, self._taker.take(asked))
        except GlassError as error:
            reply = Reply(HTTPStatus.CONFLICT, {"error": str(error)})
        except Exception as error:  # of torch's profiler, which the program may use itself
            logger.warning("no profile was taken", exc_info=error)
            reply = Reply(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"})
        then(reply)

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
                self._begin(check(int(text or 1), DEFAULT_S), lambda reply: logger.warning("profile: %s", reply.body))
            except UsageError as error:
                logger.warning("no profile: %s: %s", trigger, error)

    def _trigger_text(self, trigger: Path, found: os.stat_result) -> str:
        # In a directory that others may write to, their files ask for nothing.
        if not stat.S_ISREG(found.st_mode) or (hasattr(os, "geteuid") and found.st_uid not in (os.geteuid(), 0)):
            raise UsageError("not a plain file of this user")
        return read_text(trigger, most=_MAX_TRIGGER, inside=self.directory).strip()


def start_server(
    port: int = DEFAULT_PORT, *, directory: str | Path = "profiles", token_file: str | Path | None = None
) -> ProfileServer:
    """Let profiles of this process be asked for, by programs of the same user on this machine.

    Args:
        port: On loopback; 0 takes a free one.
        directory: Where they are written, and where the file `capture` asks for one.
        token_file: Where to write the token that a client must send, readable by this user only; None: where
            `glass profile --capture` finds it by itself.

    Raises:
        UsageError: The port is taken, or the directory or the token file cannot be made.
    """
    if not 0 <= port < 1 << 16:
        raise UsageError("the profile server cannot listen", got=f"port {port}", expected="0 to 65535")
    prepare()
    try:
        server = ProfileServer(port, local(directory), None if token_file is None else local(token_file))
    except OSError as error:
        raise UsageError(
            "the profile server cannot use its directory", got=f"{error.filename}: {error.strerror}"
        ) from error
    _running.append(server)  # kept alive whether or not the caller keeps it
    return server


def _begin_anew() -> None:
    """A forked worker of a data loader holds neither the port nor a connection of its parent."""
    for server in _running:
        server._abandon()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
