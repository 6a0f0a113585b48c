"""`glass upload`: bring a recording to an object store, or the rest of one whose process was killed."""

from __future__ import annotations

from typing import Annotated

import typer

from glassengine import commands
from glassengine.cli.documents import answer
from glassengine.cli.options import out, progress


def command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="URL | DIR",
            help="Place of a recording of which a part is still here; or a recording of this machine.",
            show_default=False,
        ),
    ],
    target: Annotated[
        str | None,
        typer.Argument(metavar="URL", help="With DIR: where it goes, e.g. s3://bucket/run.", show_default=False),
    ] = None,
) -> int:
    """Bring a recording to an object store, or the rest of one that was cut off."""
    with progress(f"uploading {source}"):
        found = commands.upload(source, target)
    said = f"uploaded {found.url}: {found.num_files} files, {found.num_steps} steps"
    answer(found.to_dict, lambda: out.print(said if found.complete else f"{said}, incomplete"))
    return 0
