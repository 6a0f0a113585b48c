"""What `--json` prints of a command that ended with an error."""

from __future__ import annotations

from dataclasses import dataclass

from glassengine.errors import GlassError
from glassengine.results.base import Result


@dataclass(frozen=True)
class Message(Result):
    """The parts of an error message.

    Attributes:
        what: What failed.
        got: What was there.
        expected: What was expected or is available, the nearest first.
        hint: The flag or call that helps.
    """

    what: str
    got: str | None
    expected: str | None
    hint: str | None


@dataclass(frozen=True)
class Failure(Result):
    """A command that ended with an error, in place of its result.

    Attributes:
        error: The message, also on stderr.
        exit_status: Of the command.
        ok: Always false.
    """

    error: Message
    exit_status: int
    ok: bool = False
    schema_version: int = 1


def failure(error: GlassError, exit_status: int) -> Failure:
    """Return the document of an error."""
    return Failure(Message(error.what, error.got, error.expected, error.hint), exit_status)
