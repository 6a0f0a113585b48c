"""What `glass show --plot` and `glass compare` do with the series of watched runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from glassengine import commands
from glassengine.cli.documents import answer
from glassengine.cli.options import err, out, settings
from glassengine.cli.report import write_beside
from glassengine.errors import UsageError


def are_watched(sides: Sequence[str]) -> bool:
    """Whether all sides are recordings of watched runs."""
    return len(sides) == 2 and all(commands.find_series(side) is not None for side in sides)


def compare_watched(sides: Sequence[str], report: str | None) -> int:
    """Compare the series of two runs, print the answer and return the exit status."""
    if len(sides) != 2:
        raise UsageError("series are compared two at a time", got=f"{len(sides)} sides")
    result = commands.compare_series(*sides)

    def show() -> None:
        from glassengine.report.terminal_series import series_comparison

        out.print(series_comparison(result))
        if not settings.quiet:
            err.print("values that both have recorded: glass compare --no-series " + " ".join(sides))

    answer(result.to_dict, show)
    write_beside(result, report, recordings=sides)
    return 0 if result.ok else 4 if result.standing == "uncalibrated" else 1


def show_series(recording: str, pattern: str | None) -> int:
    """Draw the series of a run and return the exit status."""
    reader = commands.SeriesReader(recording)
    chosen = reader.chosen(pattern)

    def show() -> None:
        from glassengine.report.terminal_series import plot

        out.print(plot(reader, chosen))

    answer(lambda: _document(reader, chosen), show)
    return 0


def _document(reader: Any, chosen: Any) -> dict[str, Any]:
    words = ("absent", None, "not finite", "not measured")

    def told(state: int, value: float) -> float | str | None:
        word = words[state]
        return word if word is not None else value if math.isfinite(value) else str(value)

    columns = zip(chosen.states.T.tolist(), chosen.values.T.tolist(), strict=True)
    return {
        "schema_version": 1,
        "recording": str(reader.path),
        "steps": chosen.steps.tolist(),
        "series": {
            name: [told(*pair) for pair in zip(*column, strict=True)]
            for name, column in zip(chosen.names, columns, strict=True)
        },
        "events": reader.events,
        "notes": reader.notes,
        "damage": reader.damage,
    }
