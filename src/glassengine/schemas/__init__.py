"""The published JSON schemas of `--json`: one file per command, generated from the classes of `glassengine.results`.

`glass schema check` prints one. A schema is closed: the documents of its release have these keys and no other.
`make schemas` writes the files, e.g. after a key of a result is added; a test compares them with the classes, and
validates real documents.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from glassengine.errors import UnknownNameError

COMMANDS = ("check", "check-training", "compare", "report")
"""Commands whose documents have a schema; that of `check-training` is that of `check`."""


def schema(command: str) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of the documents of a command.

    Raises:
        UnknownNameError: There is none for it.
    """
    if command not in COMMANDS:
        raise UnknownNameError("command with a schema", command, COMMANDS, hint="glass schema check")
    name = command.removesuffix("-training")
    document: dict[str, Any] = json.loads(files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8"))
    return document
