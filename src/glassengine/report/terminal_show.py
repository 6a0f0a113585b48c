"""Draws recordings, series, snapshots and profiles on a terminal."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from glassengine.reading.files import printable
from glassengine.recording.layout.layout import Entry, LeftOut
from glassengine.recording.series import MEASURED, NONFINITE, UNMEASURED
from glassengine.report.table import new_table
from glassengine.report.terminal_compare import number, statistics
from glassengine.results import Summary
from glassengine.sites import ROOT

if TYPE_CHECKING:
    from torch import Tensor

    from glassengine.executable.snapshot.layout import SnapshotEntry as SnapshotEntry
    from glassengine.executable.snapshot.reader import Snapshot
    from glassengine.recording.series import Chosen, SeriesReader
    from glassengine.results.recorded import ListedSnapshot

Array = np.typing.NDArray[Any]

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60
"""Characters of the bars of a series."""
MOST_SERIES = 60
_MOST_EVENTS = 20
# A series over more than this factor is drawn by its logarithms.
_WIDE = 20.0
_BAR = 20
_OUTSIDE = "(outside of modules)"
_TREE_STATISTICS = ("min", "mean", "max", "std")


ShownRow = tuple[Entry | LeftOut, Summary | None]
"""One tensor: its entry and statistics, or what is known of one whose values were left out."""


def tree(rows: Iterable[ShownRow], modules: Mapping[str, str]) -> RenderableType:
    """Return one table per step and rank, the tensors indented under their modules.

    Args:
        rows: In recorded order.
        modules: Path -> class name; may be empty.
    """
    parts: list[RenderableType] = []
    tables: dict[tuple[int, int], list[ShownRow]] = {}
    for row in rows:
        tables.setdefault((row[0].step, row[0].rank), []).append(row)
    for (step, rank), members in tables.items():
        parts.append(Text(f"step {step}" + (f", rank {rank}" if rank else ""), style="bold"))
        table = new_table("site", "tensor", *_TREE_STATISTICS, "NaN", "Inf", "note")
        shown: set[str] = set()
        for tensor, summary in sorted_by_module(members, modules):
            path, rest = split(tensor.site, modules)
            # A module that is shown has those around it above it.
            for module in () if path in shown else _chain(path):
                if module not in shown:
                    shown.add(module)
                    name = module.rpartition(".")[2] if module != ROOT else ROOT
                    kind = modules.get(module.partition("@")[0], "")
                    table.add_row(Text("  " * _depth(module) + f"{name} {kind}".rstrip(), style="bold"))
            table.add_row("  " * (_depth(path) + 1) + (rest or ":out"), *_row_cells(tensor, summary))
        parts += [table, Text()]
    return Group(*parts[:-1])


def values(tensor: Tensor, title: str, *, full: bool) -> str:
    """Return the values of a tensor as text.

    Args:
        tensor: Any.
        title: Printed above.
        full: Every element; else the edges of what is large.
    """
    import torch

    # torch formats by settings of the whole process only.
    threshold = tensor.numel() + 1 if full else 1000
    with torch._tensor_str.printoptions(threshold=threshold, linewidth=120, precision=6):
        return f"{title}\n{tensor}"


def split(site: str, modules: Mapping[str, str]) -> tuple[str, str]:
    """Return the module path (with call) of a site, and the rest: port, op or tap.

    Args:
        site: A site name.
        modules: Path -> class name; what is not among them is a tap. Where it is empty, every path is a module.
    """
    cuts = [position for mark in (":", "/") if (position := site.find(mark)) >= 0]
    if cuts:
        return site[: min(cuts)] or ROOT, site[min(cuts) :]
    if modules and site.partition("@")[0] not in modules:
        path, _, tap = site.rpartition(".")
        return path or ROOT, f".{tap}"
    return site, ""


def sorted_by_module(rows: list[ShownRow], modules: Mapping[str, str]) -> list[ShownRow]:
    """Return the rows so that each module is in one place: in the model's order, or else that of the first tensors."""
    order: dict[str, int] = {path: position for position, path in enumerate(modules)}
    places: dict[str, list[int]] = {}
    keys: list[tuple[list[int], int]] = []
    for tensor, _ in rows:
        path, rest = split(tensor.site, modules)
        place = places.get(path)
        if place is None:
            place = places[path] = [order.setdefault(module, len(order)) for module in _chain(path)]
        keys.append((place, 0 if rest.startswith(":in") else 1 if rest.startswith((".", "/")) else 2))
    return [rows[index] for index in sorted(range(len(rows)), key=keys.__getitem__)]


def _chain(path: str) -> list[str]:
    """Return the modules around `path`, outermost first, itself last."""
    if _is_root(path):
        return [path]
    return [ROOT, *itertools.accumulate(path.split("."), "{}.{}".format)]


def _is_root(path: str) -> bool:
    return path == ROOT or path.startswith(f"{ROOT}@")


def _depth(path: str) -> int:
    return 0 if _is_root(path) else path.count(".") + 1


