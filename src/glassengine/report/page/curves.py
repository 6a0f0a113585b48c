"""Series of two watched runs as curves, where there are recordings: those that part, in order of their steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from glassengine.reading.files import printable
from glassengine.recording.series import MEASURED, Chosen, SeriesReader
from glassengine.report.page.head import Plot
from glassengine.results.comparison import SeriesComparison

WIDTH, HEIGHT = 600, 120
_MOST_PLOTS = 12
_MOST_POINTS = 600
# A series over more than this factor is drawn by its logarithms.
_WIDE = 20.0

Array = np.typing.NDArray[np.float64]


def curves(result: SeriesComparison, baseline: str | Path, candidate: str | Path) -> tuple[Plot, ...]:
    """Return the curves of the series that part; of runs that do not, of the first series.

    Raises:
        UsageError: There are no series.
        CorruptError: A recording is damaged.
    """
    sides = [SeriesReader(side).chosen() for side in (baseline, candidate)]
    parting = {point.site: point.step for point in result.partings}
    common = [name for name in sides[0].names if name in set(sides[1].names)]
    wanted = [name for name in parting if name in common] or common
    found = (_plot(name, sides, parting.get(name)) for name in wanted[:_MOST_PLOTS])
    return tuple(plot for plot in found if plot is not None)


def _plot(name: str, sides: Sequence[Chosen], parting: int | None) -> Plot | None:
    lines = [_line(side, name) for side in sides]
    known = np.concatenate([values[np.isfinite(values)] for _, values in lines])
    steps = np.concatenate([steps for steps, _ in lines])
    if not known.size:
        return None
    low, high = float(known.min()), float(known.max())
    first, last = int(steps.min()), int(steps.max())
    by_logarithm = low > 0 and high > _WIDE * low
    scale = f"steps {first} to {last}, {low:.4g} to {high:.4g}{', logarithmic' if by_logarithm else ''}"

    def across(step: float) -> float:
        return WIDTH * (step - first) / max(last - first, 1)

    def up(value: float) -> float:
        bottom, top = (math.log(low), math.log(high)) if by_logarithm else (low, high)
        there = math.log(value) if by_logarithm else value
        return HEIGHT - HEIGHT * (there - bottom) / (top - bottom or 1.0)

    drawn = [
        tuple(" ".join(f"{across(step):.1f},{up(value):.1f}" for step, value in piece) for piece in _pieces(*line))
        for line in lines
    ]
    return Plot(
        printable(name), scale, drawn[0], drawn[1], None if parting is None else f"{across(float(parting)):.1f}"
    )


def _line(side: Chosen, name: str) -> tuple[Array, Array]:
    """Return steps and numbers of a series, NaN where there is none; of a long one as many as can be seen."""
    at = side.names.index(name)
    values = np.where(side.states[:, at] == MEASURED, side.values[:, at].astype(np.float64), np.nan)
    places = np.unique(np.linspace(0, len(values) - 1, min(_MOST_POINTS, len(values))).round().astype(int))
    return side.steps[places].astype(np.float64), values[places]


def _pieces(steps: Array, values: Array) -> list[list[tuple[float, float]]]:
    pieces: list[list[tuple[float, float]]] = [[]]
    for step, value in zip(steps.tolist(), values.tolist(), strict=True):
        if math.isfinite(value):
            pieces[-1].append((step, value))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]
