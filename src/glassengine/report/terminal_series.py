"""Draws the series of watched runs on a terminal: a line of small bars each, and where two runs part."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from glassengine.reading.files import printable
from glassengine.recording.series import MEASURED, NONFINITE, UNMEASURED
from glassengine.report import words_apart as words
from glassengine.report.table import new_table

if TYPE_CHECKING:
    from glassengine.recording.series import Chosen, SeriesReader
    from glassengine.results.comparison import SeriesComparison

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60
MOST_SERIES = 60
_MOST_PARTINGS = 12
_MOST_EVENTS = 20
# A series over more than this factor is drawn by its logarithms.
_WIDE = 20.0

Array = np.typing.NDArray[Any]


def plot(reader: SeriesReader, chosen: Chosen, *, width: int = WIDTH) -> RenderableType:
    """Return a line for each series: name, bars from the first step to the last, smallest, largest and last number.

    Args:
        reader: Has been read to its end.
        chosen: What is drawn; of more than 60 series the first 60.
        width: Characters of the bars; each shows the largest number of its steps.
    """
    steps = chosen.steps
    told = f"steps {steps[0]} to {steps[-1]}, {len(steps)} of them" if len(steps) else "no steps"
    table = new_table("site", "", "min", "max", "last")
    for at, name in enumerate(chosen.names[:MOST_SERIES]):
        states, values = chosen.states[:, at], chosen.values[:, at]
        there = values[states == MEASURED]
        numbers = [f"{number:.4g}" for number in (there.min(), there.max(), there[-1])] if there.size else ["-"] * 3
        table.add_row(printable(name), bars(states, values, width), *numbers)
    parts: list[RenderableType] = [Text(told), table]
    if len(chosen.names) > MOST_SERIES:
        parts.append(Text(f"{len(chosen.names) - MOST_SERIES} more series; choose with PATTERN"))
    if NONFINITE in chosen.states[:, :MOST_SERIES]:
        parts.append(Text("x: NaN or infinite elements"))
    if UNMEASURED in chosen.states[:, :MOST_SERIES]:
        parts.append(Text("?: seen and not measured"))
    for event in reader.events[:_MOST_EVENTS]:
        recorded = ", ".join(map(str, event.get("recorded") or ())) or "nothing"
        why = printable("; ".join(map(str, event.get("why") or ())))
        parts.append(Text(f"step {event['event']}: {why}; recorded: {recorded}"))
    if len(reader.events) > _MOST_EVENTS:
        parts.append(Text(f"{len(reader.events) - _MOST_EVENTS} more triggers"))
    parts += [Text(printable(note)) for note in reader.notes]
    if reader.damage is not None:
        parts.append(Text(f"the series end early: {reader.damage}"))
    return Group(*parts)


def bars(states: Array, values: Array, width: int) -> str:
    """Return a series as bars; of several steps in one bar the largest number, or x where one is not finite."""
    if not len(states):
        return ""
    there = values[states == MEASURED].astype(np.float64)
    low, high = (float(there.min()), float(there.max())) if there.size else (0.0, 0.0)
    by_logarithm = low > 0 and high > _WIDE * low
    if by_logarithm:
        low, high = math.log(low), math.log(high)
    found = []
    for piece in np.array_split(np.arange(len(states)), min(width, len(states))):
        some = states[piece]
        measured = values[piece][some == MEASURED]
        if NONFINITE in some:
            found.append("x")
        elif not measured.size:
            found.append("?" if UNMEASURED in some else " ")
        else:
            top = float(measured.max())
            height = ((math.log(top) if by_logarithm else top) - low) / (high - low) if high > low else 0.0
            found.append(BARS[min(int(height * len(BARS)), len(BARS) - 1)])
    return "".join(found)


def series_comparison(result: SeriesComparison) -> RenderableType:
    """Return the answer for `glass compare` of two watched runs."""
    verdict = Text().append("ok" if result.ok else "NOT OK", style="bold green" if result.ok else "bold red")
    verdict.append(f"  {words.series_sentence(result)}")
    lines = [f"{result.num_steps} common steps, {result.num_series} common series"]
    if result.first_difference is not None:
        lines.append(f"first difference: {words.point_words(result.first_difference)}")
    if result.first_parting is not None:
        lines.append(f"first apart: {words.point_words(result.first_parting)}")
        lines.append(f"{result.num_apart} of {result.num_series} series part")
    parts: list[RenderableType] = [verdict, *map(Text, lines)]
    if result.num_apart > 1:
        table = new_table("step", "site", "baseline", "candidate", "difference", "variation")
        for point in result.partings[:_MOST_PARTINGS]:
            table.add_row(*words.point_cells(point))
        parts.append(table)
        if result.num_apart > _MOST_PARTINGS:
            parts.append(Text(f"{result.num_apart - _MOST_PARTINGS} more"))
    parts += [Text(f"only in {printable(text)}") for text in result.only_one]
    return Group(*parts, *map(Text, result.notes))
