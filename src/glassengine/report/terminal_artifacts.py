"""Draws what differs between the artifacts of two builds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from glassengine.report import words_apart as words
from glassengine.report.table import new_table

if TYPE_CHECKING:
    from glassengine.results.artifacts import ArtifactComparison, StageComparison

_STYLES = {"identical": "green", "inherited": "yellow"}
_MAX_CHANGES = 12


def comparison(result: ArtifactComparison) -> RenderableType:
    """Return the answer: which stages differ, in which nodes, which options and versions, which files."""
    parts: list[RenderableType] = [Text(words.artifacts_sentence(result), style="green" if result.ok else "bold red")]
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
            settings.add_row(*map(Text, words.setting_cells(entry)))
        parts += [Text(), settings]
    if result.files:
        parts += [Text(), Text(f"files of the back-end that differ: {', '.join(result.files)}")]
    return Group(*parts)


def _changes(stage: StageComparison) -> list[RenderableType]:
    if not stage.changes:
        return []
    lines: list[RenderableType] = [Text(), Text(f"{stage.name}:", style="bold")]
    for change in stage.changes[:_MAX_CHANGES]:
        lines += [Text(f"  {line}", style="red" if line.startswith("-") else "green") for line in change.lines]
    if len(stage.changes) > _MAX_CHANGES:
        lines.append(Text(f"  ... and {len(stage.changes) - _MAX_CHANGES} more (--json has all)"))
    return lines
