"""Reports the progress of long work: the part that has begun, how far it is, and a sentence for people.

Who shows it (a bar, a line in a log) reads `work`, `done` and `total`; the sentence decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto


class Work(Enum):
    """A stage of building, checking or replaying; the text of `FIRST_ANSWER` is a result."""

    LOADING = auto()
    DEQUANTIZING = auto()
    EXPORTING = auto()
    EXPORTING_CANDIDATE = auto()
    PAIRING = auto()
    COMPILING = auto()
    BUILDING_OBSERVABLE = auto()
    BUILDING_RELEASE = auto()
    BISECTING = auto()
    RUNNING = auto()
    JUDGING = auto()
    FIRST_ANSWER = auto()
    TRAINING = auto()
    WRITING = auto()

    def says(self, text: str, done: int = 0, total: int = 0) -> Event:
        """Return the event that a stage begins, or that `done` of its `total` units are over."""
        return Event(self, text, done, total)


@dataclass(frozen=True)
class Event:
    """One report of progress.

    Attributes:
        work: What is going on.
        text: The same in a sentence.
        done: Units of the stage that are over.
        total: Units that it has; 0 if unknown.
    """

    work: Work
    text: str
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        return self.text


Progress = Callable[[Event], None]


def silent(event: Event) -> None:
    """Discard the event."""
