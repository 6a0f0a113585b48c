"""What is printed of text that others wrote: escapes in place of what a terminal obeys."""

from __future__ import annotations

import functools
import re


@functools.lru_cache(maxsize=8)
def _unusual(also: str) -> re.Pattern[str]:
    """All others are printed as they are; most text has none, and a hundred thousand lines are looked at."""
    return re.compile(rf"[^\x20-\x7e{re.escape(also)}]")


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
        return char if char.isprintable() else ascii(char)[1:-1]

    return _unusual(also).sub(escaped, text)