def _row_cells(tensor: Entry | LeftOut, summary: Summary | None) -> list[str]:
    if isinstance(tensor, Entry):
        numbers = [] if summary is None else statistics(summary, _TREE_STATISTICS)
        return [tensor.describe(), *numbers]
    shape = "" if tensor.shape is None else f"[{','.join(map(str, tensor.shape))}]"
    light = tensor.statistics
    cells = ["-"] * 6
    if light is not None:
        nonfinite = f"{light.num_nonfinite} not finite" if light.num_nonfinite else "0"
        cells = [number(light.min), "-", number(light.max), "-", nonfinite, "-"]
    return [f"{tensor.dtype or ''}{shape}", *cells, tensor.reason]


def plot(reader: SeriesReader, chosen: Chosen) -> RenderableType:
    """Return a line for each series: name, bars from the first step to the last, smallest, largest and last number.

    Args:
        reader: Has been read to its end.
        chosen: What is drawn; of more than 60 series the first 60. A bar shows the largest number of its steps.
    """
    steps = chosen.steps
    told = f"steps {steps[0]} to {steps[-1]}, {len(steps)} of them" if len(steps) else "no steps"
    table = new_table("site", "", "min", "max", "last")
    for at, name in enumerate(chosen.names[:MOST_SERIES]):
        states, values = chosen.states[:, at], chosen.values[:, at]
        there = values[states == MEASURED]
        numbers = [f"{number:.4g}" for number in (there.min(), there.max(), there[-1])] if there.size else ["-"] * 3
        table.add_row(printable(name), bars(states, values, WIDTH), *numbers)
    parts: list[RenderableType] = [Text(told), table]
    if len(chosen.names) > MOST_SERIES:
        parts.append(Text(f"{len(chosen.names) - MOST_SERIES} more series; choose with PATTERN"))
    if NONFINITE in chosen.states[:, :MOST_SERIES]:
        parts.append(Text("x: NaN or infinite elements"))
    if UNMEASURED in chosen.states[:, :MOST_SERIES]:
        parts.append(Text("?: seen and not measured"))
    for event in reader.events[:_MOST_EVENTS]:
        recorded = ", ".join(map(str, event.get("recorded") or ())) or "nothing"
        why = printable("; ".join(map(str, event.get("why") or ())))
        parts.append(Text(f"step {event['event']}: {why}; recorded: {recorded}"))
    if len(reader.events) > _MOST_EVENTS:
        parts.append(Text(f"{len(reader.events) - _MOST_EVENTS} more triggers"))
    parts += [Text(printable(note)) for note in reader.notes]
    if reader.damage is not None:
        parts.append(Text(f"the series end early: {reader.damage}"))
    return Group(*parts)


def bars(states: Array, values: Array, width: int) -> str:
    """Return a series as bars; of several steps in one bar the largest number, or x where one is not finite."""
    if not len(states):
        return ""
    there = values[states == MEASURED].astype(np.float64)
    low, high = (float(there.min()), float(there.max())) if there.size else (0.0, 0.0)
    by_logarithm = low > 0 and high > _WIDE * low
    if by_logarithm:
        low, high = math.log(low), math.log(high)
    found = []
    for piece in np.array_split(np.arange(len(states)), min(width, len(states))):
        some = states[piece]
        measured = values[piece][some == MEASURED]
        if NONFINITE in some:
            found.append("x")
        elif not measured.size:
            found.append("?" if UNMEASURED in some else " ")
        else:
            top = float(measured.max())
            height = ((math.log(top) if by_logarithm else top) - low) / (high - low) if high > low else 0.0
            found.append(BARS[min(int(height * len(BARS)), len(BARS) - 1)])
    return "".join(found)


def snapshot_list(listed: Sequence[ListedSnapshot]) -> RenderableType:
    """Return a line for each snapshot of a directory."""
    table = new_table("snapshot", "reason", "contents", "bytes", "note")
    for item in listed:
        note = item.problem or item.origin or ""
        style = "" if item.problem is None and item.reason == "every" else "red"
        reason, contents = Text(item.reason, style=style), ", ".join(item.contents)
        table.add_row(item.directory, reason, contents, f"{item.num_bytes:,}", note)
    return table


def snapshot_content(snapshot: Snapshot, *, statistics: bool) -> RenderableType:
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
    parts += [Text(), _tensor_table(snapshot, snapshot.inputs, "input", statistics)]
    outputs = snapshot.outputs
    kept = "no outputs were kept" if outputs is None else _tensor_table(snapshot, outputs, "output", statistics)
    return Group(*parts, Text(), kept)


def _tensor_table(snapshot: Snapshot, entries: Sequence[SnapshotEntry], title: str, statistics: bool) -> RenderableType:
    figures = ("min", "mean", "max", "NaN", "Inf") if statistics else ()
    table = new_table(title, "kind", "tensor", "device", *figures, "note")
    for entry in entries:
        cells: list[str] = []
        if statistics:
            found = snapshot.statistics(entry)
            values = [] if found is None else [found.get(name) for name in ("min", "mean", "max", "num_nan", "num_inf")]
            cells = ["" if value is None else number(value) for value in values] or [""] * len(figures)
        notes = ["overwritten by the run"] if entry.is_mutated else []
        notes += [f"left out: {entry.left_out}"] if entry.left_out else []
        table.add_row(entry.name, entry.kind, entry.describe(), entry.device, *cells, ", ".join(notes))
    return table


