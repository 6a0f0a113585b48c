"""`glass verify`: who signed an engine, and whether it is as it was then."""

from __future__ import annotations

from typing import Annotated

import typer

from glassengine import commands
from glassengine.cli.documents import answer
from glassengine.cli.options import out


def command(
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help="Directory of an engine.", show_default=False)],
    signers: Annotated[
        str,
        typer.Option(metavar="FILE", help="Trusted signers: lines 'NAME KEY' (OpenSSH allowed signers)."),
    ],
) -> int:
    """Check the signature and all files of an engine, without running it."""
    found = commands.verify_engine(engine, signers)
    said = f"{found.directory}: signed by {found.signer} ({found.key}), {found.files} files as they were signed"
    answer(found.to_dict, lambda: out.print(said))
    return 0
