"""`glass skill`: the instructions for a coding agent."""

from __future__ import annotations

from importlib import resources
from typing import Annotated

import typer

from glassengine.cli.documents import answer, write_text


def command(
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Write them to this file.", show_default=False)
    ] = None,
) -> int:
    """Print the instructions for a coding agent: when to use glass, in which order, how to read answers."""
    text = skill()
    answer(lambda: {"skill": text}, lambda: write_text([text], output or "-", flag="--output"))
    return 0


def skill() -> str:
    """Return the text of SKILL.md."""
    return resources.files("glassengine").joinpath("SKILL.md").read_text(encoding="utf-8")


def order() -> str:
    """Return the section of SKILL.md that says what to do first, and what next."""
    sections = (part.strip() for part in skill().split("\n##"))
    return next(part for part in sections if part.startswith("Order")).removeprefix("Order").strip()
