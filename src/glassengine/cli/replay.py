"""`glass replay`: run a snapshot again; compare it, find its first NaN, or find what the compiler breaks."""

from __future__ import annotations

from typing import Annotated

import typer

import glassengine as glass
from glassengine.cli.options import out, stages, write_json


def command(
    snapshot: Annotated[str, typer.Argument(help="Directory of a snapshot, or a packed one.", show_default=False)],
    backend: Annotated[
        str | None, typer.Option(help="What runs it; default: what ran it when it was recorded.", show_default=False)
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Judge every op by its float64 result on the same inputs.")
    ] = False,
    first_nonfinite: Annotated[
        bool, typer.Option("--first-nonfinite", help="Name the op that made the first NaN or infinity.")
    ] = False,
    bisect: Annotated[
        bool, typer.Option("--bisect", help="Find the smallest piece of the graph that the back-end breaks.")
    ] = False,
    reproduction: Annotated[
        str | None, typer.Option(metavar="DIR", help="With --bisect: write a test of that piece.")
    ] = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the result as one JSON document; - is stdout.")
    ] = None,
) -> int:
    """Run a snapshot again, without the code that it came from.

    Exit status: 0 the same bits (or the same up to rounding, nothing not finite, nothing broken), 1 not so.
    """
    with stages((("compiling", 3.0), ("running", 1.0), ("judging", 2.0))) as progress:
        result = glass.replay(
            snapshot,
            backend=backend,
            compare=compare,
            first_nonfinite=first_nonfinite,
            bisect=bisect,
            reproduction=reproduction,
            progress=progress,
        )
    if json is not None:
        write_json(result.to_dict(), json)
    if json != "-":
        from glassengine.report.terminal_replay import replayed

        out.print(replayed(result))
    return 0 if result.ok else 1
