"""Errors that a user can act on.

Every message has the same parts: what failed, what was there, what was expected or is available (nearest first), and
the exact flag or call that helps. The exit status of the command line belongs to the class. `docs/errors.md`
lists the messages. What a user should know and is no error goes to `logger`.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Sequence

logger = logging.getLogger("glassengine")


class GlassError(Exception):
    """Base of every error that Glass Engine raises on purpose.

    Args:
        what: What failed, one sentence without a full stop.
        got: What was there.
        expected: What was expected, or what is available (nearest first).
        hint: The exact flag or call that helps.
    """

    exit_status = 1

    def __init__(
        self,
        what: str,
        *,
        got: str | None = None,
        expected: str | Sequence[str] | None = None,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.got = got
        self.expected = expected if expected is None or isinstance(expected, str) else ", ".join(expected)
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        parts = [self.what]
        for label in ("got", "expected", "hint"):
            text = getattr(self, label)
            if text:
                parts.append(f"{label:>9}: {text}")
        return "\n".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (type(self), self.what, self.got, self.expected, self.hint)


def _unpickled(
    kind: type[GlassError], what: str, got: str | None, expected: str | None, hint: str | None
) -> GlassError:
    error = kind.__new__(kind)
    GlassError.__init__(error, what, got=got, expected=expected, hint=hint)
    return error


class UsageError(GlassError):
    """The request itself cannot be carried out: a wrong name, path, flag or input."""

    exit_status = 2


_FEW = 12  # names that are all listed where none is near


class UnknownNameError(UsageError):
    """A site, node or pattern that names nothing; carries the nearest names, or the few that there are."""

    def __init__(self, kind: str, name: str, available: Iterable[str], *, hint: str | None = None) -> None:
        names = list(available)
        close = nearest(name, names)
        expected = f"one of {len(names):,} names" + (f", nearest: {', '.join(close)}" if close else "")
        if not names:
            expected = f"nothing: there is no {kind}"
        if not close and 0 < len(names) <= _FEW:
            expected = f"one of {', '.join(dict.fromkeys(names))}"
        super().__init__(f"unknown {kind} {name!r}", expected=expected, hint=hint)


class BackendError(GlassError):
    """A back-end is missing, or failed to build, load or run."""

    exit_status = 3


class IncomparableError(GlassError):
    """Two sides cannot be compared, or too little of them could be."""

    exit_status = 4


class CorruptError(GlassError):
    """A file or directory is truncated, damaged, or written by a newer version."""

    exit_status = 4


_PLACE_ONLY = re.compile(r"Exception from \S+|Check '.*' failed at \S+|\S+\.(?:c|cc|cpp|cu|h|hpp):\d+:?")


def first_line(error: object) -> str:
    """Return the first line of a message that names the problem, not only a place in foreign C++; "" for none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if not _PLACE_ONLY.fullmatch(line)), lines[0] if lines else "")


def shortened(names: Iterable[object], most: int, *, joint: str = ", ") -> str:
    """Return the first `most` names, and how many more there are."""
    listed = list(map(str, names))
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return joint.join(listed[:most]) + more


def nearest(name: str, available: Iterable[str], limit: int = 5) -> list[str]:
    """Return up to `limit` of `available`, most similar to `name` first.

    Names that contain `name`, or whose last parts are similar, rank before names that only share letters.
    """
    wanted = name.strip("*?").lower()
    scored = []
    for candidate in dict.fromkeys(available):
        low = candidate.lower()
        score = difflib.SequenceMatcher(None, wanted, low[-len(wanted) - 4 :]).ratio()
        if wanted and wanted in low:
            score += 1.0
        if score >= 0.5:
            scored.append((-score, len(candidate), candidate))
    return [candidate for _, _, candidate in sorted(scored)[:limit]]
