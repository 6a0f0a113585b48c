"""`glass replay`: run a snapshot again; compare it, find its first NaN, or find what the compiler breaks."""

from __future__ import annotations

from typing import Annotated

import typer

import glassengine as glass
from glassengine.cli.documents import answer
from glassengine.cli.options import print_answer, stages
from glassengine.cli.report import require_place, write_beside
from glassengine.cli.shared import Report
from glassengine.progress import Work
from glassengine.report.terminal_check import replayed


def command(
    snapshot: Annotated[
        str, typer.Argument(metavar="SNAPSHOT", help="Snapshot directory or packed file.", show_default=False)
    ],
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="Back-end; default: the recorded one.", show_default=False)
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Judge every op against float64 on the same inputs.")
    ] = False,
    first_nonfinite: Annotated[
        bool, typer.Option("--first-nonfinite", help="Name the op that produced the first NaN or Inf.")
    ] = False,
    bisect: Annotated[
        bool, typer.Option("--bisect", help="Find the smallest subgraph that the back-end breaks.")
    ] = False,
    reproduction: Annotated[
        str | None, typer.Option(metavar="DIR", help="With --bisect: write a test of that subgraph.")
    ] = None,
    report: Report = None,
) -> int:
    """Run a snapshot again, without the original code.

    Exit status: 0 the same bits (or only rounding, all values finite, nothing broken), 1 otherwise.
    """
    require_place(report)
    with stages(((Work.COMPILING, 3.0), (Work.RUNNING, 1.0), (Work.JUDGING, 2.0))) as progress:
        result = glass.replay(
            snapshot,
            backend=backend,
            compare=compare,
            first_nonfinite=first_nonfinite,
            bisect=bisect,
            reproduction=reproduction,
            progress=progress,
        )
    answer(result.to_dict, lambda: print_answer(replayed(result)))
    write_beside(result, report)
    return 0 if result.ok else 1
