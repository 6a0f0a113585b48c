"""Summaries of a recording of a model or a script, and of a directory of snapshots."""

from __future__ import annotations

from dataclasses import dataclass

from glassengine.results.base import Result


@dataclass(frozen=True)
class RecordedScript(Result):
    """How a script ended and what was recorded.

    Attributes:
        status: Its exit status.
        recordings: Directories, one per model and process.
        reason: Why there are none; None where there are some.
    """

    status: int
    recordings: tuple[str, ...]
    reason: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the script succeeded and called a model."""
        return self.status == 0 and bool(self.recordings)


@dataclass(frozen=True)
class RecordedTarget(Result):
    """What was recorded, or would be.

    Attributes:
        path: Directory of the recording; None where nothing was written.
        num_steps: Steps.
        num_tensors: Tensors with values.
        num_left_out: Tensors without.
        value_bytes: Bytes of values, before equal ones are stored once.
    """

    path: str | None
    num_steps: int
    num_tensors: int
    num_left_out: int
    value_bytes: int

    @property
    def ok(self) -> bool:
        """Whether there is anything."""
        return self.num_tensors + self.num_left_out > 0


@dataclass(frozen=True)
class Uploaded(Result):
    """What was brought to a store.

    Attributes:
        url: Where the recording is.
        num_files: Files that were uploaded; others were there.
        num_steps: Steps of the recording that can be read there.
        complete: Whether it was closed and every step that was begun was completed.
    """

    url: str
    num_files: int
    num_steps: int
    complete: bool


@dataclass(frozen=True)
class ListedSnapshot(Result):
    """One snapshot of a directory.

    Attributes:
        directory: Its name there.
        reason: "every", "nonfinite" or "error"; "unfinished" where writing it was cut short, "damaged" where it cannot
            be read.
        contents: What it holds: "graph", "inputs", "outputs"; "redacted".
        origin: The op that made the first value that is not finite, where that is known.
        num_bytes: Of its files; what it shares with others counts in each of them.
        problem: Why it cannot be read.
    """

    directory: str
    reason: str
    contents: tuple[str, ...] = ()
    origin: str | None = None
    num_bytes: int = 0
    problem: str | None = None
