"""Draws results without tensors on a terminal: prompts, rollouts, variations of a model, the cache of graphs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from glassengine.report.table import Screen, Table, mark, new_table
from glassengine.results import Comparison
from glassengine.results.without_tensors import (
    Invariance,
    PromptComparison,
    PromptExample,
    PromptFinding,
    RolloutComparison,
    RolloutToken,
    Variation,
)

if TYPE_CHECKING:
    from glassengine.results.backends import CacheReport


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
    return Screen(*_prompt_lines(result))


def _prompt_lines(result: PromptComparison) -> Iterator[Text]:
    head = mark(result.ok)
    head.append(f": {result.in_words()}")
    yield head
    engines = result.engines
    yield Text(f"baseline {result.baseline} ({engines[0]}), candidate {result.candidate} ({engines[1]})")
    numbers = ", ".join(f"{number} {_UNITS[part]}" for part, number in result.compared.items())
    yield Text(f"compared {numbers or 'nothing'}")
    for part, reason in result.skipped.items():
        yield Text(f"not compared: {_UNITS[part]}: {reason}", style="dim")
    for finding in result.findings[:_MOST]:
        yield from _finding(finding)
    if len(result.findings) > _MOST:
        yield Text(f"... and {len(result.findings) - _MOST} more (--json has all)")


def _finding(one: PromptFinding) -> Iterator[Text]:
    yield Text("")
    line = Text(f"{one.level}", style=_LEVEL_STYLES[one.level])
    line.append(f"  {one.part}: {one.cause}: {one.detail}", style="default")
    yield line
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


_MOST_TOKENS, _MOST_ALIKE = 5, 2


def rollout(result: Comparison, found: RolloutComparison) -> RenderableType:
    """Return the one screen."""
    return Screen(*_rollout_lines(result, found), *_causes(found), *_tokens(found.worst[:_MOST_TOKENS]))


def _rollout_lines(result: Comparison, found: RolloutComparison) -> Iterator[Text]:
    head = mark(result.ok)
    head.append(f": {found.in_words()}")
    yield head
    yield Text(f"compared {result.baseline} in {found.dtype} with {result.candidate} ({found.format})")
    version = f", weights of {', '.join(found.versions[:3])}" if found.versions else ""
    yield Text(f"tokens   {found.num_tokens} of {found.num_samples} responses{version}")
    yield Text(f"gap      {numbers(found)}")
    yield from (Text(f"note     {note}", style="yellow") for note in result.notes[:3])


def numbers(found: RolloutComparison) -> str:
    """Return the figures of the gap in a line."""
    return (
        f"k3 KL {found.k3:.2g} nats, {found.outside:.1%} of the tokens outside of [0.9, 1.1], "
        f"root mean square {found.rms:.2g}, largest {found.largest:.2g}"
    )


def _causes(found: RolloutComparison) -> Iterator[RenderableType]:
    if not found.causes:
        return
    table = new_table("share", "kind", "cause", first=("share",))
    for one in found.causes:
        alike = f" (so would: {'; '.join(one.alike[:_MOST_ALIKE])})" if one.alike else ""
        table.add_row(f"{one.share:.0%}", one.kind, one.text + alike)
    table.add_row(f"{found.rest:.0%}", "rest", found.rest_is)
    for column in table.columns[1:]:
        column.justify, column.overflow = "left", "fold"
    yield table


def _tokens(worst: tuple[RolloutToken, ...]) -> Iterator[RenderableType]:
    if not any(one.engine != one.trainer for one in worst):
        return
    table = new_table("sample", "place", "token", "text", "engine", "trainer", first=("sample", "place", "token"))
    for one in worst:
        text = "" if one.text is None else repr(one.text)[1:-1][:24]
        table.add_row(str(one.sample), str(one.place), str(one.token), text, f"{one.engine:.4f}", f"{one.trainer:.4f}")
    yield table


_STYLES = {"bitwise": "green", "within rounding": "green", "undecided": "yellow", "beyond rounding": "bold red"}


def invariance(result: Invariance) -> RenderableType:
    """Return the one screen: the answer, a row for each change, and what was found of those that differ."""
    head = mark(result.ok)
    head.append(f": {result.in_words()}")
    columns = ("verdict", "variants", "differ", "difference", "noise ratio", "tokens")
    table = new_table("change", *columns, first=("variants", "noise ratio"))
    table.columns[0].justify = "left"
    for one in result.changes:
        tokens = f"{one.num_changed_tokens} of {one.num_tokens}" if one.num_tokens else ""
        difference = "" if one.max_abs_diff is None else f"{one.max_abs_diff:.2g}"
        difference += "" if one.largest is None else f" of {one.largest:.3g}"
        ratio = "" if one.noise_ratio is None else f"{one.noise_ratio:.2g}"
        verdict = Text(one.verdict, _STYLES[one.verdict])
        table.add_row(one.what, verdict, str(one.num_variants), str(one.num_different), difference, ratio, tokens)
    lines = [line for one in result.changes if one.verdict != "bitwise" or one.notes for line in _variation(one)]
    if result.subsystem is not None:
        lines.append(Text(f"\ntogether: {result.subsystem}"))
    own = result.environment
    machine = f"{own.get('cpu')}, {own.get('instruction_set')}, {own.get('threads')} threads, torch {own.get('torch')}"
    return Screen(head, table, *lines, Text(f"\non {machine}: bits are those of this machine alone", style="dim"))


def _variation(one: Variation) -> Iterator[Text]:
    yield Text(f"\n{one.what}: {one.variant or one.reason or one.verdict}", style="bold")
    if one.first is not None:
        begins = "the difference begins in" if one.first.inputs_equal else "the first difference is seen in"
        yield Text(f"  {begins} {one.first.in_words()}")
    if one.verdict != "bitwise":
        yield Text(f"  cause   {one.cause or 'not found by what was tried'}")
    outcomes: dict[str, list[str]] = {}
    for tried in one.tried:
        place = " on the operation alone" * (tried.scope == "operation")
        outcomes.setdefault(f"{'bitwise equal' if tried.works else 'no'}{place}", []).append(tried.name)
    yield from (Text(f"  tried   {', '.join(names)}: {outcome}") for outcome, names in outcomes.items())
    if one.switch is not None:
        yield Text(f"  switch  {one.switch}")
    for note in one.notes:
        yield Text(f"  note    {note}", style="dim")


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
    limit = "turned off: GLASS_CACHE_MAX_BYTES=0" if report.max_bytes == 0 else f"at most {_size(report.max_bytes)}"
    count = f"{len(report.entries)} {'entry' if len(report.entries) == 1 else 'entries'}"
    yield f"{report.directory}: {count}, {_size(report.num_bytes)}, {limit}"
    if report.problem:
        yield f"not used: {report.problem}"
    if report.entries:
        yield "beyond that, what was used least recently is removed"
        yield ""
        width = max(len("name"), *(len(entry.name) for entry in report.entries))
        title = f"{'hits':>5}  {'last used':<16}  {'size':>9}  {'compiled':>8}  why it was compiled"
        yield f"{'key':<8}  {'name':<{width}}  {title}"
        for entry in report.entries:
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used))
            yield (
                f"{entry.key[:8]}  {entry.name:<{width}}  {entry.num_hits:>5}  {used}  {_size(entry.num_bytes):>9}  "
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


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
