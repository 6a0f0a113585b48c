"""Draws results without tensors on a terminal: prompts, rollouts, variations of a model, the cache of graphs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from glassengine.report.findings import next_of_changes
from glassengine.report.head import Chip, Head, PageTable
from glassengine.report.table import VERDICT_STYLES, Screen, Table, mark, new_table
from glassengine.report.without_tensors import head_of_apart
from glassengine.report.words import AGREEMENT, bytes_text
from glassengine.results.backends import CacheReport
from glassengine.results.stored import Apart
from glassengine.results.without_tensors import (
    CHANGE_VERDICTS,
    Invariance,
    PromptComparison,
    PromptExample,
    PromptFinding,
    Variation,
)

_MOST = 6
"""Findings that are drawn; the JSON document has all."""
_LONGEST = 60
_LEVEL_STYLES = {"wrong": "red", "limit": "yellow", "note": "dim"}
_UNITS = {
    "tokens": "texts",
    "template": "conversations",
    "settings": "settings",
    "processor": "images and sounds",
    "loading": "parameters",
    "files": "files",
}


def prompt(result: PromptComparison) -> RenderableType:
    """Return the one screen: the first cause, what was compared, and each cause with an example."""
    own, other = result.engines
    numbers = ", ".join(f"{number} {_UNITS[part]}" for part, number in result.compared.items())
    lines = [
        mark(result.ok).append(f": {result.in_words()}"),
        Text(f"baseline {result.baseline} ({own}), candidate {result.candidate} ({other})"),
        Text(f"compared {numbers or 'nothing'}"),
    ]
    lines += [Text(f"not compared: {_UNITS[part]}: {why}", style="dim") for part, why in result.skipped.items()]
    for finding in result.findings[:_MOST]:
        lines += _finding(finding)
    if len(result.findings) > _MOST:
        lines.append(Text(f"... and {len(result.findings) - _MOST} more (--json has all)"))
    return Screen(*lines)


def _finding(one: PromptFinding) -> Iterator[Text]:
    yield Text("")
    line = Text(one.level, style=_LEVEL_STYLES[one.level])
    yield line.append(f"  {one.part}: {one.cause}: {one.detail}", style="default")
    if one.deviates is not None:
        yield Text(f"  the {one.deviates} leaves its own tokenizer file on these texts")
    if one.example is not None:
        yield from _example(one.example)


def _example(example: PromptExample) -> Iterator[Text]:
    text = example.text if len(example.text) <= _LONGEST else f"{example.text[:_LONGEST]}..."
    yield Text(f"  text       {repr(text)[1:-1]}")
    for name in ("baseline", "candidate"):
        ids, shown = getattr(example, name), getattr(example, f"{name}_shown")
        pieces = " | ".join(repr(piece)[1:-1] for piece in shown)
        yield Text(f"  {name:<10} {pieces or '(nothing)'}" + (f"   {list(ids)}" if ids else ""))


_MOST_LINES = 24


def terminal_table(shown: PageTable, most: int = _MOST_LINES) -> Table:
    """Return the first rows of a table of a page."""
    table = new_table(*shown.columns)
    for column, kind in zip(table.columns, shown.kinds, strict=True):
        column.justify, column.no_wrap = ("right", True) if kind == "number" else ("left", False)
    for row in shown.rows[:most]:
        table.add_row(
            *(Text(cell.text, VERDICT_STYLES.get(cell.kind, "")) if isinstance(cell, Chip) else cell for cell in row)
        )
    if len(shown.rows) > most:
        table.add_row(f"... and {len(shown.rows) - most} more (--json has all)")
    return table


def document(head: Head) -> Iterator[RenderableType]:
    """Yield what a page shows above its data."""
    answer = mark(head.ok) if head.has_verdict else Text().append(head.mark, style="bold yellow")
    yield answer.append(f": {head.sentence}")
    yield Text(f"compared {head.baseline} (baseline) with {head.candidate} (candidate)")
    yield from (Text(f"source   {one.place}: {one.code}") for one in head.sources)
    yield from (Text(f"{what:8} {text}") for what, text in head.lines)
    for shown in head.tables:
        yield from (Text(), Text(f"{shown.title}: {shown.sentence}"), terminal_table(shown))
    if head.tables:
        yield Text()
    yield from (Text(f"note     {note}", style="yellow") for note in head.notes)


def side_by_side(result: Apart) -> RenderableType:
    """Return the answer on engines, build artifacts or series of watched runs."""
    return Screen(*document(head_of_apart(result)))


_STYLES = {"bitwise": "green", "within rounding": "green", "undecided": "yellow", "beyond rounding": "bold red"}


def invariance(result: Invariance, command: Sequence[str] = ()) -> RenderableType:
    """Return the one screen: the answer, a row for each change, and what was found of those that differ.

    Args:
        result: Of a model beside itself.
        command: The command line that gave it, after `glass`; the next command is made from it.
    """
    lines = [mark(result.ok).append(f": {result.in_words()}"), Text(f"results  {_counted(result)}")]
    if command and not result.ok:
        lines.append(Text(f"next     {next_of_changes(result, command)}"))
    if result.subsystem is not None:
        lines.append(Text(f"together {result.subsystem}"))
    own = result.environment
    machine = f"{own.get('cpu')}, {own.get('instruction_set')}, {own.get('threads')} threads, torch {own.get('torch')}"
    on = Text(f"on {machine}: bits are those of this machine alone", style="dim")
    details, spare = _details(result)
    more = Text("... and more of what differs (--json has all)")
    return Screen(*lines, _changes(result), *details, on, spare=spare, more=more)


def _counted(result: Invariance) -> str:
    """Return how many changes have which verdict, and how much of what was compared differs."""
    verdicts = Counter(one.verdict for one in result.changes)
    counts = ", ".join(f"{verdicts[name]} {AGREEMENT.get(name, name)}" for name in CHANGE_VERDICTS if verdicts[name])
    variants = sum(one.num_variants for one in result.changes)
    text = f"{counts}; {sum(one.num_different for one in result.changes)} of {variants} variants differ"
    if not (tokens := sum(one.num_tokens for one in result.changes)):
        return text
    changed = sum(one.num_changed_tokens for one in result.changes)
    return f"{text}; {f'{changed} of {tokens} next tokens change' if changed else 'no next token changes'}"


def _changes(result: Invariance) -> RenderableType:
    columns = ("verdict", "variants", "differ", "difference", "noise ratio", "tokens")
    table = new_table("change", *columns, first=("variants", "noise ratio"))
    for one in result.changes:
        tokens = f"{one.num_changed_tokens} of {one.num_tokens}" if one.num_tokens else ""
        difference = "" if one.max_abs_diff is None else f"{one.max_abs_diff:.2g}"
        difference += "" if one.largest is None else f" of {one.largest:.3g}"
        if "nan" in difference:
            difference = "not finite"
        ratio = "" if one.noise_ratio is None else f"{one.noise_ratio:.2g}"
        verdict = Text(one.verdict, _STYLES[one.verdict])
        table.add_row(one.what, verdict, str(one.num_variants), str(one.num_different), difference, ratio, tokens)
    return table


def _details(result: Invariance) -> tuple[list[Text], list[Text]]:
    """Return what is known of the changes that differ, the worst first, and what of that one may do without.

    Changes that begin to differ in one place for one cause are one entry.
    """
    told: dict[str, list[Variation]] = {}
    for one in sorted(result.changes, key=lambda one: -CHANGE_VERDICTS.index(one.verdict)):
        if one.verdict != "bitwise" or one.notes:
            told.setdefault(one.in_words().removeprefix(one.what) if one.cause else one.what, []).append(one)
    blocks = [[Text("\n").join(_variation(*changes)), *_trials(changes[0])] for changes in told.values()]
    trials = [line for block in reversed(blocks) for line in block[:0:-1]]
    # What the first of them says explains the answer.
    return [line for block in blocks for line in block], [*trials, *(block[0] for block in blocks[:0:-1])]


def _variation(one: Variation, *alike: Variation) -> Iterator[Text]:
    names = ", ".join(change.what for change in (one, *alike))
    yield Text(f"{names}: {one.variant or one.reason or one.verdict}", style="bold")
    if one.first is not None:
        begins = "the difference begins in" if one.first.inputs_equal else "the first difference is seen in"
        yield Text(f"  {begins} {one.first.in_words()}")
    if one.verdict != "bitwise":
        yield Text(f"  cause   {one.cause or 'not found by what was tried'}")
    if one.switch is not None:
        yield Text(f"  switch  {one.switch}")


def _trials(one: Variation) -> Iterator[Text]:
    outcomes: dict[str, list[str]] = {}
    for tried in one.tried:
        place = " on the operation alone" * (tried.scope == "operation")
        outcomes.setdefault(f"{'bitwise equal' if tried.works else 'no'}{place}", []).append(tried.name)
    yield from (Text(f"  tried   {', '.join(names)}: {outcome}") for outcome, names in outcomes.items())
    yield from (Text(f"  note    {note}", style="dim") for note in one.notes)


def kernels(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return the table of what one row of a batch depends on."""
    table = Table()
    for column in ("operation", "dtype", "rows alone and in batches", "threads", "relative difference"):
        table.add_column(column)
    for row in rows:
        verdict = "bitwise" if not row["differs_at"] else f"differs at {', '.join(map(str, row['differs_at']))}"
        size = "" if not row["differs_at"] else f"{row['relative']:.1g}"
        table.add_row(row["operation"], row["dtype"], verdict, str(row["threads"]), size)
    return table


