"""`glass verify`: who signed an engine, and whether it is as it was then."""

from __future__ import annotations

from typing import Annotated

import typer

from glassengine import commands
from glassengine.cli.options import out, write_json


def command(
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help="Directory of an engine.", show_default=False)],
    signers: Annotated[
        str,
        typer.Option(metavar="FILE", help="Trusted signers: lines 'NAME KEY' (OpenSSH allowed signers)."),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print a JSON document.")] = False,
) -> int:
    """Check the signature and all files of an engine, without running it."""
    found = commands.verify_engine(engine, signers)
    if json:
        write_json({"schema_version": 1, **found.to_dict()}, "-")
        return 0
    out.print(f"{found.directory}: signed by {found.signer} ({found.key}), {found.files} files as they were signed")
    return 0
