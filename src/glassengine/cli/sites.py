"""`glass sites`: the names of every tensor, before anything is built."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import glassengine as glass
from glassengine.cli.documents import answer
from glassengine.cli.options import err, out, progress, settings
from glassengine.cli.shared import Checkpoint, ModuleInputs
from glassengine.stores.places import place


def command(
    target: Annotated[
        str, typer.Argument(metavar="MODEL|ENGINE|RECORDING", help="Model, engine or recording.", show_default=False)
    ],
    pattern: Annotated[
        str | None,
        typer.Argument(metavar="PATTERN", help="List only these: site, alias, glob or re:.", show_default=False),
    ] = None,
    inputs: ModuleInputs = None,
    *,
    checkpoint: Checkpoint,
) -> int:
    """List the tensor names of a model, engine or recording, without building."""
    directory = place(target)
    if [*directory.glob("recording.json"), *directory.glob("*/recording.json")]:
        rows = _recorded(target, pattern)
    else:
        with progress(f"exporting {target}"):
            found = glass.sites(target, pattern, inputs=inputs, **vars(checkpoint))
        rows = [site.to_dict() for site in found]

    def show() -> None:
        _print(rows)
        if not settings.quiet:
            err.print(f"{len(rows)} sites" + (f" match {pattern!r}" if pattern else ""))

    answer(lambda: {"target": target, "pattern": pattern, "sites": rows}, show)
    return 0


def _recorded(directory: str, pattern: str | None) -> list[dict[str, Any]]:
    """Return the sites of a recording, each once; their steps are listed in place of the aliases."""
    recording = glass.Recording.open(directory)
    entries = recording.entries if pattern is None else recording.select(pattern)
    rows: dict[str, dict[str, Any]] = {}
    for entry in entries:
        row = rows.setdefault(
            entry.site,
            {"name": entry.site, "op": "", "dtype": entry.dtype, "shape": entry.shape, "aliases": [], "steps": []},
        )
        row["steps"].append(entry.step)
        if entry.node and entry.node not in row["aliases"]:
            row["aliases"].append(entry.node)
    return list(rows.values())


def _print(rows: list[dict[str, Any]]) -> None:
    cells = [("site", "op", "dtype", "shape", "aliases")]
    for row in rows:
        shape = f"[{', '.join(map(str, row['shape']))}]"
        cells.append((row["name"], row["op"], row["dtype"], shape, " ".join(row["aliases"])))
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    for line in cells:
        text = "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[4]])
        out.print(text.rstrip())
