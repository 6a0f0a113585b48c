"""`glass snapshot`: what is in a snapshot, or in a directory of them; one of them as a single file."""

from __future__ import annotations

from typing import Annotated

import typer

import glassengine as glass
from glassengine import asked
from glassengine.cli.documents import answer
from glassengine.cli.options import out
from glassengine.cli.shared import Overwrite
from glassengine.errors import UnknownNameError, UsageError
from glassengine.stores.places import place, size_of

ACTIONS = ("show", "pack")


def command(
    action: Annotated[str, typer.Argument(metavar="show|pack", help="What to do with it.", show_default=False)],
    snapshot: Annotated[
        str,
        typer.Argument(
            metavar="SNAPSHOT",
            help="Snapshot directory or packed file; show also takes a directory of snapshots.",
            show_default=False,
        ),
    ],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="pack: file to write; default: SNAPSHOT.safetensors."),
    ] = None,
    statistics: Annotated[
        bool, typer.Option("--statistics", help="show: min, mean, max and non-finite counts of every tensor.")
    ] = False,
    overwrite: Overwrite = False,
) -> int:
    """Show the content of a snapshot, or pack it into one file."""
    if action not in ACTIONS:
        raise UnknownNameError("action", action, ACTIONS, hint="glass snapshot show SNAPSHOT")
    if action == "pack":
        if statistics:
            raise UsageError("--statistics goes with show", hint=f"glass snapshot show {snapshot} --statistics")
        asked.existing(snapshot)
        found = glass.snapshots.Snapshot.open(snapshot)
        path = found.pack(output or f"{snapshot.rstrip('/')}.safetensors", overwrite=overwrite)
        size = size_of(path)
        answer(lambda: {"packed": str(path), "num_bytes": size}, lambda: out.print(f"packed {path}: {size:,} bytes"))
        return 0
    if output is not None or overwrite:
        raise UsageError("--output and --overwrite go with pack", hint=f"glass snapshot pack {snapshot} -o FILE")
    asked.existing(snapshot)
    from glassengine.report import terminal_show

    directory = place(snapshot)
    if directory.is_dir() and not (directory / "meta.json").exists():
        several = glass.snapshots.list(snapshot)
        answer(
            lambda: {"snapshots": [listed.to_dict() for listed in several]},
            lambda: out.print(terminal_show.snapshot_list(several)),
        )
        return 0
    found = glass.snapshots.Snapshot.open(snapshot)
    answer(
        lambda: found.to_dict(statistics=statistics),
        lambda: out.print(terminal_show.snapshot_content(found, statistics=statistics)),
    )
    return 0
