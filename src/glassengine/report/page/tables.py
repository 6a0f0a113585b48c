"""Tables of a page that are plain HTML: inputs, weights, drift, and of what has no tensors everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from glassengine.reading.files import printable
from glassengine.report import words
from glassengine.results import Comparison, DriftRow, QuantizedWeight

MOST_LINES = 200


class Chip(NamedTuple):
    """A word in the color of a verdict.

    Attributes:
        kind: The verdict.
        text: The word.
    """

    kind: str
    text: str


Cell = str | Chip


class Table(NamedTuple):
    """A table of a page.

    Attributes:
        title: Its heading.
        sentence: What it shows.
        columns: Their names.
        rows: One cell a column.
        is_open: Whether it is seen at once.
    """

    title: str
    sentence: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    is_open: bool = False


def tables_of(result: Comparison) -> list[Table]:
    """Return the tables of a comparison, as far as it has what they show."""
    found: list[Table] = []
    columns: tuple[str, ...]
    inputs = [
        (case.case, str(used.step), used.origin, words.input_line(used), used.recipe)
        for case in result.inputs
        for used in case.inputs
    ]
    if inputs:
        columns = ("case", "step", "origin", "input", "how it was made")
        found.append(table("Inputs", "What all sides ran on, and whether it was made up.", columns, inputs))
    if result.fineness:
        rows = [(one.rung, words.judged(one)) for one in result.fineness]
        found.append(table("Fineness", "How finely the inside was judged.", ("rung", "judged"), rows))
    if result.weights is not None and result.weights.different:
        ways = [(text,) for text in (*result.weights.how, *result.weights.different)]
        what = f"{len(result.weights.different)} of {result.weights.compared} differ by more than rounding."
        found.append(table("Weights", what, ("weight",), ways))
    if result.written_differently:
        different = [(o.rung, o.site, o.candidate_site, o.difference, o.verdict) for o in result.written_differently]
        columns = ("rung", "site", "there", "difference", "verdict")
        found.append(table("Written differently", "The same op with other arguments.", columns, different))
    if result.drift:
        drift = [_drift(row) for row in result.drift]
        columns = ("kind", "site", "SNR dB", "cosine", "introduced dB", "share of the loss")
        found.append(table("Drift", "Where a less precise candidate loses its signal.", columns, drift))
    if result.quantization is not None:
        weights = [_weight(one) for one in result.quantization.weights]
        columns = ("weight", "verdict", "SNR dB", "steps, rms", "hint")
        found.append(table("Quantization", "What quantization did to each weight, alone.", columns, weights))
    return found


def table(
    title: str, sentence: str, columns: tuple[str, ...], rows: Sequence[Sequence[Cell]], *, is_open: bool = False
) -> Table:
    """Return a table of the first rows; it says how many there are in all."""
    shown = tuple(tuple(map(_printable, row)) for row in rows[:MOST_LINES])
    if len(rows) > MOST_LINES:
        sentence += f" The first {MOST_LINES} of {len(rows):,}; the JSON document has all."
    return Table(title, sentence, columns, shown, is_open)


def _printable(cell: Cell) -> Cell:
    return cell._replace(text=printable(cell.text)) if isinstance(cell, Chip) else printable(cell)


def _drift(row: DriftRow) -> tuple[str, ...]:
    numbers = f"{row.snr_db:.1f}", f"{row.cosine_similarity:.6f}", _decibels(row.introduced_db), _percent(row.share)
    return row.kind, row.site, *numbers


def _weight(one: QuantizedWeight) -> tuple[str, ...]:
    hints = "; ".join(hint.text for hint in one.hints)
    return one.name, one.verdict, f"{one.snr_db:.1f}", f"{one.rms_steps:.3g}", hints


def _decibels(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
