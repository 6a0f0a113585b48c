"""Draws a prompt comparison on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from glassengine.report.table import Screen, mark
from glassengine.results.prompt import PromptComparison, PromptExample, PromptFinding

_MOST = 6
"""Findings that are drawn; the JSON document has all."""
_LONGEST = 60
_STYLES = {"wrong": "red", "limit": "yellow", "note": "dim"}
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
    return Screen(*_lines(result))


def _lines(result: PromptComparison) -> Iterator[Text]:
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
    line = Text(f"{one.level}", style=_STYLES[one.level])
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
