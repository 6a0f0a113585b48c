"""Draws a comparison and the statistics of a recording on a terminal: one screen, worst first.

In a pipe the same tables are printed without colors; what does not fit a row is never cut out of a name.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from glassengine.compare.judge import severity
from glassengine.report.table import new_table
from glassengine.report.terminal_drift import drift_table
from glassengine.report.words import of_side
from glassengine.results import VERDICTS, Comparison, Figures, Pair, Skipped, Summary, tally_of

STYLES = {"identical": "green", "rounding": "green", "suspicious": "yellow", "wrong": "bold red"}
MAX_PAIRS = 8
MAX_DRIFT = 14
_MAX_HINTS = 2
_MAX_REASONS = 5
_LEAST_TOLD = ("std", "median", "mean", "Inf")
_STATISTICS = ("min", "mean", "median", "max", "std")


def comparison(result: Comparison) -> RenderableType:
    """Return the answer: verdict, first divergence, the worst pairs, their statistics, what was not judged."""
    parts: list[RenderableType] = [_verdict(result), *_divergence(result)]
    # Requested tensors are all shown, with any verdict.
    is_whole = all(pair.baseline is not None for pair in result.pairs)
    listed: Sequence[Pair] = result.pairs
    if result.drift and not is_whole:
        parts += [Text(), drift_table(result.drift, MAX_DRIFT)]
        listed = [pair for pair in listed if pair.verdict == "wrong"]
    # There may be more than fit into memory as objects.
    shown = heapq.nlargest(len(listed) if is_whole else MAX_PAIRS, listed, key=severity)
    if shown:
        parts += [Text(), _pairs(shown)]
    if len(listed) > len(shown):
        rest = Counter(_by_verdict(listed))
        rest.subtract(pair.verdict for pair in shown)
        counted = ", ".join(f"{rest[name]} {name}" for name in reversed(VERDICTS) if rest[name])
        parts.append(Text(f"... and {len(listed) - len(shown)} more: {counted} (--json has all)"))
    for pair in shown:
        if (is_whole or pair.verdict != "identical") and pair.baseline is not None and pair.candidate is not None:
            parts += [Text(), _statistics(pair, pair.baseline, pair.candidate)]
    parts += notes(result)
    return Group(*parts)


def _by_verdict(pairs: Sequence[Pair]) -> dict[str, int]:
    found: dict[str, int] = {}
    for (verdict, _, _), count in tally_of(pairs).items():
        found[verdict] = found.get(verdict, 0) + count
    return found


def recording(rows: Iterable[tuple[int, int, str, Summary]], *, complete: bool, reason: str | None) -> RenderableType:
    """Return a table of statistics.

    Args:
        rows: Step, rank, site and statistics of each tensor, in the order to print them.
        complete: Whether the recording is complete.
        reason: Why not.
    """
    table = new_table("step", "rank", "site", "tensor", *_STATISTICS, "NaN", "Inf", first=_LEAST_TOLD)
    for step, rank, site, found in rows:
        table.add_row(str(step), str(rank), site, *_cells(found))
    return table if complete else Group(Text(f"incomplete: {reason}", style="yellow"), table)


def _verdict(result: Comparison) -> Text:
    counts = ", ".join(f"{result.counts[name]} {name}" for name in reversed(VERDICTS) if result.counts.get(name))
    text = Text().append("ok" if result.ok else "NOT OK", style="bold green" if result.ok else "bold red")
    if result.ok:
        text.append(f" ({result.calibration})")
    text.append(f"  verdict {result.verdict}", style=STYLES[result.verdict])
    text.append(f"  {result.counts['compared']} compared: {counts}; coverage {result.coverage:.1%}")
    if result.not_ok_because:
        text.append(f"\nbecause {result.not_ok_because}")
    judged_by = ", ".join(dict.fromkeys(how for (_, how, _), count in tally_of(result.pairs).items() if count))
    text.append(f"\njudged by {judged_by}: baseline {result.baseline}, candidate {result.candidate}")
    return text


def _divergence(result: Comparison) -> Iterator[Text]:
    found = result.first_divergence
    if found is None:
        return
    there = [p for p in result.pairs if (p.step, p.site, p.verdict) == (found.step, found.site, "wrong")]
    pair = next((p for p in there if found.rank in (None, p.rank)), next(iter(there), None))
    rank = f" (rank {found.rank})" if found.rank is not None else ""
    phase = f", {found.rung}" if found.rung else ""
    yield Text(f"\nfirst divergence: step {found.step}{phase}, {found.site}{rank}", style="bold")
    if found.candidate_site != found.site:
        yield Text(f"  in the candidate  {found.candidate_site}")
    if found.node:
        yield Text(f"  node    {found.node}")
    if found.source:
        yield Text(f"  source  {found.source}")
    if found.candidate_source and found.candidate_source != found.source:
        yield Text(f"  there   {found.candidate_source}")
    if pair is not None and pair.figures is not None and pair.figures.worst_index is not None:
        yield Text(f"  worst   {_worst(pair.figures)}")
    elif pair is not None and pair.reason:
        yield Text(f"  reason  {pair.reason}")
    for hint in found.hints[:_MAX_HINTS]:
        yield Text(f"  hint    {hint.text}")


def _worst(figures: Figures) -> str:
    at = f"[{', '.join(map(str, figures.worst_index or ()))}]"
    beyond = f"{figures.num_beyond_tolerance} of {figures.num_elements} elements beyond tolerance"
    return f"{at} baseline {figures.baseline_at_worst:.9g}, candidate {figures.candidate_at_worst:.9g}; {beyond}"


def _pairs(pairs: Sequence[Pair]) -> Table:
    columns = ("max abs", "max rel", "SNR dB", "beyond", "note")
    table = new_table(
        "verdict", "close", "equal", "step", "site", *columns, first=("equal", "close", "max rel", "beyond")
    )
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
        by_name = pair.method.startswith("name")
        note = (
            f"rank {pair.rank}" if pair.rank else "",
            "" if by_name else f"by {pair.method}: {pair.candidate_site}",
            pair.reason or "",
        )
        verdict = Text(pair.verdict, style=STYLES[pair.verdict])
        table.add_row(
            verdict, *_passed(figures), str(pair.step), Text(pair.site), *numbers, Text("; ".join(filter(None, note)))
        )
    return table


def _passed(figures: Figures | None) -> tuple[str, str]:
    """Return whether a pair is close, and whether it is equal; shapes that differ are neither."""
    close = figures is not None and figures.allclose
    equal = figures is not None and figures.num_different == 0
    return "pass" if close else "fail", "pass" if equal else "fail"


def _statistics(pair: Pair, baseline: Summary, candidate: Summary) -> RenderableType:
    table = new_table("", "tensor", *_STATISTICS, "NaN", "Inf", first=_LEAST_TOLD)
    rows = {"x": baseline, "y": candidate, "abs error": pair.abs_error, "rel error": pair.rel_error}
    for name, found in rows.items():
        if found is not None:
            table.add_row(name, *_cells(found))
    title = f"step {pair.step}, {pair.site} (x baseline, y candidate)"
    if pair.figures is not None:
        close, equal = _passed(pair.figures)
        title += f": allclose(rtol={pair.figures.rtol:g}, atol={pair.figures.atol:g}) {close}, equal {equal}"
    return Group(Text(title), table)


def _cells(found: Summary) -> Iterator[str]:
    yield f"{found.dtype}[{','.join(map(str, found.shape))}]"
    for name in _STATISTICS:
        value = getattr(found, name)
        yield "-" if value is None else number(value)
    yield str(found.num_nan)
    yield str(found.num_inf)


def notes(result: Comparison) -> Iterator[Text]:
    """Yield what a reader must know: sides that are incomplete, and what was not judged, by reason."""
    for side in ("baseline", "candidate"):
        if not result.environment[side].get("complete", True):
            yield Text(f"\nthe {side} is incomplete: only its completed steps were compared", style="yellow")
        for how, count in result.environment[side].get("flat", {}).items():
            yield Text(
                f"\nthe {side} has no dimension for rows ({how}): {count} of its tensors are compared as one row"
            )
        if renamed := result.environment[side].get("renamed"):
            yield Text(f"\none model is inside of another module: {renamed}")
        arrangements = result.environment[side].get("arrangements")
        if arrangements:
            counted = "; ".join(f"{count} {how}" for how, count in arrangements.items())
            yield Text(f"\nof several ranks, the tensors of the {side} were put together: {counted}")
    if result.same_weights is False:
        yield Text("\nthe weights are not the same: fingerprints of one class and dtype differ", style="yellow")
    groups: dict[tuple[str, str], list[Skipped]] = {}
    for item in result.skipped:
        groups.setdefault((item.side, item.reason), []).append(item)
    if groups:
        yield Text(f"\nnot judged: {len(result.skipped)}")
    for (side, reason), items in list(groups.items())[:_MAX_REASONS]:
        some = ", ".join(dict.fromkeys(item.site for item in items[:3]))
        yield Text(f"  {len(items)} of {of_side(side)}: {reason}: {some}{', ...' if len(items) > 3 else ''}")
    if len(groups) > _MAX_REASONS:
        yield Text(f"  ... and {len(groups) - _MAX_REASONS} more reasons (--json has all)")


def number(value: float) -> str:
    """Return `value` with four digits, the way tables print numbers; JSON has all digits."""
    return f"{value:.4g}"