def profile(
    document: Mapping[str, Any], earlier: Mapping[str, Any] | None, *, rows: int, title: str, earlier_title: str = ""
) -> RenderableType:
    """Return the tables of one profile.

    Args:
        document: What `profile.json` holds.
        earlier: Of the profile that it is compared with.
        rows: Most rows of a table; what is left out is counted.
        title: Of the profile.
        earlier_title: Of the earlier one.
    """
    head = f"{title}: {document['num_steps']} steps in {_ms(document['wall_us'])} ms"
    if earlier is not None:
        head += f"; before, {earlier_title}: {earlier['num_steps']} steps in {_ms(earlier['wall_us'])} ms"
    parts: list[RenderableType] = [Text(head, style="bold"), Text(), _kinds(document, earlier), Text()]
    parts += [_paths(document, earlier, rows), Text(), _flame(document, rows)]
    return Group(*parts)


def _kinds(document: Mapping[str, Any], earlier: Mapping[str, Any] | None) -> RenderableType:
    table = new_table("kind of span", "count", "total ms", *(["before", "ratio"] if earlier else []))
    for kind in sorted(document["kinds"], key=lambda kind: -document["kinds"][kind]["total_us"]):
        total = document["kinds"][kind]["total_us"]
        cells = [kind, str(document["kinds"][kind]["count"]), _ms(total)]
        if earlier is not None:
            cells += _against(total, earlier["kinds"].get(kind, {}).get("total_us"))
        table.add_row(*cells)
    return table


def inclusive(paths: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return path -> microseconds in it and in the modules under it; the root holds all that is in a module."""
    totals: dict[str, float] = defaultdict(float)
    for path, entry in paths.items():
        totals[path] += entry["own_us"]
        if path in (ROOT, _OUTSIDE):
            continue
        parts = path.split(".")
        for length in range(1, len(parts)):
            totals[".".join(parts[:length])] += entry["own_us"]
        totals[ROOT] += entry["own_us"]
    return dict(totals)


def _paths(document: Mapping[str, Any], earlier: Mapping[str, Any] | None, rows: int) -> RenderableType:
    totals = inclusive(document["paths"])
    before = inclusive(earlier["paths"]) if earlier else {}
    everything = sum(entry["own_us"] for entry in document["paths"].values()) or 1.0
    table = new_table("module", "calls", "total ms", "share", "own ms", *(["before", "ratio"] if earlier else []))
    shown = sorted(totals, key=lambda path: -totals[path])[:rows]
    for path in sorted(shown, key=lambda path: (path == _OUTSIDE, path != ROOT, _natural(path))):
        entry = document["paths"].get(path, {"calls": 0, "own_us": 0.0})
        depth = 0 if path in (ROOT, _OUTSIDE) else path.count(".") + 1
        share = totals[path] / everything
        cells = ["  " * depth + path, str(entry["calls"] or ""), _ms(totals[path]), f"{share:.1%}"]
        cells.append(_ms(entry["own_us"]))
        if earlier is not None:
            cells += _against(totals[path], before.get(path))
        table.add_row(*cells)
    if left := len(totals) - len(shown):
        table.add_row(Text(f"{left} faster modules are not shown: --rows N", style="dim"))
    return table


def _flame(document: Mapping[str, Any], rows: int) -> RenderableType:
    table = new_table("span", "count", "total ms", "own ms", "")
    everything = sum(entry["total_us"] for entry in document["flame"].values()) or 1.0
    entries = list(_walk(document["flame"], 0))
    limit = sorted((entry["total_us"] for _, _, entry in entries), reverse=True)[:rows][-1] if entries else 0.0
    # A parent takes at least as long as what is in it, so that no row stands without its parents.
    shown = [item for item in entries if item[2]["total_us"] >= limit]
    for depth, name, entry in shown:
        bar = "█" * max(1, round(_BAR * entry["total_us"] / everything))
        table.add_row("  " * depth + name, str(entry["count"]), _ms(entry["total_us"]), _ms(entry["own_us"]), bar)
    if left := len(entries) - len(shown):
        table.add_row(Text(f"{left} shorter spans are not shown: --rows N", style="dim"))
    return table


def _walk(level: Mapping[str, Any], depth: int) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    for name, entry in sorted(level.items(), key=lambda item: -item[1]["total_us"]):
        yield depth, name, entry
        yield from _walk(entry["children"], depth + 1)


def _natural(path: str) -> list[tuple[bool, int, str]]:
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in path.split(".")]


def _against(now: float, before: float | None) -> list[str]:
    if before is None:
        return ["-", "new"]
    return [_ms(before), f"{now / before:.2f}" if before else "-"]


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.3f}"
