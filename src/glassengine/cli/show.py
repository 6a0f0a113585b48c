"""`glass show`: the tensors of a recording and their statistics."""

from __future__ import annotations

from typing import Annotated

import typer

import glassengine as glass
from glassengine.cli.options import out, progress, write_json


def command(
    recording: Annotated[str, typer.Argument(help="Directory of a recording.", show_default=False)],
    pattern: Annotated[
        str | None, typer.Argument(help="Show only these sites: name, glob or re:.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Show the tensors of a recording and their statistics."""
    opened = glass.Recording.open(recording)
    entries = opened.entries if pattern is None else opened.select(pattern)
    rows = []
    with progress("statistics", total=len(entries)) as advance:
        for entry in entries:
            rows.append((entry, opened.summary(entry)))
            advance(1)
    if json:
        tensors = [
            {"step": entry.step, "rank": entry.rank, "site": entry.site, "node": entry.node, **found.to_dict()}
            for entry, found in rows
        ]
        document = {
            "schema_version": 1,
            "recording": str(opened.path),
            "complete": opened.complete,
            "incomplete_because": opened.incomplete_because,
            "steps": opened.steps,
            "metadata": opened.metadata,
            "tensors": tensors,
        }
        write_json(document, "-")
        return 0
    from glassengine.report.terminal_compare import recording as table

    out.print(
        table(
            ((entry.step, entry.rank, entry.site, found) for entry, found in rows),
            complete=opened.complete,
            reason=opened.incomplete_because,
        )
    )
    return 0