def cache_lines(report: CacheReport) -> Iterator[str]:
    """Yield the lines: where and how full it is, a table of its entries, and why each was compiled."""
    limit = (
        "turned off: GLASS_CACHE_MAX_BYTES=0" if report.max_bytes == 0 else f"at most {bytes_text(report.max_bytes)}"
    )
    count = f"{len(report.entries)} {'entry' if len(report.entries) == 1 else 'entries'}"
    yield f"{report.directory}: {count}, {bytes_text(report.num_bytes)}, {limit}"
    if report.problem:
        yield f"not used: {report.problem}"
    if report.entries:
        yield "beyond that, what was used least recently is removed"
        yield ""
        width = max(len("name"), *(len(entry.name) for entry in report.entries))
        title = f"{'hits':>5}  {'last used':<16}  {'size':>9}  {'compiled':>8}  why it was compiled"
        yield f"{'key':<8}  {'name':<{width}}  {title}"
        for entry in report.entries:
            used, size = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used)), bytes_text(entry.num_bytes)
            yield (
                f"{entry.key[:8]}  {entry.name:<{width}}  {entry.num_hits:>5}  {used}  {size:>9}  "
                f"{entry.compile_s:>6.1f} s  {entry.cause}"
            )
    stale = [entry for entry in report.entries if entry.stale]
    if stale:
        yield ""
        yield f"built elsewhere, and recompiled here on use: {len(stale)}"
        for entry in stale:
            yield f"  {entry.key[:8]}  {entry.name:<{width}}  {entry.stale}"
    for key, problem in report.damaged.items():
        yield f"damaged, compiled again when wanted: {key[:8]}  {problem.splitlines()[0]}"
