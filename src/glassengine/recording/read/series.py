"""Reads the series of a watched run, row by row, up to the end or the first damage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from glassengine.errors import UnknownNameError, UsageError
from glassengine.reading.files import open_regular
from glassengine.recording.layout.layout import SERIES
from glassengine.recording.layout.series import ABSENT, MAX_COLUMNS, Array, read_payloads
from glassengine.sites import matches

_MAX_EVENTS = 100_000
# Of what is kept of a choice of series.
_MAX_NUMBERS = 1 << 28


@dataclass(frozen=True)
class Row:
    """A step of a watched run.

    Attributes:
        step: Its number.
        time: When it ended, seconds since 1970.
        states: [columns], see `recording.layout.series`.
        values: [columns], float32: norms of the finite elements, or numbers.
    """

    step: int
    time: float
    states: Array
    values: Array


@dataclass(frozen=True)
class Chosen:
    """Some series of a run, whole.

    Attributes:
        steps: [steps].
        names: Of the series.
        states: [steps, series].
        values: [steps, series].
    """

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

    Raises:
        UsageError: There are no series.
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

    def rows(self) -> Iterator[Row]:
        """Yield every step, from the start; forgets what an earlier call has found."""
        for known in (self.names, self.kinds, self.events, self.notes):
            known.clear()
        self.damage = None
        row: Row | None = None
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
                    row = Row(row.step, row.time, np.concatenate(states), np.concatenate(values))
                    continue
                if row is not None:
                    yield row
                if payload is None:
                    return
                row = Row(payload[0], payload[2], payload[3], payload[4])

    def chosen(self, pattern: str | None = None) -> Chosen:
        """Return the series whose name matches `pattern`, or all.

        Raises:
            UnknownNameError: None does.
            UsageError: They take too much memory.
        """
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
    """Return the directory at `path` with the series of a watched run: itself, or the only one in it; else None.

    Raises:
        UsageError: Several are in it.
    """
    directory = Path(path)
    if (directory / SERIES).is_file():
        return directory
    inside = sorted(directory.glob(f"*/{SERIES}")) if directory.is_dir() else []
    if len(inside) > 1:
        hint = f"one of them: {inside[0].parent}"
        raise UsageError("several watched recordings", got=str(directory), expected="one", hint=hint)
    return inside[0].parent if inside else None
