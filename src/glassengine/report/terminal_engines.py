"""Draws engines side by side on a terminal: one column each, then the logits step by step, then changed tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from glassengine.report.table import new_table
from glassengine.report.terminal_compare import number

if TYPE_CHECKING:
    from glassengine.results.engines import EngineColumn, SideBySide, StepDifference

_STYLES = {"bitwise": "green", "within rounding": "green", "beyond": "bold red"}
_WORDS = {"bitwise": "bitwise equal", "within rounding": "within rounding", "beyond": "beyond rounding"}
_MAX_STEPS = 8
_MAX_NAMES = 3


def side_by_side(result: SideBySide) -> RenderableType:
    """Return the answer for `glass compare ENGINE ENGINE ...`: verdict, engines, logits, first other tokens, notes."""
    titles = _titles([column.engine for column in result.columns])
    verdict = Text().append("ok" if result.ok else "NOT OK", style="bold green" if result.ok else "bold red")
    verdict.append(f"  logits {_WORDS[result.agreement]}", style=_STYLES[result.agreement])
    judged_by = ", ".join(dict.fromkeys(step.judged_by for column in result.columns for step in column.steps))
    lengths = ", ".join(str(len(row)) for row in result.prompt_token_ids)
    lines = [
        f"judged by {judged_by}; prompts of {lengths} tokens, {len(result.token_ids[0])} steps, all with the tokens "
        f"that {titles[0]} chose",
        f"times are medians of {result.rounds} alternating rounds, {result.num_threads} threads, {result.cpu}",
    ]
    if "model" not in result.columns[0].options:
        lines.append(f"model {result.columns[0].model}")
    parts: list[RenderableType] = [verdict, *map(Text, lines), Text(), _engines(result, titles), Text()]
    parts += [Text(f"logits against {titles[0]}"), _steps(result, titles)]
    found = [_token_line(title, column) for title, column in zip(titles, result.columns, strict=True)]
    remarks = [line for line in found if line is not None]
    remarks += [Text(f"note: {note}", style="yellow") for note in result.notes]
    return Group(*parts, *([Text(), *remarks] if remarks else []))


def _engines(result: SideBySide, titles: list[str]) -> Table:
    table = _table("", *titles)

    def row(title: str, *cells: str) -> None:
        table.add_row(Text(title), *map(Text, cells))

    if titles != [column.engine for column in result.columns]:
        row("directory", *(column.engine for column in result.columns))
    for title in ("backend", "dtype"):
        row(title, *(str(getattr(column, title)) for column in result.columns))
    row("added outputs", *(_names(column.added_outputs) for column in result.columns))
    for option in result.columns[0].options:
        row(option, *(column.options[option] for column in result.columns))
    for title in ("total", "executable", "weights"):
        sizes = [getattr(column, f"{title}_bytes") for column in result.columns]
        row(f"{title} size", *(_with_ratio(_bytes(size), size, sizes[0]) for size in sizes))
    for title in ("prefill", "decode step"):
        times = [column.prefill_ms if title == "prefill" else column.decode_ms for column in result.columns]
        row(title, *("-" if t is None else _with_ratio(f"{number(t)} ms", t, times[0]) for t in times))
    total = sum(len(tokens) for tokens in result.token_ids)
    row("tokens", "chosen", *(_tokens(column, total) for column in result.columns[1:]))
    row("logits", "-", *(_WORDS[column.agreement] for column in result.columns[1:] if column.agreement))
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
    """Return one cell: the size of the difference, in epsilons of the position's largest logit, and over the floor."""
    style = _STYLES[difference.agreement]
    if difference.agreement == "bitwise":
        return Text("bitwise equal", style=style)
    over = "" if difference.noise_ratio is None else f", noise ratio {difference.noise_ratio:.2g}"
    size = f"max abs {difference.figures.max_abs_diff:.3g}, {difference.rounding_units:.2g} roundings"
    return Text(size + over, style=style)


def _token_line(title: str, column: EngineColumn) -> Text | None:
    found = column.first_different_token
    if found is None:
        return None
    return Text(
        f"{title}: first different token in step {found.step}, sequence {found.row}: {found.candidate} instead of "
        f"{found.baseline}; its logit is ahead by {number(found.candidate_margin)} here and behind by "
        f"{number(found.baseline_margin)} in the first engine"
    )


def _tokens(column: EngineColumn, total: int) -> str:
    return f"{column.num_different_tokens} of {total} differ" if column.num_different_tokens else "equal"


def _names(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{len(names)}: {', '.join(names[:_MAX_NAMES])}{more}" if names else "none"


def _titles(directories: list[str]) -> list[str]:
    """Return the names of the directories where these tell them apart, else the directories."""
    names = [Path(directory).name for directory in directories]
    return names if len(set(names)) == len(names) and all(names) else directories


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{number(size)} {unit}"
        size /= 1024
    return f"{number(size)} GiB"


def _with_ratio(text: str, value: float, first: float | None) -> str:
    return f"{text} ({value / first:.2f}x)" if first and value != first else text


def _table(*columns: str) -> Table:
    table = new_table(*columns)
    for column in table.columns:
        column.justify, column.no_wrap = "left", False
    return table
