"""Draws answers of `glass compare` on a terminal: of tensors, and of several candidates.

In a pipe the same tables are printed without colors; what does not fit a row is never cut out of a name.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from glassengine.errors import shortened
from glassengine.report import words
from glassengine.report.table import VERDICT_STYLES, Screen, mark, new_table
from glassengine.report.terminal_check import because, compared, drift_table, following, lines_of
from glassengine.report.words import of_side
from glassengine.results import VERDICTS, Comparison, Figures, Pair, Skipped, Summary
from glassengine.results.comparison import Comparisons
from glassengine.results.pairs import severity, tally_of
from glassengine.results.sentences import differences

MAX_PAIRS, _MAX_SITES = 4, 8
MAX_DRIFT = 14
_MAX_HINTS = 2
_MAX_NAMES = 3
_MAX_APART = 8
_MAX_REASONS = 5
_LEAST_TOLD = ("std", "median", "mean", "Inf")
_STATISTICS = ("min", "mean", "median", "max", "std")

_Place = tuple[int, int, str]


def comparison(result: Comparison, command: Sequence[str] = ()) -> RenderableType:
    """Return the answer: verdict, first divergence, the worst pairs, their statistics, what was not judged.

    Args:
        result: Of two records.
        command: The command line that gave it, after `glass`; the next command is made from it.
    """
    parts: list[RenderableType] = [_verdict(result), *because(result), *following(result, command), compared(result)]
    parts += [_counts(result), *_divergence(result)]
    # Requested tensors are all shown, with any verdict.
    is_whole = all(pair.baseline is not None for pair in result.pairs)
    listed: Sequence[Pair] = result.pairs
    if result.drift and not is_whole:
        parts += [drift_table(result.drift, MAX_DRIFT)]
        listed = [pair for pair in listed if pair.verdict == "wrong"]
    # There may be more than fit into memory as objects.
    shown = heapq.nlargest(len(listed) if is_whole else MAX_PAIRS, listed, key=severity)
    if not is_whole:
        shown = [pair for pair in shown if pair.verdict != "identical"] or shown
    spare: list[RenderableType] = [] if is_whole else [Text()]
    if shown:
        parts += [_pairs(shown), *_remarks(shown)]
    if len(listed) > len(shown):
        rest = Counter[str]()
        for (verdict, _, _), count in tally_of(listed).items():
            rest[verdict] += count
        rest.subtract(pair.verdict for pair in shown)
        counted = ", ".join(f"{rest[name]} {name}" for name in reversed(VERDICTS) if rest[name])
        # The counts stand above, too.
        spare.append(Text(f"... and {len(listed) - len(shown)} more: {counted} (--json has all)"))
        parts.append(spare[-1])
    for pair in shown if is_whole else shown[:1]:
        if (is_whole or pair.verdict != "identical") and pair.baseline is not None and pair.candidate is not None:
            parts += [Text(), _statistics(pair, pair.baseline, pair.candidate)]
            spare.append(parts[-1])
    return Screen(*parts, *notes(result), spare=[] if is_whole else [part for part in spare if part in parts])


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
    return table if complete else Screen(Text(f"incomplete: {reason}", style="yellow"), table)


def _verdict(result: Comparison) -> Text:
    text = mark(result.ok)
    if result.ok:
        text.append(f" ({result.calibration})")
    return text.append(f": {words.headline(result).why}", style=VERDICT_STYLES[result.verdict])


def _counts(result: Comparison) -> Text:
    counts = ", ".join(f"{result.counts[name]} {name}" for name in reversed(VERDICTS) if result.counts.get(name))
    judged_by = ", ".join(dict.fromkeys(how for (_, how, _), count in tally_of(result.pairs).items() if count))
    text = f"tensors  {result.counts['compared']} compared: {counts}; coverage {result.coverage:.1%}"
    return Text(f"{text}; judged by {judged_by}")


def _divergence(result: Comparison) -> Iterator[Text]:
    found = result.first_divergence
    if found is None:
        return
    wrong = [p for p in result.pairs if (p.step, p.site, p.verdict) == (found.step, found.site, "wrong")]
    pair = next((p for p in wrong if found.rank in (None, p.rank)), next(iter(wrong), None))
    rank = f" (rank {found.rank})" if found.rank is not None else ""
    phase = f", {words.level(found.level)}" if found.level else ""
    yield Text(f"first divergence: step {found.step}{phase}, {found.site}{rank}", style="bold")
    if found.node:
        yield Text(f"  node     {found.node}")
    yield from lines_of(found)
    if pair is not None and pair.figures is not None and pair.figures.worst_index is not None:
        found_most = f"{pair.figures.num_beyond_tolerance} of {pair.figures.num_elements} elements beyond tolerance"
        at = list(pair.figures.worst_index)
        yield Text(f"  worst    {at}: {words.both_values(pair.figures)}; {found_most}")
    elif pair is not None and pair.reason:
        yield Text(f"  reason   {pair.reason}")
    for hint in found.hints[1 if result.calibration else 0 : _MAX_HINTS]:
        yield from (Text(f"  {what:8} {text}") for what, text in words.hint_lines(hint))


def _pairs(pairs: Sequence[Pair]) -> Table:
    columns = ("max abs", "max rel", "SNR dB", "beyond")
    table = new_table(
        "verdict", "close", "equal", "step", "site", *columns, first=("equal", "close", "max rel", "beyond", "SNR dB")
    )
    for pair in pairs:
        figures = pair.figures
        numbers = ["-"] * 4
        if figures is not None:
            sizes = number(figures.max_abs_diff), number(figures.max_rel_diff), f"{figures.snr_db:.1f}"
            numbers = [*sizes, str(figures.num_beyond_tolerance)]
        verdict = Text(pair.verdict, style=VERDICT_STYLES[pair.verdict])
        site = f"{pair.site} (rank {pair.rank})" if pair.rank else pair.site
        table.add_row(verdict, *_passed(figures), str(pair.step), Text(site), *numbers)
    return table


def _remarks(pairs: Sequence[Pair]) -> Iterator[Text]:
    """Yield what is special in pairs, with the sites of which it is true."""
    remarks: dict[str, list[str]] = {}
    for pair in pairs:
        by_name = pair.method.startswith("name")
        notes = "" if by_name else f"by {pair.method}: {pair.candidate_site}", pair.reason or ""
        if any(notes):
            remarks.setdefault("; ".join(filter(None, notes)), []).append(pair.site)
    for note, sites in remarks.items():
        yield Text(f"  {shortened(dict.fromkeys(sites), _MAX_NAMES)}: {note}")


def _passed(figures: Figures | None) -> tuple[str, str]:
    """Return whether a pair is close, and whether it is equal; shapes that differ are neither."""
    close = figures is not None and figures.allclose
    equal = figures is not None and figures.num_different == 0
    return "pass" if close else "fail", "pass" if equal else "fail"


def _statistics(pair: Pair, baseline: Summary, candidate: Summary) -> RenderableType:
    table = new_table("", "tensor", *_STATISTICS, "NaN", "Inf", first=_LEAST_TOLD)
    rows = {"baseline": baseline, "candidate": candidate, "abs error": pair.abs_error, "rel error": pair.rel_error}
    for name, found in rows.items():
        if found is not None:
            table.add_row(name, *_cells(found))
    title = f"step {pair.step}, {pair.site}"
    if pair.figures is not None:
        close, equal = _passed(pair.figures)
        title += f": allclose(rtol={pair.figures.rtol:g}, atol={pair.figures.atol:g}) {close}, equal {equal}"
    return Screen(Text(title), table)


def _cells(found: Summary) -> list[str]:
    return [f"{found.dtype}[{','.join(map(str, found.shape))}]", *statistics(found, _STATISTICS)]


def statistics(found: Summary, names: Sequence[str]) -> list[str]:
    """Return the named statistics, and how many elements are NaN and infinite, as cells."""
    return [*(number(getattr(found, name)) for name in names), str(found.num_nan), str(found.num_inf)]


def notes(result: Comparison) -> Iterator[Text]:
    """Yield what a reader must know: sides that are incomplete, and what was not judged, by reason."""
    yield from (Text(note, style="yellow") for note in words.side_notes(result))
    if not result.ok and (apart := differences(result.environment)):
        yield Text(f"\nthe environments differ: {'; '.join(apart[:_MAX_APART])}")
        if len(apart) > _MAX_APART:
            yield Text(f"  ... and {len(apart) - _MAX_APART} more (--json has all)")
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


def number(value: float | None) -> str:
    """Return `value` with four digits, the way tables print numbers; JSON has all digits."""
    return "-" if value is None else f"{value:.4g}"


def comparisons(result: Comparisons) -> RenderableType:
    """Return the answer: one line per candidate, then a row per tensor with a column per candidate."""
    columns = words.short_names([one.candidate for one in result.comparisons])
    good = sum(one.ok for one in result.comparisons)
    answer = mark(result.ok).append(f": {good} of {len(columns)} candidates are ok; baseline {result.baseline}")
    parts: list[RenderableType] = [answer, Text(), _candidates(result, columns), Text()]
    parts += _worst_tensors(result, columns)
    for name, one in zip(columns, result.comparisons, strict=True):
        said = list(notes(one))
        if said:
            parts += [Text(f"\n{name}:", style="bold"), *said]
    return Screen(*parts)


def _candidates(result: Comparisons, columns: Sequence[str]) -> RenderableType:
    found = new_table(
        *("", "candidate", "verdict", "compared", *VERDICTS[::-1], "unmatched", "coverage", "first divergence"),
        first=("identical", "rounding", "suspicious", "unmatched", "coverage", "compared", "wrong"),
    )
    for name, one in zip(columns, result.comparisons, strict=True):
        first = one.first_divergence
        found.add_row(
            mark(one.ok),
            Text(name),
            Text(one.verdict, style=VERDICT_STYLES[one.verdict]),
            str(one.counts["compared"]),
            *(str(one.counts[verdict]) for verdict in VERDICTS[::-1]),
            str(one.counts["unmatched_baseline"]),
            f"{one.coverage:.1%}",
            Text("-" if first is None else f"step {first.step}, {first.site}"),
        )
    return found


def _worst_tensors(result: Comparisons, columns: Sequence[str]) -> Iterator[RenderableType]:
    cells = [_by_place(one) for one in result.comparisons]
    places = dict.fromkeys(place for one in cells for place in one)

    def badness(place: _Place) -> tuple[float, ...]:
        return max(severity(pair) for one in cells for pair in one.get(place, ()))

    ranked = sorted(places, key=badness, reverse=True)
    found = new_table("step", "site", *columns)
    for step, rank, site in ranked[:_MAX_SITES]:
        name = f"{site} (rank {rank})" if rank else site
        found.add_row(str(step), Text(name), *(_cell(one.get((step, rank, site), [])) for one in cells))
    yield Text("verdict and largest absolute difference:")
    yield found
    if len(ranked) > _MAX_SITES:
        yield Text(f"... and {len(ranked) - _MAX_SITES} more tensors, none worse (--json has all)")


def _by_place(one: Comparison) -> dict[_Place, list[Pair]]:
    by_place: dict[_Place, list[Pair]] = {}
    for pair in one.pairs:
        by_place.setdefault((pair.step, pair.rank, pair.site), []).append(pair)
    return by_place


def _cell(pairs: Sequence[Pair]) -> Text:
    if not pairs:
        return Text("not judged", style="dim")
    pair = max(pairs, key=severity)
    size = "shape" if pair.figures is None else number(pair.figures.max_abs_diff)
    return Text(
        pair.verdict if pair.verdict == "identical" else f"{pair.verdict} {size}", style=VERDICT_STYLES[pair.verdict]
    )
