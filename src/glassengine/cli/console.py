"""A console for text that others wrote: names in dumps and messages of models reach the terminal as text only."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from glassengine.reading.printable import printable

__all__ = ["SafeConsole", "printable"]


class SafeConsole(Console):
    """Prints escapes instead of control characters; line ends and tabs stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of something; those that rich itself controls the terminal with stay as they are."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable(segment.text, also="\n\t")
            yield segment if text == segment.text else Segment(text, segment.style)
