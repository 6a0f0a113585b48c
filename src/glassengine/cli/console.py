"""A console for text that others wrote: names in dumps and messages of models reach the terminal as text only."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# All others are printed as they are; most text has none, and a hundred thousand lines are looked at.
_UNUSUAL = re.compile(r"[^\x20-\x7e]")


def printable(text: str, also: str = "") -> str:
    """Return `text` with escapes in place of what would move the cursor, turn the direction or break the line.

    Args:
        text: Anything.
        also: Characters to keep besides those that can be printed.
    """
    if text.isprintable():
        return text

    def escaped(found: re.Match[str]) -> str:
        char = found[0]
        return char if char.isprintable() or char in also else ascii(char)[1:-1]

    return _UNUSUAL.sub(escaped, text)


class SafeConsole(Console):
    """Prints escapes in place of control characters, whatever they are part of; lines and tabs stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of something; those that rich itself controls the terminal with stay as they are."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable(segment.text, also="\n\t")
            yield segment if text == segment.text else Segment(text, segment.style)
