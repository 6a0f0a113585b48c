"""Finds the first step and site in which the series of two watched runs part, in one pass over both.

The noise is the baseline's own: a difference counts when it is beyond four times the larger of the largest change from
one step to the next that the baseline has made in the 32 steps before, and of the largest difference in the first 16
steps that both have; and stays so for three steps. Norms are compared by their logarithms, numbers as they are. Before
the 16 steps are over nothing is known of the noise: a difference then is reported, and not judged. NaN or infinity on
one side alone counts at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from glassengine.errors import IncomparableError
from glassengine.recording.series import MEASURED, NONFINITE, Array, SeriesReader, SeriesRow
from glassengine.results.comparison import SeriesComparison, SeriesPoint, SeriesStanding

WINDOW, CALIBRATION, LASTING = 32, 16, 3
FACTOR = 4.0
# Norms of the same values differ by the order in which their squares are added up.
_ROUNDING = 2.0**-20
_MOST_PARTINGS = 100
_LEAST_NORM = 1e-38


def compare_series(baseline: str | Path, candidate: str | Path) -> SeriesComparison:
    """Compare the series of two watched runs; memory: the last 32 numbers of each series.

    Raises:
        UsageError: A side has no series.
        IncomparableError: They have no step and series in common.
    """
    sides = SeriesReader(baseline), SeriesReader(candidate)
    found = _Found(sides)
    for row, other in _paired(sides, found):
        found.take(row, other)
    if not found.num_steps or not found.names:
        raise IncomparableError(
            "the series have nothing in common",
            got=f"{found.num_steps} common steps, {len(found.names)} common series",
            expected="two runs of one model with the same step numbers",
        )
    return found.result(str(baseline), str(candidate))


def _paired(sides: tuple[SeriesReader, SeriesReader], found: _Found) -> Iterator[tuple[SeriesRow, SeriesRow]]:
    """Yield the rows of the steps that both have, in ascending order."""
    left, right = (_ascending(side.rows(), found) for side in sides)
    one, other = next(left, None), next(right, None)
    while one is not None and other is not None:
        if one.step == other.step:
            yield one, other
            one, other = next(left, None), next(right, None)
        elif one.step < other.step:
            found.only[0] += 1
            one = next(left, None)
        else:
            found.only[1] += 1
            other = next(right, None)
    for index, (rest, first) in enumerate(((left, one), (right, other))):
        found.only[index] += (first is not None) + sum(1 for _ in rest)


def _ascending(rows: Iterator[SeriesRow], found: _Found) -> Iterator[SeriesRow]:
    last = -1
    for row in rows:
        if row.step > last:
            last = row.step
            yield row
        else:
            found.num_disordered += 1


class _Found:
    """What is known after the steps so far."""

    def __init__(self, sides: tuple[SeriesReader, SeriesReader]) -> None:
        self.names: list[str] = []
        self.num_steps = 0
        self.num_disordered = 0
        self.only = [0, 0]
        self._sides = sides
        self._first: SeriesPoint | None = None
        self._partings: dict[int, SeriesPoint] = {}
        self._columns: tuple[list[int], list[int]] = ([], [])
        self._is_norm = np.zeros(0, dtype=bool)
        self._places: list[dict[str, int]] = [{}, {}]
        # Of each common series: changes of the last steps, the last values, the largest early difference.
        self._changes = np.zeros((WINDOW, 0))
        self._last = np.zeros(0)
        self._noise = np.zeros(0)
        self._early = np.zeros(0)
        self._num_seen = np.zeros(0, dtype=np.int64)
        self._differed = np.zeros(0, dtype=bool)
        # How many steps in a row were beyond, and where that began.
        self._run = np.zeros(0, dtype=np.int64)
        self._began: dict[int, SeriesPoint] = {}

    def take(self, row: SeriesRow, other: SeriesRow) -> None:
        """Compare a step."""
        self.num_steps += 1
        self._name()
        if not self.names:
            return
        pairs = [_of(side, columns) for side, columns in zip((row, other), self._columns, strict=True)]
        states, values = (np.stack(some) for some in zip(*pairs, strict=True))
        both = (states[0] == MEASURED) & (states[1] == MEASURED)
        bad = (states[0] == NONFINITE) != (states[1] == NONFINITE)
        bad &= (states[0] >= MEASURED) & (states[0] <= NONFINITE) & (states[1] >= MEASURED) & (states[1] <= NONFINITE)
        scaled = np.where(self._is_norm, np.log(np.maximum(values, _LEAST_NORM)), values)
        difference = np.where(both, np.abs(scaled[0] - scaled[1]), 0.0)
        most = np.maximum(np.abs(values[0]), np.abs(values[1]))
        differs = np.flatnonzero(bad | (both & (np.abs(values[0] - values[1]) > _ROUNDING * most)))
        # What lasts is held against the noise before it.
        self._noise = noise = np.where(self._run > 0, self._noise, np.maximum(self._changes.max(axis=0), self._early))
        is_known = self._num_seen >= CALIBRATION
        if differs.size and self._first is None:
            self._first = self._point(row.step, int(differs[0]), states, values, difference, None)
        beyond = both & is_known & (difference > FACTOR * noise) & (difference > FACTOR * _ROUNDING)
        self._note(row.step, beyond, bad, both, (states, values, difference, noise))
        # What the step says of the noise of the next ones.
        measured = np.where(states[0] == MEASURED, scaled[0], np.nan)
        self._changes[self.num_steps % WINDOW] = np.nan_to_num(np.abs(measured - self._last), nan=0.0)
        self._last = np.where(np.isnan(measured), self._last, measured)
        self._early = np.where(is_known, self._early, np.maximum(self._early, difference))
        self._num_seen += both
        self._differed[differs] = True

    def _note(
        self, step: int, beyond: Array, bad: Array, both: Array, found: tuple[Array, Array, Array, Array]
    ) -> None:
        states, values, difference, noise = found
        for at in np.flatnonzero(bad).tolist():
            self._partings.setdefault(at, self._point(step, at, states, values, difference, None))
        fresh = np.flatnonzero(beyond & (self._run == 0))
        for at in fresh.tolist():
            self._began[at] = self._point(step, at, states, values, difference, float(noise[at]))
        self._run = np.where(beyond, self._run + 1, np.where(both, 0, self._run))
        for at in np.flatnonzero(self._run == LASTING).tolist():
            self._partings.setdefault(at, self._began[at])

    def _point(
        self, step: int, at: int, states: Array, values: Array, difference: Array, variation: float | None
    ) -> SeriesPoint:
        pairs = zip(states, values, strict=True)
        ours, theirs = (float(side[at]) if state[at] == MEASURED else None for state, side in pairs)
        gap = None if ours is None or theirs is None else float(difference[at])
        return SeriesPoint(step, self.names[at], ours, theirs, gap, variation)

    def _name(self) -> None:
        """Take note of series that are new since the last step."""
        fresh = [side.names[len(known) :] for side, known in zip(self._sides, self._places, strict=True)]
        if not fresh[0] and not fresh[1]:
            return
        for side, known in zip(self._sides, self._places, strict=True):
            for column in range(len(known), len(side.names)):
                known.setdefault(side.names[column], column)
        there = set(self.names)
        # In the order of the baseline, which is that of execution.
        added = [name for name in self._places[0] if name not in there and name in self._places[1]]
        kinds = [self._sides[0].kinds[self._places[0][name]] == "norm" for name in added]
        self.names += added
        for side_columns, known in zip(self._columns, self._places, strict=True):
            side_columns.extend(known[name] for name in added)
        count = len(added)
        self._is_norm = np.concatenate([self._is_norm, np.array(kinds, dtype=bool)])
        self._changes = np.concatenate([self._changes, np.zeros((WINDOW, count))], axis=1)
        self._last = np.concatenate([self._last, np.full(count, np.nan)])
        self._noise = np.concatenate([self._noise, np.zeros(count)])
        self._early = np.concatenate([self._early, np.zeros(count)])
        self._num_seen = np.concatenate([self._num_seen, np.zeros(count, dtype=np.int64)])
        self._differed = np.concatenate([self._differed, np.zeros(count, dtype=bool)])
        self._run = np.concatenate([self._run, np.zeros(count, dtype=np.int64)])

    def result(self, baseline: str, candidate: str) -> SeriesComparison:
        """Return what was found."""
        order = {name: at for at, name in enumerate(self.names)}
        partings = sorted(self._partings.values(), key=lambda point: (point.step, order[point.site]))
        is_unknown = self._num_seen < CALIBRATION
        is_uncalibrated = bool((is_unknown & self._differed).any())
        standing: SeriesStanding = "same" if self._first is None else "within the variation"
        if partings:
            standing = "apart"
        elif is_uncalibrated:
            standing = "uncalibrated"
        return SeriesComparison(
            baseline,
            candidate,
            ok=not partings and not is_uncalibrated,
            standing=standing,
            num_steps=self.num_steps,
            num_series=len(self.names),
            first_difference=self._first,
            first_parting=partings[0] if partings else None,
            partings=tuple(partings[:_MOST_PARTINGS]),
            num_apart=len(partings),
            num_uncalibrated=int(np.count_nonzero(is_unknown)),
            only_one=tuple(self._only_one()),
            notes=tuple(self._notes()),
        )

    def _only_one(self) -> Iterator[str]:
        for index, title in enumerate(("baseline", "candidate")):
            names = [name for name in self._places[index] if name not in self._places[1 - index]]
            if names:
                yield f"{title}: {len(names)} series, {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
            if self.only[index]:
                yield f"{title}: {self.only[index]} steps"

    def _notes(self) -> Iterator[str]:
        yield "series are norms and numbers: where they are equal, values may still differ"
        for side in self._sides:
            if side.damage is not None:
                yield f"{side.path}: the series end early: {side.damage}"
        if self.num_disordered:
            yield f"{self.num_disordered} steps came after later ones and were not compared"


def _of(row: SeriesRow, columns: list[int]) -> tuple[Array, Array]:
    """Return states and values of some columns, of which the row may not have the last."""
    chosen = np.array(columns)
    there = chosen < len(row.states)
    states, values = np.zeros(len(columns), dtype=np.uint8), np.zeros(len(columns))
    states[there] = row.states[chosen[there]]
    values[there] = row.values[chosen[there]]
    return states, values
