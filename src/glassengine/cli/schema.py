"""`glass schema`: the JSON schema of what a command writes with `--json`."""

from __future__ import annotations

from typing import Annotated

import typer

from glassengine.cli.documents import answer, json_pieces, write_text
from glassengine.cli.options import out, settings
from glassengine.schemas import COMMANDS, schema


def command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="COMMAND",
            help="check, check-training, compare or report; default: list them.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Print the JSON schema of the --json document of a command."""
    if name is None:
        listed = {found: schema(found)["$id"] for found in COMMANDS}
        lines = "\n".join(f"{found:<16}{identity}" for found, identity in listed.items())
        answer(lambda: {"schemas": listed}, lambda: out.print(lines))
    else:
        write_text(json_pieces(schema(name)), settings.json or "-")
    return 0
