"""Where the time of a profile went, on a terminal: by module path, and as a flame table; beside an earlier profile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from glassengine.report.table import new_table
from glassengine.sites import ROOT

_BAR = 20
_OUTSIDE = "(outside of modules)"


def profile(
    found: Mapping[str, Any], earlier: Mapping[str, Any] | None, *, rows: int, title: str, earlier_title: str = ""
) -> RenderableType:
    """Return the tables of one profile.

    Args:
        found: What `profile.json` holds.
        earlier: Of the profile that it is compared with.
        rows: Most rows of a table; what is left out is counted.
        title: Of the profile.
        earlier_title: Of the earlier one.
    """
    head = f"{title}: {found['num_steps']} steps in {_ms(found['wall_us'])} ms"
    if earlier is not None:
        head += f"; before, {earlier_title}: {earlier['num_steps']} steps in {_ms(earlier['wall_us'])} ms"
    parts: list[RenderableType] = [Text(head, style="bold"), Text(), _kinds(found, earlier), Text()]
    parts += [_paths(found, earlier, rows), Text(), _flame(found, rows)]
    return Group(*parts)


def _kinds(found: Mapping[str, Any], earlier: Mapping[str, Any] | None) -> RenderableType:
    table = new_table("kind of span", "count", "total ms", *(["before", "ratio"] if earlier else []))
    for kind in sorted(found["kinds"], key=lambda kind: -found["kinds"][kind]["total_us"]):
        total = found["kinds"][kind]["total_us"]
        cells = [kind, str(found["kinds"][kind]["count"]), _ms(total)]
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


def _paths(found: Mapping[str, Any], earlier: Mapping[str, Any] | None, rows: int) -> RenderableType:
    totals = inclusive(found["paths"])
    before = inclusive(earlier["paths"]) if earlier else {}
    everything = sum(entry["own_us"] for entry in found["paths"].values()) or 1.0
    table = new_table("module", "calls", "total ms", "share", "own ms", *(["before", "ratio"] if earlier else []))
    table.columns[0].justify = "left"
    shown = sorted(totals, key=lambda path: -totals[path])[:rows]
    for path in sorted(shown, key=lambda path: (path == _OUTSIDE, path != ROOT, _natural(path))):
        entry = found["paths"].get(path, {"calls": 0, "own_us": 0.0})
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


def _flame(found: Mapping[str, Any], rows: int) -> RenderableType:
    table = new_table("span", "count", "total ms", "own ms", "")
    table.columns[0].justify = table.columns[4].justify = "left"
    everything = sum(entry["total_us"] for entry in found["flame"].values()) or 1.0
    entries = list(_walk(found["flame"], 0))
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
