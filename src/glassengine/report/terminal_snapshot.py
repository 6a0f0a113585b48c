"""Draws snapshots on a terminal: one with its inputs and outputs, or a line for each of a directory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from glassengine.report.table import new_table
from glassengine.report.terminal_compare import number

if TYPE_CHECKING:
    from glassengine.executable.snapshot.layout import Entry
    from glassengine.executable.snapshot.reader import Snapshot
    from glassengine.results.recorded import ListedSnapshot


def several(listed: Sequence[ListedSnapshot]) -> RenderableType:
    """Return a line for each snapshot of a directory."""
    table = new_table("site", "reason", "contents", "bytes", "note")
    table.columns[0].header = Text("snapshot")
    for item in listed:
        note = item.problem or item.origin or ""
        style = "" if item.problem is None and item.reason == "every" else "red"
        table.add_row(
            Text(item.directory),
            Text(item.reason, style=style),
            ", ".join(item.contents),
            f"{item.num_bytes:,}",
            Text(note),
        )
    return table


def one(snapshot: Snapshot, *, statistics: bool) -> RenderableType:
    """Return what ran, why it was kept, and its inputs and outputs."""
    meta = snapshot.meta
    title = f"execution {snapshot.execution} of {snapshot.name!r} ({snapshot.kind})"
    ranks = meta.get("num_processes")
    place = f"process {snapshot.process}" + (f" of {ranks}" if ranks else "")
    lines = [
        f"{place}, executable {snapshot.executable}, device {snapshot.device_index}, {meta.get('created')}",
        f"taken because: {snapshot.reason}" + (", redacted: no values" if snapshot.redacted else ""),
        f"graph {snapshot.graph_hash}" if snapshot.graph_hash else f"no graph: {meta.get('graph_problem')}",
    ]
    parts: list[RenderableType] = [Text(title, style="bold"), *map(Text, lines)]
    if snapshot.origin is not None:
        parts.append(Text(str(snapshot.origin), style="bold red"))
    if meta.get("error"):
        parts.append(Text(str(meta["error"]).strip().splitlines()[-1], style="bold red"))
    parts += [Text(), _table(snapshot, snapshot.inputs, "input", statistics)]
    if snapshot.outputs is None:
        parts += [Text(), Text("no outputs were kept")]
    else:
        parts += [Text(), _table(snapshot, snapshot.outputs, "output", statistics)]
    return Group(*parts)


def _table(snapshot: Snapshot, entries: Sequence[Entry], title: str, statistics: bool) -> RenderableType:
    figures = ("min", "mean", "max", "NaN", "Inf") if statistics else ()
    table = new_table("site", "kind", "tensor", "device", *figures, "note")
    table.columns[0].header = Text(title)
    table.columns[1].justify = "left"
    for entry in entries:
        cells: list[str] = []
        if statistics:
            found = snapshot.statistics(entry)
            values = [] if found is None else [found.get(name) for name in ("min", "mean", "max", "num_nan", "num_inf")]
            cells = ["" if value is None else number(value) for value in values] or [""] * len(figures)
        notes = [word for word, there in (("overwritten by the run", entry.is_mutated),) if there]
        notes += [f"left out: {entry.left_out}"] if entry.left_out else []
        table.add_row(Text(entry.name), entry.kind, Text(entry.describe()), entry.device, *cells, ", ".join(notes))
    return table
