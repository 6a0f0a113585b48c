"""`glass schema`: the JSON schema of what a command writes with `--json`."""

from __future__ import annotations

from typing import Annotated

import typer

from glassengine.cli.documents import json_text, write_text
from glassengine.cli.options import settings
from glassengine.schemas import schema


def command(
    name: Annotated[
        str, typer.Argument(metavar="COMMAND", help="check, check-training or compare.", show_default=False)
    ],
) -> int:
    """Print the JSON schema of the --json document of a command."""
    write_text(json_text(schema(name)), settings.json or "-")
    return 0
