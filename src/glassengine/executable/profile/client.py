"""Ask a program that runs for a profile: the other end of `profile_server`."""

from __future__ import annotations

import http.client
import json
import re
from pathlib import Path
from typing import Any

import msgspec

from glassengine.errors import CorruptError, UsageError
from glassengine.executable.profile.requests import PATH
from glassengine.executable.profile.taker import DEFAULT_PORT, DEFAULT_S, check
from glassengine.executable.profile.token import token_of
from glassengine.reading.documents import parsed

_MAX_ANSWER = 64 << 10
_WRITING_S = 120.0
"""How long a program may write what it took."""


class _Answer(msgspec.Struct):
    """What the server says: the first four of a profile, or an error."""

    directory: str = ""
    num_steps: int = 0
    complete: bool = False
    ended: str = ""
    error: str = ""


def request_profile(
    address: str, *, steps: int = 1, timeout_s: float = DEFAULT_S, token_file: str | Path | None = None
) -> dict[str, Any]:
    """Ask the server at `address` ("localhost:9012") for a profile and return its answer.

    A caller that goes away while it waits, by Ctrl-C for example, ends the profile with the steps that it has.

    Args:
        address: On this machine.
        steps: How many.
        timeout_s: For how many seconds at most.
        token_file: What the server wrote, where it is not at the usual place of this user.

    Raises:
        UsageError: No server answers, or it takes no profile; with the reason.
        CorruptError: The token file is damaged.
    """
    found = re.fullmatch(r"(?:http://)?(?:localhost|127\.0\.0\.1):([0-9]{1,5})/?", address)
    port = int(found[1]) if found else 0
    if not 0 < port < 1 << 16:
        raise UsageError("not the address of a profile server", got=address, expected=f"localhost:{DEFAULT_PORT}")
    check(steps, timeout_s)
    headers = {"Authorization": f"Bearer {token_of(port, token_file)}", "Content-Type": "application/json"}
    body = json.dumps({"steps": steps, "timeout_s": timeout_s})
    # Not by name: the token is for the listener at this address, and "localhost" may resolve to another one.
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s + _WRITING_S)
    try:
        connection.request("POST", PATH, body, headers)
        response = connection.getresponse()
        answer = parsed(response.read(_MAX_ANSWER), _Answer, address, what="the answer of a profile server")
    except (OSError, http.client.HTTPException, CorruptError) as error:
        raise UsageError(
            "no profile server answers",
            got=f"{address}: {error}",
            hint=f"glass.profiler.start_server({port}) in the program",
        ) from error
    finally:
        connection.close()
    if response.status != 200:
        raise UsageError("the program takes no profile", got=answer.error or f"status {response.status}")
    return {name: getattr(answer, name) for name in ("directory", "num_steps", "complete", "ended")}
