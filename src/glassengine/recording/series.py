"""The file of a watched run, `series.log`: a few numbers of every site in every step, and what was recorded when.

A row a step is written at once, so that a process that is killed leaves all of them. Its frames are like those of the
index: payload length (u32), CRC-32 of the payload (u32), payload; little-endian. A payload is a JSON object, or a row:

    bytes       meaning
    0-3         2, 0, 0, 0
    4-7         first column of the row; a step with many columns has several rows
    8-15        step
    16-23       seconds since 1970 (float64)
    24-27       number of columns n
    28-31       0
    then        n states (u8, see `ABSENT` to `UNMEASURED`), then n values (float32)

JSON objects are: `{"columns": [[name, kind], ...]}`, which numbers on from the columns before, `kind` being "norm" or
"number"; `{"step", "nonfinite": [[column, count, norm of the others], ...]}` ahead of the rows of a step that has such
elements, with a count of -1 where it is not known; `{"event": step, "why", "recorded", "missing"}` for values that a
trigger has had recorded; `{"note": text}`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from glassengine.errors import GlassError, UnknownNameError, UsageError
from glassengine.reading.files import open_regular
from glassengine.recording.layout.layout import MAX_FRAME_BYTES, SERIES
from glassengine.recording.layout.records import decoded, frame, framed, read_payload
from glassengine.sites import matches
from glassengine.writing import open_to_append, write_whole

ABSENT, MEASURED, NONFINITE, UNMEASURED = range(4)
"""What a row says of a column: not in this step; a value; NaN or infinite elements; there, but not measured."""
ROW_COLUMNS = 1 << 16
"""A step with more columns has several rows."""
MAX_COLUMNS = 1 << 20

Array = np.typing.NDArray[Any]

_ROW = struct.Struct("<B3xIQdI4x")
_KIND = 2
_BYTES_OF_COLUMN = 5


def row_frames(step: int, time: float, states: Array, values: Array) -> list[bytes]:
    """Return the frames of one step."""
    found = []
    for first in range(0, max(len(states), 1), ROW_COLUMNS):
        some = slice(first, first + ROW_COLUMNS)
        head = _ROW.pack(_KIND, first, step, time, len(states[some]))
        payload = head + states[some].tobytes() + values[some].tobytes()
        found.append(framed(payload))
    return found


def read_payloads(file: BinaryIO) -> Iterator[dict[str, Any] | tuple[int, int, float, Array, Array]]:
    """Yield what the frames of an open file hold, up to the first damaged one: objects, and rows.

    A row is (step, first column, time, states, values).
    """
    while (payload := read_payload(file)) is not None:
        yield _row(payload) if payload[:1] == bytes([_KIND]) else decoded(payload)


def _row(payload: bytes) -> tuple[int, int, float, Array, Array]:
    if len(payload) < _ROW.size:
        raise ValueError("a row without a head")
    _, first, step, time, count = _ROW.unpack_from(payload)
    if len(payload) != _ROW.size + _BYTES_OF_COLUMN * count or first + count > MAX_COLUMNS:
        raise ValueError("a row of another length than it claims")
    states = np.frombuffer(payload, np.uint8, count, _ROW.size)
    values = np.frombuffer(payload, "<f4", count, _ROW.size + count)
    if count and states.max() > UNMEASURED:
        raise ValueError("a row with an unknown state")
    return step, first, time, states, values


_log = logging.getLogger(__name__)

# Names of a frame; with all their characters escaped these take less than a frame may have.
_NAMES_BYTES = MAX_FRAME_BYTES // 8


class SeriesLog:
    """Appends to `series.log` of a recording; what goes wrong on disk never reaches the model.

    Attributes:
        num_columns: How many series there are.
        failure: What stopped the writing, if anything did.
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
        """Write what was measured in a step."""
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


_MAX_EVENTS = 100_000
# Of what is kept of a choice of series.
_MAX_NUMBERS = 1 << 28


@dataclass(frozen=True)
class SeriesRow:
    """A step of a watched run.

    Attributes:
        step: Its number.
        time: When it ended, seconds since 1970.
        states: [columns], see `recording.series`.
        values: [columns], float32: norms of the finite elements, or numbers.
    """

    step: int
    time: float
    states: Array
    values: Array


@dataclass(frozen=True)
class Chosen:
    """Some series of a run, whole."""

    steps: Array
    names: tuple[str, ...]
    states: Array
    values: Array


