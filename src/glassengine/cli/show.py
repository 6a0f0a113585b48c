"""`glass show`: the tensors of a recording, or of what another program wrote, and their statistics."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Annotated, Any

import typer

import glassengine as glass
from glassengine import commands
from glassengine.cli.documents import answer
from glassengine.cli.foreign import renamed
from glassengine.cli.options import err, out, progress, settings
from glassengine.cli.shared import Overwrite
from glassengine.errors import UsageError
from glassengine.reading.files import printable

CONTEXT_SETTINGS = renamed({"export": "output"})


def command(
    recording: Annotated[
        str,
        typer.Argument(metavar="RECORDING|DUMP", help="Recording, or anything that compare reads.", show_default=False),
    ],
    pattern: Annotated[
        str | None,
        typer.Argument(metavar="PATTERN", help="Show only these sites: name, glob or re:.", show_default=False),
    ] = None,
    step: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Show only this step. Repeatable; default without PATTERN: the first."),
    ] = None,
    rank: Annotated[int | None, typer.Option(metavar="N", help="Show only this rank.", show_default=False)] = None,
    nonfinite: Annotated[bool, typer.Option("--nonfinite", help="Show only tensors with NaN or Inf.")] = False,
    values: Annotated[bool, typer.Option("--values", help="Print the values; of large tensors, the edges.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Print all values.")] = False,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="Write the tensors of a recording or a dump: x.pt, x.npz or a directory.",
        ),
    ] = None,
    export_format: Annotated[
        str | None, typer.Option(metavar="pt|npz|debug-tree", help="Format of a directory; default: debug-tree.")
    ] = None,
    overwrite: Overwrite = False,
    plot: Annotated[bool, typer.Option("--plot", help="Draw the series of a watched run, a line each.")] = False,
) -> int:
    """Show the tensors of a recording or dump, and their statistics."""
    if plot:
        if any((step, rank is not None, nonfinite, values, full, output, export_format, overwrite)):
            raise UsageError("--plot goes with PATTERN only", got="--plot and another flag")
        return _show_series(recording, pattern)
    if output is not None:
        others = rank is not None or nonfinite or values or full or settings.json is not None
        if others or len(step or ()) > 1:
            got = "--rank, --nonfinite, --values, --full, --json or several --step"
            raise UsageError("--output goes with PATTERN and one --step only", got=got)
        format: Any = export_format
        sites = None if pattern is None else [pattern]
        only = step[0] if step else None
        for path in glass.export(recording, output, format=format, sites=sites, step=only, overwrite=overwrite):
            out.print(f"wrote {path}")
        return 0
    if export_format is not None or overwrite:
        raise UsageError("nothing is exported", got="--export-format or --overwrite", hint="--output PATH")
    if settings.json == "-" and (values or full):
        raise UsageError("--json prints statistics of tensors, not values", hint="--output PATH writes values")
    from glassengine.report import terminal_show

    opened = glass.open(recording)
    wanted = set(step or ())
    missing = sorted(wanted - set(opened.steps))
    if missing:
        raise UsageError(f"step {missing[0]} is not recorded", expected=", ".join(map(str, opened.steps)) or "no steps")
    if not wanted and pattern is None and settings.json is None:
        wanted = set(opened.steps[:1])

    def shown(item: Any) -> bool:
        return (not wanted or item.step in wanted) and rank in (None, item.rank)

    found_entries, found_left_out = (opened.entries, opened.left_out) if pattern is None else opened.find(pattern)
    entries = [entry for entry in found_entries if shown(entry)]
    left_out = [item for item in found_left_out if shown(item)]
    if values or full:
        for entry in entries:
            title = f"step {entry.step}, rank {entry.rank}, {printable(entry.site)}: {entry.describe()}"
            out.print(terminal_show.values(opened.tensor(entry), title, full=full))
        if settings.json is None:
            return 0
    rows = []
    with progress("statistics", total=len(entries)) as advance:
        for entry in entries:
            rows.append((entry, opened.summary(entry)))
            advance(1)
    if nonfinite:
        rows = [(entry, found) for entry, found in rows if found.num_nan or found.num_inf]
        left_out = [item for item in left_out if item.statistics is not None and item.statistics.num_nonfinite]

    def show() -> None:
        if values or full:
            return
        if pattern is not None:
            _print_table(opened, rows, left_out)
        else:
            _print_tree(opened, rows, left_out, num_steps=len(wanted))

    answer(lambda: _document(opened, rows, left_out), show)
    return 0


def _print_table(opened: Any, rows: list[Any], left_out: list[Any]) -> None:
    from glassengine.report.terminal_compare import recording as table

    cells = ((entry.step, entry.rank, printable(entry.site), found) for entry, found in rows)
    out.print(table(cells, complete=opened.complete, reason=opened.incomplete_because))
    for entry, _ in rows:
        if entry.sharding is not None:
            out.print(f"step {entry.step}, rank {entry.rank}, {printable(entry.site)}: {entry.sharding}")
    for item in map(_as_shown, left_out):
        out.print(f"step {item.step}, rank {item.rank}, {item.site}: {_light(item)}: {item.reason}")


def _print_tree(opened: Any, rows: list[Any], left_out: list[Any], *, num_steps: int) -> None:
    from glassengine.report import terminal_show

    if not opened.complete:
        out.print(f"incomplete: {printable(str(opened.incomplete_because))}")
    if not rows and not left_out:
        out.print("no tensors")
    all_rows = [(_as_shown(entry), found) for entry, found in rows] + [(_as_shown(item), None) for item in left_out]
    out.print(terminal_show.tree(all_rows, _modules(opened.metadata.get("modules"))))
    num_shards = sum(entry.sharding is not None for entry, _ in rows)
    if num_shards:
        out.print(f"{num_shards} shards of distributed tensors; what the whole of each is, with PATTERN or --json")
    unseen = opened.metadata.get("not_seen")
    for reason, count in Counter(map(str, unseen.values() if isinstance(unseen, dict) else ())).items():
        out.print(f"{count} module{'' if count == 1 else 's'} not seen: {printable(reason)}")
    if not settings.quiet and len(opened.steps) > num_steps:
        err.print(f"{num_steps} of {len(opened.steps)} steps; others with --step, all of one site with PATTERN")


def _light(item: Any) -> str:
    """Return what is known of a tensor without values: its shape, and the statistics that were taken of it."""
    found = item.statistics
    if found is None:
        return "not recorded"
    shape = f"{item.dtype}[{', '.join(map(str, item.shape))}]" if item.dtype is not None else "a tensor"
    extremes = (
        f"{name} {'-' if value is None else format(value, '.6g')}"
        for name, value in (("min", found.min), ("max", found.max))
    )
    numbers = f"{', '.join(extremes)}, norm {found.norm:.6g}"
    return f"{shape} without values, {numbers}" + (f", {found.num_nonfinite} not finite" if found.num_nonfinite else "")


def _as_shown(tensor: Any) -> Any:
    changed = {} if tensor.site.isprintable() else {"site": printable(tensor.site)}
    if hasattr(tensor, "reason"):
        # What torch or the model said may have several lines.
        changed["reason"] = "; ".join(printable(line.strip()) for line in tensor.reason.splitlines())
    return dataclasses.replace(tensor, **changed) if changed else tensor


def _modules(known: Any) -> dict[str, str]:
    items = known.items() if isinstance(known, dict) else ()
    return {printable(str(path)): printable(str(name)) for path, name in items}


def _document(opened: Any, rows: list[Any], left_out: list[Any]) -> dict[str, Any]:
    def plain(value: float | None) -> float | str | None:
        return value if value is None or math.isfinite(value) else str(value)

    tensors = [
        {
            "step": entry.step,
            "rank": entry.rank,
            "site": entry.site,
            "node": entry.node,
            **({} if entry.sharding is None else {"sharding": dataclasses.asdict(entry.sharding)}),
            **found.to_dict(),
        }
        for entry, found in rows
    ]
    others = []
    for item in left_out:
        light = item.statistics
        numbers = {} if light is None else {"min": light.min, "max": light.max, "norm": light.norm}
        others.append(
            {
                "step": item.step,
                "rank": item.rank,
                "site": item.site,
                "reason": item.reason,
                "dtype": item.dtype,
                "shape": item.shape,
                **{name: plain(value) for name, value in numbers.items()},
                **({} if light is None else {"num_nonfinite": light.num_nonfinite}),
            }
        )
    return {
        "schema_version": 1,
        "recording": str(opened.path),
        "complete": opened.complete,
        "incomplete_because": opened.incomplete_because,
        "steps": opened.steps,
        "stopped": {str(step): reason for step, reason in opened.stopped.items()},
        "metadata": opened.metadata,
        "tensors": tensors,
        "left_out": others,
    }


def _show_series(recording: str, pattern: str | None) -> int:
    """Draw the series of a run and return the exit status."""
    reader = commands.SeriesReader(recording)
    chosen = reader.chosen(pattern)

    def show() -> None:
        from glassengine.report.terminal_show import plot

        out.print(plot(reader, chosen))

    answer(lambda: _series_document(reader, chosen), show)
    return 0


def _series_document(reader: Any, chosen: Any) -> dict[str, Any]:
    words = ("absent", None, "not finite", "not measured")

    def as_json(state: int, value: float) -> float | str | None:
        word = words[state]
        return word if word is not None else value if math.isfinite(value) else str(value)

    columns = zip(chosen.states.T.tolist(), chosen.values.T.tolist(), strict=True)
    return {
        "schema_version": 1,
        "recording": str(reader.path),
        "steps": chosen.steps.tolist(),
        "series": {
            name: [as_json(*pair) for pair in zip(*column, strict=True)]
            for name, column in zip(chosen.names, columns, strict=True)
        },
        "events": reader.events,
        "notes": reader.notes,
        "damage": reader.damage,
    }
