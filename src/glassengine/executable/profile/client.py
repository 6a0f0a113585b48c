"""Asks a running program for a profile: the client of `ProfileServer`."""

from __future__ import annotations

import json
import re
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any

import msgspec

from glassengine.errors import CorruptError, UsageError
from glassengine.executable.profile.taker import DEFAULT_PORT, DEFAULT_S, check
from glassengine.reading.documents import parsed
from glassengine.reading.files import user_key

KEY_FILE = "profile-key"
_MAX_ANSWER = 64 << 10
_FIRST_WORD_S = 10.0
"""How long a server may take until it asks for the key."""
_WRITING_S = 120.0
"""How long a program may take to write a profile."""


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
