"""Take profiles of a process that runs: asked for over loopback, or by a file.

The process says `glass.start_server(9012)` once. Then, from another terminal,

    glass profile --capture localhost:9012 --steps 5

takes a profile of the next five steps; so does writing `5` into the file `capture` in the server's directory. Where the
profiles go is the process's choice, never the request's, and a request that a browser was tricked into is refused.
"""

from __future__ import annotations

import atexit
import http.client
import json
import logging
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from glassengine import spans
from glassengine.errors import GlassError, UsageError
from glassengine.executable.profile import Profile, prepare
from glassengine.locations import local

logger = logging.getLogger("glassengine")

TRIGGER = "capture"
DEFAULT_PORT = 9012
HEADER = "X-Glass-Engine"
_MAX_BODY = 4096
_POLL_S = 0.25
_MAX_WRITING_S = 60.0
_running: list[ProfileServer] = []


class ProfileServer:
    """Takes profiles on request until `stop` or the end of the process.

    Attributes:
        directory: Where profiles are written.
        port: On loopback.
    """

    def __init__(self, port: int, directory: Path) -> None:
        self.directory = directory
        self._done = threading.Event()
        self._capturing = threading.Lock()
        self._enough = threading.Event()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / TRIGGER).unlink(missing_ok=True)
        server = self

        class Handler(_Handler):
            owner = server

        try:
            self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise UsageError(
                "the profile server cannot listen", got=f"port {port}: {error.strerror}", hint="name another port"
            ) from error
        self._http.daemon_threads = True
        self.port = int(self._http.server_address[1])
        for work in (self._http.serve_forever, self._watch_file):
            threading.Thread(target=work, name="glass-profile-server", daemon=True).start()
        atexit.register(self._finish)

    def capture(self, steps: int, timeout_s: float = 60.0) -> dict[str, Any]:
        """Take a profile of the next `steps` steps and return what it holds.

        Raises:
            UsageError: A profile is being taken, or nothing can be written.
        """
        if steps < 1:
            raise UsageError("a profile covers at least one step", got=f"{steps}", hint="--steps N")
        if not 0 <= timeout_s <= threading.TIMEOUT_MAX:
            raise UsageError("that is no time to wait", got=f"timeout_s={timeout_s}", expected="seconds")
        if not self._capturing.acquire(blocking=False):
            raise UsageError("another profile is being taken in this process", hint="wait until it has ended")
        try:
            taken = Profile(self.directory)
            self._enough.clear()
            taken.start()
            undo = spans.on_step_end(lambda: self._enough.set() if taken.num_steps >= steps else None)
            try:
                self._enough.wait(timeout_s)
            finally:
                undo()
                taken.stop()
        finally:
            self._capturing.release()
        complete = taken.num_steps >= steps
        return {"directory": str(taken.directory), "num_steps": taken.num_steps, "complete": complete}

    def _finish(self) -> None:
        """End what is being taken, as the process ends: torch's profiler must not outlive it."""
        self._enough.set()
        if self._capturing.acquire(timeout=_MAX_WRITING_S):
            self._capturing.release()

    def stop(self) -> None:
        """Stop listening and watching; a profile that is being taken ends with the steps it has."""
        atexit.unregister(self._finish)
        self._done.set()
        self._finish()
        self._http.shutdown()
        self._http.server_close()
        if self in _running:
            _running.remove(self)

    def _watch_file(self) -> None:
        trigger = self.directory / TRIGGER
        while not self._done.wait(_POLL_S):
            try:
                if time.time() - trigger.stat().st_mtime < _POLL_S:
                    continue  # it may still be being written
                text = trigger.read_text(encoding="utf-8", errors="replace")[:40].strip()
                trigger.unlink()
            except OSError:
                continue
            try:
                logger.warning("profile taken: %s", self.capture(int(text or 1)))
            except (GlassError, ValueError) as error:
                logger.warning("no profile: %s holds %r: %s", trigger, text, error)


class _Handler(BaseHTTPRequestHandler):
    owner: ProfileServer

    def do_POST(self) -> None:
        # A page in a browser can post to loopback, but cannot set this header without being allowed to.
        host = self.headers.get("Host", "").rpartition(":")[0]
        if self.headers.get(HEADER) is None or host not in ("localhost", "127.0.0.1"):
            self._answer(403, {"error": f"only for local clients that send {HEADER}"})
            return
        try:
            asked = json.loads(self.rfile.read(min(int(self.headers.get("Content-Length", 0)), _MAX_BODY)) or b"{}")
            answer = self.owner.capture(int(asked.get("steps", 1)), float(asked.get("timeout_s", 60.0)))
        except (GlassError, ValueError, OverflowError, AttributeError, TypeError) as error:
            self._answer(400, {"error": str(error)})
            return
        self._answer(200, answer)

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("profile server: " + format, *args)


def start_server(port: int = DEFAULT_PORT, *, directory: str | Path = "profiles") -> ProfileServer:
    """Let profiles of this process be asked for.

    Args:
        port: On loopback; 0 takes a free one.
        directory: Where they are written, and where the file `capture` asks for one.

    Raises:
        UsageError: The port is taken, or the directory cannot be made.
    """
    prepare()
    try:
        server = ProfileServer(port, local(directory))
    except OSError as error:
        raise UsageError(
            "the profile server cannot use its directory", got=f"{error.filename}: {error.strerror}"
        ) from error
    _running.append(server)  # kept alive whether or not the caller keeps it
    return server


def request_profile(address: str, *, steps: int = 1, timeout_s: float = 60.0) -> dict[str, Any]:
    """Ask the server at `address` ("localhost:9012") for a profile and return its answer.

    Raises:
        UsageError: There is no server, or it takes no profile; says why.
    """
    host, _, port = address.rpartition(":")
    if host not in ("localhost", "127.0.0.1") or not port.isdecimal():
        raise UsageError("not the address of a profile server", got=address, expected=f"localhost:{DEFAULT_PORT}")
    body = json.dumps({"steps": steps, "timeout_s": timeout_s})
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s + 60)
    try:
        connection.request("POST", "/capture", body, {HEADER: "1", "Content-Type": "application/json"})
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UsageError(
            "no profile server answers", got=f"{address}: {error}", hint=f"glass.start_server({port}) in the program"
        ) from error
    finally:
        connection.close()
    if response.status != 200:
        raise UsageError("the program takes no profile", got=str(answer.get("error")))
    return answer
