"""Draws engines side by side on a terminal: one column each, then the logits step by step, then changed tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from glassengine.report import words_apart as words
from glassengine.report.table import new_table

if TYPE_CHECKING:
    from glassengine.results.engines import SideBySide, StepDifference

_STYLES = {"bitwise": "green", "within rounding": "green", "beyond": "bold red"}
_MAX_STEPS = 8


def side_by_side(result: SideBySide) -> RenderableType:
    """Return the answer for `glass compare ENGINE ENGINE ...`: verdict, engines, logits, first other tokens, notes."""
    titles = words.titles(result)
    verdict = Text().append("ok" if result.ok else "NOT OK", style="bold green" if result.ok else "bold red")
    verdict.append(f"  logits {words.AGREEMENT[result.agreement]}", style=_STYLES[result.agreement])
    lines = [Text(" ".join(line)) for line in words.engine_lines(result)]
    parts: list[RenderableType] = [verdict, *lines, Text(), _engines(result, titles), Text()]
    parts += [Text(f"logits against {titles[0]}"), _steps(result, titles)]
    remarks = [Text(line) for line in words.token_lines(result)]
    remarks += [Text(f"note: {note}", style="yellow") for note in result.notes]
    return Group(*parts, *([Text(), *remarks] if remarks else []))


def _engines(result: SideBySide, titles: list[str]) -> Table:
    table = _table("", *titles)
    for title, cells in words.engine_rows(result):
        table.add_row(Text(title), *map(Text, cells))
    return table


def _steps(result: SideBySide, titles: list[str]) -> Table:
    table = _table("step", *titles[1:])
    steps = list(zip(*(column.steps for column in result.columns[1:]), strict=True))
    for row in steps[:_MAX_STEPS]:
        table.add_row(Text(str(row[0].step)), *(_step(found) for found in row))
    if len(steps) > _MAX_STEPS:
        worst = [
            max(column.steps, key=lambda step: step.noise_ratio or step.rounding_units) for column in result.columns[1:]
        ]
        cells = (
            _step(found).append("" if found.agreement == "bitwise" else f" (step {found.step})") for found in worst
        )
        table.add_row(Text(f"worst of {len(steps)}"), *cells)
    return table


def _step(difference: StepDifference) -> Text:
    return Text(words.step_words(difference), style=_STYLES[difference.agreement])


def _table(*columns: str) -> Table:
    table = new_table(*columns)
    for column in table.columns:
        column.justify, column.no_wrap = "left", False
    return table
