"""Draws on a terminal how a model stands beside itself under changes that must not matter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from glassengine.report.table import Screen, Table, mark
from glassengine.results.invariance import Invariance, Variation

_STYLES = {"bitwise": "green", "within rounding": "green", "undecided": "yellow", "beyond rounding": "bold red"}


def invariance(result: Invariance) -> RenderableType:
    """Return the one screen: the answer, a row for each change, and what was found of those that differ."""
    head = mark(result.ok)
    head.append(f": {result.in_words()}")
    table = Table()
    for column in ("change", "verdict", "variants", "differ", "difference", "noise ratio", "tokens"):
        table.add_column(column)
    for one in result.changes:
        tokens = f"{one.num_changed_tokens} of {one.num_tokens}" if one.num_tokens else ""
        difference = "" if one.max_abs_diff is None else f"{one.max_abs_diff:.2g}"
        difference += "" if one.largest is None else f" of {one.largest:.3g}"
        ratio = "" if one.noise_ratio is None else f"{one.noise_ratio:.2g}"
        verdict = Text(one.verdict, _STYLES[one.verdict])
        table.add_row(one.what, verdict, str(one.num_variants), str(one.num_different), difference, ratio, tokens)
    lines = [line for one in result.changes if one.verdict != "bitwise" or one.notes for line in _finding(one)]
    if result.subsystem is not None:
        lines.append(Text(f"\ntogether: {result.subsystem}"))
    own = result.environment
    machine = f"{own.get('cpu')}, {own.get('instruction_set')}, {own.get('threads')} threads, torch {own.get('torch')}"
    return Screen(head, table, *lines, Text(f"\non {machine}: bits are those of this machine alone", style="dim"))


def _finding(one: Variation) -> Iterator[Text]:
    yield Text(f"\n{one.what}: {one.variant or one.reason or one.verdict}", style="bold")
    if one.first is not None:
        begins = "the difference begins in" if one.first.inputs_equal else "the first difference is seen in"
        yield Text(f"  {begins} {one.first.in_words()}")
    if one.cause is not None:
        yield Text(f"  cause   {one.cause}")
    elif one.verdict != "bitwise":
        yield Text("  cause   not found by what was tried")
    for tried in one.tried:
        works = "bitwise equal" if tried.works else "no"
        yield Text(f"  tried   {tried.name}{' on the operation alone' * (tried.scope == 'operation')}: {works}")
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
