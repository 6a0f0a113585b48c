"""Draws a comparison and the statistics of a recording on a terminal: one screen, worst first.

In a pipe the same tables are printed without colors; what does not fit a row is never cut out of a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from glassengine.compare.judging import severity
from glassengine.results import VERDICTS, Comparison, Figures, Pair, Skipped, Summary

_STYLES = {"identical": "green", "rounding": "green", "suspicious": "yellow", "wrong": "bold red"}
_MAX_PAIRS = 8
_MAX_REASONS = 5
_STATISTICS = ("min", "mean", "median", "max", "std")


def comparison(result: Comparison) -> RenderableType:
    """Return the answer: verdict, first divergence, the worst pairs, their statistics, what was not judged."""
    parts: list[RenderableType] = [_verdict(result), *_divergence(result)]
    ranked = sorted(result.pairs, key=severity, reverse=True)
    different = [pair for pair in ranked if pair.verdict != "identical"]
    if different:
        parts += [Text(), _pairs(different[:_MAX_PAIRS])]
        if len(different) > _MAX_PAIRS:
            parts.append(Text(f"... and {len(different) - _MAX_PAIRS} more that are not identical (--json has all)"))
    for pair in ranked:
        if pair.baseline is not None and pair.candidate is not None:
            parts += [Text(), _statistics(pair, pair.baseline, pair.candidate)]
    parts += _notes(result)
    return Group(*parts)


def recording(rows: Iterable[tuple[int, int, str, Summary]], *, complete: bool, reason: str | None) -> RenderableType:
    """Return a table of statistics.

    Args:
        rows: Step, rank, site and statistics of each tensor, in the order to print them.
        complete: Whether the recording is complete.
        reason: Why not.
    """
    table = _table("step", "rank", "site", "tensor", *_STATISTICS, "NaN", "Inf")
    for step, rank, site, found in rows:
        table.add_row(str(step), str(rank), Text(site), *_cells(found))
    return table if complete else Group(Text(f"incomplete: {reason}", style="yellow"), table)


def _verdict(result: Comparison) -> Text:
    counts = ", ".join(f"{result.counts[name]} {name}" for name in reversed(VERDICTS) if result.counts.get(name))
    text = Text().append("ok" if result.ok else "NOT OK", style="bold green" if result.ok else "bold red")
    text.append(f"  verdict {result.verdict}", style=_STYLES[result.verdict])
    text.append(f"  {result.counts['compared']} compared: {counts}; coverage {result.coverage:.1%}")
    if result.not_ok_because:
        text.append(f"\nbecause {result.not_ok_because}")
    judged_by = ", ".join(dict.fromkeys(pair.judged_by for pair in result.pairs))
    text.append(f"\njudged by {judged_by}: baseline {result.baseline}, candidate {result.candidate}")
    return text


def _divergence(result: Comparison) -> Iterator[Text]:
    found = result.first_divergence
    if found is None:
        return
    yield Text(f"\nfirst divergence: step {found.step}, {found.site}", style="bold")
    if found.node:
        yield Text(f"  node    {found.node}")
    if found.source:
        yield Text(f"  source  {found.source}")
    pair = next(
        (p for p in result.pairs if (p.step, p.site) == (found.step, found.site) and p.verdict == "wrong"), None
    )
    if pair is not None and pair.figures is not None and pair.figures.worst_index is not None:
        yield Text(f"  worst   {_worst(pair.figures)}")
    elif pair is not None and pair.reason:
        yield Text(f"  reason  {pair.reason}")


def _worst(figures: Figures) -> str:
    at = f"[{', '.join(map(str, figures.worst_index or ()))}]"
    beyond = f"{figures.num_beyond_tolerance} of {figures.num_elements} elements beyond tolerance"
    return f"{at} baseline {figures.baseline_at_worst:.9g}, candidate {figures.candidate_at_worst:.9g}; {beyond}"


def _pairs(pairs: Sequence[Pair]) -> Table:
    table = _table("verdict", "step", "site", "max abs", "max rel", "SNR dB", "beyond", "note")
    for pair in pairs:
        figures = pair.figures
        numbers = ["-"] * 4
        if figures is not None:
            numbers = [
                number(figures.max_abs_diff),
                number(figures.max_rel_diff),
                f"{figures.snr_db:.1f}",
                str(figures.num_beyond_tolerance),
            ]
        note = "; ".join(filter(None, (f"rank {pair.rank}" if pair.rank else "", pair.reason or "")))
        verdict = Text(pair.verdict, style=_STYLES[pair.verdict])
        table.add_row(verdict, str(pair.step), Text(pair.site), *numbers, Text(note))
    return table


def _statistics(pair: Pair, baseline: Summary, candidate: Summary) -> RenderableType:
    table = _table("", "tensor", *_STATISTICS, "NaN", "Inf")
    rows = {"x": baseline, "y": candidate, "abs error": pair.abs_error, "rel error": pair.rel_error}
    for name, found in rows.items():
        if found is not None:
            table.add_row(name, *_cells(found))
    return Group(Text(f"step {pair.step}, {pair.site} (x baseline, y candidate)"), table)


def _cells(found: Summary) -> Iterator[Text]:
    yield Text(f"{found.dtype}[{','.join(map(str, found.shape))}]")
    for name in _STATISTICS:
        value = getattr(found, name)
        yield Text("-" if value is None else number(value))
    yield Text(str(found.num_nan))
    yield Text(str(found.num_inf))


def _notes(result: Comparison) -> Iterator[Text]:
    for side in ("baseline", "candidate"):
        if not result.environment[side].get("complete", True):
            yield Text(f"\nthe {side} is incomplete: only its completed steps were compared", style="yellow")
    groups: dict[tuple[str, str], list[Skipped]] = {}
    for item in result.skipped:
        groups.setdefault((item.side, item.reason), []).append(item)
    if groups:
        yield Text(f"\nnot judged: {len(result.skipped)}")
    for (side, reason), items in list(groups.items())[:_MAX_REASONS]:
        some = ", ".join(dict.fromkeys(item.site for item in items[:3]))
        yield Text(f"  {len(items)} of the {side}: {reason}: {some}{', ...' if len(items) > 3 else ''}")
    if len(groups) > _MAX_REASONS:
        yield Text(f"  ... and {len(groups) - _MAX_REASONS} more reasons (--json has all)")


def number(value: float) -> str:
    """Return `value` with four digits, the way tables print numbers; JSON has all digits."""
    return f"{value:.4g}"


class _Table(Table):
    """A table that is as wide as it needs to be where no person looks at it: a pipe has no right edge."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return super().__rich_console__(console, options if console.is_terminal else options.update(max_width=1 << 16))


def _table(*columns: str) -> Table:
    table = _Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    words = {"", "verdict", "site", "tensor", "note"}
    for column in columns:
        # Names are folded, not cut, so that they survive to be copied; numbers stay in one piece.
        folds = column in ("site", "tensor", "note")
        justify: Literal["left", "right"] = "left" if column in words else "right"
        table.add_column(Text(column), justify=justify, overflow="fold", no_wrap=not folds)
    return table
