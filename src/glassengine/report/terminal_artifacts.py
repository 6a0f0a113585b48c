"""Draws what differs between the artifacts of two builds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from glassengine.report.table import new_table

if TYPE_CHECKING:
    from glassengine.results.artifacts import ArtifactComparison, StageComparison

_STYLES = {"identical": "green", "inherited": "yellow"}
_MAX_CHANGES = 12


def comparison(result: ArtifactComparison) -> RenderableType:
    """Return the answer: which stages differ, in which nodes, which options and versions, which files."""
    parts: list[RenderableType] = [_headline(result)]
    parts += [Text(f"note: {note}", style="yellow") for note in result.notes]
    table = new_table("stage", "status", "added", "removed", "changed")
    for stage in result.stages:
        counts = [sum(change.kind == kind for change in stage.changes) for kind in ("added", "removed", "changed")]
        status = Text(stage.status, style=_STYLES.get(stage.status, "bold red"))
        table.add_row(Text(stage.name), status, *(str(count) if count else "" for count in counts))
    parts += [Text(), table]
    for stage in result.stages:
        parts += _changes(stage)
    if result.differences:
        settings = new_table("setting", "baseline", "candidate")
        for entry in result.differences:
            settings.add_row(Text(entry.name), Text(_value(entry.baseline)), Text(_value(entry.candidate)))
        parts += [Text(), settings]
    if result.files:
        parts += [Text(), Text(f"files of the back-end that differ: {', '.join(result.files)}")]
    return Group(*parts)


def _headline(result: ArtifactComparison) -> Text:
    if result.ok:
        return Text("identical: every stage, option and version", style="green")
    first = next((stage for stage in result.stages if stage.status != "identical"), None)
    if first is not None:
        return Text(f"different: first in stage {first.name}, {first.status}", style="bold red")
    if not result.complete and not result.differences and not result.files:
        return Text("no verdict: the same as far as they go, but a build did not end well", style="bold red")
    return Text("different: the graphs are the same at every stage, settings or files are not", style="bold red")


def _changes(stage: StageComparison) -> list[RenderableType]:
    if not stage.changes:
        return []
    lines: list[RenderableType] = [Text(), Text(f"{stage.name}:", style="bold")]
    for change in stage.changes[:_MAX_CHANGES]:
        lines += [Text(f"  {line}", style="red" if line.startswith("-") else "green") for line in change.lines]
    if len(stage.changes) > _MAX_CHANGES:
        lines.append(Text(f"  ... and {len(stage.changes) - _MAX_CHANGES} more (--json has all)"))
    return lines


def _value(value: object) -> str:
    return "none" if value is None else str(value)
