"""`glass profile`: where the time of a profile went, or a new profile of a program that runs."""

from __future__ import annotations

from typing import Annotated

import typer

import glassengine as glass
from glassengine.cli.documents import answer
from glassengine.cli.options import out
from glassengine.errors import UsageError

_ENDED = {
    "time": ("the program ended too few steps in time", "glass.compat.mark_step() at the end of each of its steps"),
    "memory": ("the profile ended early: it takes much of the memory that is left", "--steps N, with a smaller N"),
    "cancelled": ("the profile was ended before its last step", "ask again"),
}


def command(
    directory: Annotated[
        str | None,
        typer.Argument(
            metavar="DIR",
            help="Directory of --profile or glass.profiler.profile; its newest profile is shown.",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="DIR", help="Compare with this profile instead of the previous one.")
    ] = None,
    capture: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Take a profile of a program that called glass.profiler.start_server(PORT)."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="With --capture: number of steps; default: 1.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Maximum rows of a table.")] = 30,
) -> int:
    """Show a profile by module, or take one of a running program."""
    if capture is not None:
        if directory is not None:
            raise UsageError("the program that is profiled chooses the directory", got=directory, hint="leave it out")
        taken = glass.profiler.request(capture, steps=steps or 1)
        directory = str(taken["directory"])
        if not taken["complete"]:
            ended, hint = _ENDED.get(taken["ended"], _ENDED["time"])
            raise UsageError(
                ended, got=f"{taken['num_steps']} of {steps or 1}; the profile so far is in {directory}", hint=hint
            )
    elif steps is not None:
        raise UsageError("--steps goes with --capture", got=str(steps))
    if directory is None:
        raise UsageError("no profile is named", expected="a directory, or --capture ADDRESS", hint="glass profile DIR")
    found, earlier = glass.profiler.read(directory, against=against)
    before = earlier.data if earlier else None

    def show() -> None:
        from glassengine.report import terminal_show

        title, earlier_title = str(found.directory), earlier.directory.name if earlier else ""
        out.print(terminal_show.profile(found.data, before, rows=rows, title=title, earlier_title=earlier_title))

    answer(lambda: {"directory": str(found.directory), **found.data, "against": before}, show)
    return 0