class SeriesReader:
    """The series of one process of a watched run.

    Args:
        path: Directory of its recording, or one that holds a single watched recording.

    Attributes:
        path: The directory.
        names: Of the columns, as far as `rows` has come.
        kinds: Of the columns: "norm" or "number".
        events: What triggered: "event" (the step), "why", "recorded", "missing".
        notes: What the watch noted.
        damage: Why there is nothing more, if that is not the end of the file.
    """

    def __init__(self, path: str | Path) -> None:
        found = find_series(path)
        if found is None:
            raise UsageError(
                "no series of a watched run found",
                got=str(path),
                expected=f"a recording with {SERIES}",
                hint="glass record --watch, or glass.record(..., watch=True)",
            )
        self.path = found
        self.names: list[str] = []
        self.kinds: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.damage: str | None = None

    def rows(self) -> Iterator[SeriesRow]:
        """Yield every step, from the start; forgets what an earlier call has found."""
        for known in (self.names, self.kinds, self.events, self.notes):
            known.clear()
        self.damage = None
        row: SeriesRow | None = None
        with open_regular(self.path / SERIES, inside=self.path) as file:
            payloads = read_payloads(file)
            while True:
                try:
                    payload = next(payloads, None)
                    if isinstance(payload, dict):
                        self._take(payload)
                        continue
                except ValueError as error:
                    self.damage = str(error)
                    payload = None
                if payload is not None and row is not None and payload[1] == len(row.states) and payload[0] == row.step:
                    states, values = (row.states, payload[3]), (row.values, payload[4])
                    row = SeriesRow(row.step, row.time, np.concatenate(states), np.concatenate(values))
                    continue
                if row is not None:
                    yield row
                if payload is None:
                    return
                row = SeriesRow(payload[0], payload[2], payload[3], payload[4])

    def chosen(self, pattern: str | None = None) -> Chosen:
        """Return the series whose name matches `pattern`, or all."""
        steps, states, values = list[int](), list[Array](), list[Array]()
        columns: list[int] = []
        num_known = num_numbers = 0
        for row in self.rows():
            fresh = self.names[num_known : len(row.states)]
            columns += [num_known + at for at, name in enumerate(fresh) if pattern is None or matches(pattern, name)]
            num_known += len(fresh)
            steps.append(row.step)
            states.append(row.states[columns])
            values.append(row.values[columns])
            num_numbers += len(columns)
            if num_numbers > _MAX_NUMBERS:
                raise UsageError("the series take too much memory", got=str(self.path), hint="choose some: PATTERN")
        if pattern is not None and not columns:
            raise UnknownNameError("series", pattern, self.names)
        names = tuple(self.names[column] for column in columns)
        return Chosen(np.array(steps, dtype=np.int64), names, _table(states, len(names)), _table(values, len(names)))

    def _take(self, payload: dict[str, Any]) -> None:
        columns = payload.get("columns")
        if isinstance(columns, list) and len(self.names) + len(columns) <= MAX_COLUMNS:
            for item in columns:
                name, kind = item if isinstance(item, list) and len(item) == 2 else ("?", "?")
                if not isinstance(name, str) or kind not in ("norm", "number"):
                    raise ValueError("a column without a name")
                self.names.append(name)
                self.kinds.append(kind)
        elif "event" in payload and isinstance(payload["event"], int):
            if len(self.events) < _MAX_EVENTS:
                self.events.append(payload)
        elif isinstance(payload.get("note"), str):
            self.notes.append(payload["note"])


def _table(rows: Sequence[Array], width: int) -> Array:
    """Return rows, which may be shorter than the last one, as [rows, width]; nothing was there before."""
    found = np.full((len(rows), width), ABSENT, dtype=rows[0].dtype if rows else np.float32)
    for at, row in enumerate(rows):
        found[at, : len(row)] = row
    return found


def find_series(path: str | Path) -> Path | None:
    """Return the directory at `path` with the series of a watched run: itself, or the only one in it; else None."""
    directory = Path(path)
    if (directory / SERIES).is_file():
        return directory
    inside = sorted(directory.glob(f"*/{SERIES}")) if directory.is_dir() else []
    if len(inside) > 1:
        hint = f"one of them: {inside[0].parent}"
        raise UsageError("several watched recordings", got=str(directory), expected="one", hint=hint)
    return inside[0].parent if inside else None
