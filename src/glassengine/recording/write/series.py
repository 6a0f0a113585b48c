"""Writes the series of a watched run: a row a step, at once, so that a process that is killed leaves all of them."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glassengine.errors import GlassError
from glassengine.recording.layout.layout import MAX_FRAME_BYTES, SERIES
from glassengine.recording.layout.records import frame
from glassengine.recording.layout.series import MAX_COLUMNS, Array, row_frames
from glassengine.writing.files import open_to_append, write_whole

_log = logging.getLogger(__name__)

# Names of a frame; with all their characters escaped these take less than a frame may have.
_NAMES_BYTES = MAX_FRAME_BYTES // 8


class SeriesLog:
    """Appends to `series.log` of a recording; what goes wrong on disk never reaches the model.

    Args:
        directory: The recording's.

    Attributes:
        num_columns: How many series there are.
        failure: What stopped the writing, if anything did.

    Raises:
        GlassError: The file cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        self.num_columns = 0
        self.failure: OSError | None = None
        self._path = directory / SERIES
        self._fresh: list[tuple[str, str]] = []
        self._process = os.getpid()
        try:
            self._descriptor: int | None = open_to_append(self._path)
        except OSError as error:
            raise GlassError("the series cannot be written", got=f"{self._path}: {error.strerror}") from error

    def column(self, name: str, kind: str) -> int | None:
        """Return the number of a new series; None where there are too many."""
        if self.num_columns >= MAX_COLUMNS:
            return None
        self._fresh.append((name, kind))
        self.num_columns += 1
        return self.num_columns - 1

    def row(
        self, step: int, time: float, states: Array, values: Array, nonfinite: Sequence[tuple[int, int, float]]
    ) -> None:
        """Write what was measured in a step.

        Args:
            step: Its number.
            time: Seconds since 1970.
            states: [columns], uint8.
            values: [columns], float32.
            nonfinite: (column, number of non-finite elements or -1, norm of the others).
        """
        frames = self._names()
        for first in range(0, len(nonfinite), 4096):
            frames.append(frame({"step": step, "nonfinite": list(nonfinite[first : first + 4096])}))
        self._write([*frames, *row_frames(step, time, states, values)])

    def event(self, step: int, why: Sequence[str], recorded: Sequence[int], missing: Sequence[str]) -> None:
        """Note that a trigger has had steps recorded."""
        self._write([frame({"event": step, "why": why, "recorded": recorded, "missing": missing})])

    def note(self, text: str) -> None:
        """Note what a reader should know."""
        self._write([frame({"note": text})])

    def close(self) -> None:
        """Write no more."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _names(self) -> list[bytes]:
        frames, some, size = [], list[Any](), 0
        for name, kind in self._fresh:
            some.append((name, kind))
            size += len(name) + len(kind)
            if size > _NAMES_BYTES:
                frames.append(frame({"columns": some}))
                some, size = [], 0
        if some:
            frames.append(frame({"columns": some}))
        self._fresh.clear()
        return frames

    def _write(self, frames: Sequence[bytes]) -> None:
        if self._descriptor is None or self.failure is not None or os.getpid() != self._process:
            return
        try:
            write_whole(self._descriptor, b"".join(frames))
        except OSError as error:
            self.failure = error
            _log.warning("the series of %s end here: %s", self._path.parent, error.strerror or error)
