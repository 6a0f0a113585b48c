"""`glass watch`: compare two scripts step by step while they run."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from glassengine import asked, commands
from glassengine.cli.answers import Answers
from glassengine.cli.options import print_answer, settings
from glassengine.cli.record import ScriptLine, read_script_line
from glassengine.cli.shared import Map
from glassengine.errors import UsageError
from glassengine.report.terminal_compare import comparison

_USAGE = "glass watch 'a.py ARGS' -- b.py ARGS"


def command(
    baseline: Annotated[
        str, typer.Argument(metavar="'BASELINE ARGS'", help="Reference script, as one word.", show_default=False)
    ],
    candidate: Annotated[
        list[str], typer.Argument(metavar="-- CANDIDATE ARGS...", help="Script judged against it.", show_default=False)
    ],
    sites: Annotated[
        list[str] | None,
        typer.Option("--sites", metavar="PATTERN", help="Compare only these: glob or re:. Repeatable."),
    ] = None,
    map: Map = None,
    rtol: Annotated[float | None, typer.Option(help="Relative tolerance instead of the dtype's own.")] = None,
    atol: Annotated[float | None, typer.Option(help="Absolute tolerance instead of the dtype's own.")] = None,
    *,
    answers: Answers,
) -> int:
    """Compare two scripts step by step while they run, and stop both at the first step that is wrong."""
    answers.prepare()
    lines = _line(shlex.split(baseline)), _line(candidate)
    one = commands.watch_scripts(
        *(commands.PairedScript(line.script, line.arguments, line.is_module) for line in lines),
        sites=sites,
        map=map,
        rtol=rtol,
        atol=atol,
    )

    def show() -> None:
        print_answer(comparison(one, settings.words))
        print_answer(one.notes[-1])

    return answers.give(one.streamed, show, [one], 0 if one.ok else 4 if one.too_little else 1)


def _line(words: list[str]) -> ScriptLine:
    line = read_script_line(words) if words else None
    if line is None:
        raise UsageError("a side is no Python script", got=" ".join(words), hint=_USAGE)
    line.is_module or asked.script(line.script, _USAGE)
    return line
