"""Draws engines side by side on a terminal: one column each, then the logits step by step, then the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from glassengine.report.terminal_compare import number

if TYPE_CHECKING:
    from glassengine.diagnose.logits import StepDifference
    from glassengine.diagnose.side_by_side import EngineColumn, SideBySide

_STYLES = {"bitwise": "green", "within rounding": "green", "beyond": "bold red"}
_MAX_STEPS = 8
_MAX_NAMES = 3


def side_by_side(result: SideBySide) -> RenderableType:
    """Return the answer for `glass compare ENGINE ENGINE ...`."""
    lengths = ", ".join(str(len(row)) for row in result.prompt_token_ids)
    taken = (
        f"prompts of {lengths} tokens, {len(result.token_ids[0])} new tokens of the first engine given to all; "
        f"medians of {result.rounds} alternating rounds, {result.num_threads} threads, {result.cpu}"
    )
    verdict = Text().append("ok" if result.ok else "NOT OK", style="bold green" if result.ok else "bold red")
    verdict.append(f"  logits {_WORDS[result.agreement]}", style=_STYLES[result.agreement])
    judged_by = ", ".join(dict.fromkeys(step.judged_by for column in result.columns for step in column.steps))
    parts: list[RenderableType] = [verdict, Text(f"judged by {judged_by}"), Text(taken), Text()]
    legend = "logits against the first engine (rounding: epsilon of the dtype times the position's largest logit)"
    parts += [_engines(result), Text(), Text(legend), _steps(result)]
    parts += [line for column in result.columns if (line := _token_line(column)) is not None]
    return Group(*parts, *(Text(f"note: {note}", style="yellow") for note in result.notes))


_WORDS = {
    "bitwise": "bitwise equal",
    "within rounding": "within rounding",
    "beyond": "beyond rounding",
}


def _engines(result: SideBySide) -> Table:
    table = _table("", *(column.engine for column in result.columns))
    first = result.columns[0]

    def row(title: str, *cells: str) -> None:
        table.add_row(Text(title), *(Text(cell) for cell in cells))

    for title in ("model", "backend", "dtype"):
        row(title, *(str(getattr(column, title)) for column in result.columns))
    row("added outputs", *(_names(column.added_outputs) for column in result.columns))
    for option in first.options:
        if option != "model":
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


def _steps(result: SideBySide) -> Table:
    table = _table("step", *(column.engine for column in result.columns[1:]))
    steps = list(zip(*(column.steps for column in result.columns[1:]), strict=True))
    for found in steps[:_MAX_STEPS]:
        table.add_row(Text(str(found[0].step)), *(_step(difference) for difference in found))
    if len(steps) > _MAX_STEPS:
        worst = [max(column.steps, key=lambda difference: difference.rounding_units) for column in result.columns[1:]]
        cells = (_step(difference).append(f", in step {difference.step}") for difference in worst)
        table.add_row(Text(f"worst of {len(steps)}"), *cells)
    return table


def _step(difference: StepDifference) -> Text:
    style = _STYLES[difference.agreement]
    if difference.agreement == "bitwise":
        return Text("bitwise equal", style=style)
    figures = difference.figures
    floor = "" if difference.rho is None else f", rho {number(difference.rho)}"
    return Text(
        f"max abs {number(figures.max_abs_diff)}, {number(difference.rounding_units)} roundings{floor}, "
        f"{figures.num_different} of {figures.num_elements} differ",
        style=style,
    )


def _token_line(column: EngineColumn) -> Text | None:
    found = column.first_different_token
    if found is None:
        return None
    margins = f"{number(found.candidate_margin)} here and behind by {number(found.baseline_margin)} in the first engine"
    return Text(
        f"\n{column.engine}: first different token in step {found.step}, sequence {found.row}: "
        f"{found.candidate} instead of {found.baseline}; its logit is ahead by {margins}"
    )


def _tokens(column: EngineColumn, total: int) -> str:
    return f"{column.num_different_tokens} of {total} differ" if column.num_different_tokens else "equal"


def _names(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{len(names)}: {', '.join(names[:_MAX_NAMES])}{more}" if names else "none"


def _bytes(size: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{number(size)} {unit}"
        size /= 1024  # type: ignore[assignment]
    return f"{size:.4g} GiB"


def _with_ratio(text: str, value: float, first: float | None) -> str:
    return f"{text} ({value / first:.2f}x)" if first and value != first else text


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    return table
