"""The steps of a recording that have ended: their records, and what the manifest says of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glassengine.recording.layout import records
from glassengine.recording.layout.tokens import append_tokens, token_frames
from glassengine.recording.write.directory import manifest_of
from glassengine.recording.write.open_step import OpenStep


@dataclass(slots=True)
class EndedStep:
    """A step whose records are to be written once its bytes are."""

    number: int
    frames: bytes
    num_tensors: int
    token_ids: Sequence[Sequence[int]]
    stopped: str | None


class EndedSteps:
    """Makes the records of steps, and counts the steps whose records were written.

    Args:
        metadata: Of the recording; the token ids of written steps are appended to it.

    Attributes:
        num_steps: Number of steps whose records were written.
        incomplete: Why the recording is incomplete, if it is.
    """

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.num_steps = 0
        self.incomplete: str | None = None
        self._metadata = metadata
        self._num_tensors = 0
        self._described: set[int] = set()
        self._waiting: list[EndedStep] = []

    def add(self, number: int, step: OpenStep, token_ids: Sequence[Sequence[int]], stopped: str | None) -> None:
        """Make the records of a step; they wait until they are taken."""
        # A step that is never committed must not be the one that describes a group others use.
        new = {group.number: group for group in step.groups if group.number not in self._described}
        frames = [group.frame() for group in new.values()]
        frames += [*step.frames, *token_frames(number, token_ids)]
        frames.append(records.commit_frame(number, len(step.names), step.num_left_out, stopped))
        self._described |= new.keys()
        self._waiting.append(EndedStep(number, b"".join(frames), len(step.names), token_ids, stopped))

    def take(self) -> list[EndedStep]:
        """Return the steps that wait to be written; they no longer wait."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def note_written(self, steps: Sequence[EndedStep]) -> None:
        """Count steps whose records are on file."""
        for step in steps:
            self.num_steps += 1
            self._num_tensors += step.num_tensors
            if step.stopped is not None and self.incomplete is None:
                self.incomplete = f"step {step.number} was stopped by {step.stopped}"
            if step.token_ids:
                append_tokens(self._metadata.setdefault("token_ids", []), enumerate(step.token_ids))

    def manifest(self, state: str) -> bytes:
        """Return the manifest of the recording in `state`.

        Raises:
            UsageError: The metadata is not JSON.
        """
        counts = {"num_steps": self.num_steps, "num_tensors": self._num_tensors}
        return manifest_of(state, self.incomplete, **counts, metadata=self._metadata)
