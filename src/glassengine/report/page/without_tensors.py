"""Makes the pages of results without tensors: engines, build artifacts, series of watched runs, rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from glassengine.errors import UsageError
from glassengine.reading.files import printable
from glassengine.recording.series import MEASURED, Chosen, SeriesReader
from glassengine.report import words
from glassengine.report.page.head import Cell, Chip, Fact, Head, PageTable, Plot, table
from glassengine.results import ArtifactComparison, SeriesComparison, SideBySide
from glassengine.results.backends import Difference
from glassengine.results.stored import Apart
from glassengine.results.without_tensors import RolloutComparison

_OF_AGREEMENT = {"bitwise": "identical", "within rounding": "rounding", "beyond": "wrong"}
_WANTS_RECORDINGS = "need both: glass report RESULT -o DIR --recordings BASELINE --recordings CANDIDATE"
_OF_STATUS = {"identical": "identical", "inherited": "suspicious"}
WIDTH, HEIGHT = 600, 120
_MOST_PLOTS = 12
_MOST_POINTS = 600
# A series over more than this factor is drawn by its logarithms.
_WIDE = 20.0
Array = np.typing.NDArray[np.float64]


def head_of_apart(result: Apart, recordings: Sequence[str | Path]) -> Head:
    """Return everything that the page of such a result shows.

    Args:
        result: What it shows.
        recordings: Of watched runs, baseline and candidate; none: no curves.

    Raises:
        UsageError: Recordings are named, and are not of two watched runs.
        CorruptError: A recording is damaged.
    """
    if isinstance(result, SeriesComparison) and len(recordings) in (0, 2):
        return _series(result, recordings)
    if recordings:
        raise UsageError("the recordings are not those of the result", got=", ".join(map(str, recordings)))
    assert not isinstance(result, SeriesComparison)
    return _artifacts(result) if isinstance(result, ArtifactComparison) else _engines(result)


def _engines(result: SideBySide) -> Head:
    titles = words.titles(result)
    steps = list(zip(*(column.steps for column in result.columns[1:]), strict=True))
    logits: list[list[Cell]] = [
        [str(row[0].step), *(Chip(_OF_AGREEMENT[found.agreement], words.step_words(found)) for found in row)]
        for row in steps
    ]
    tables = [
        _open(
            "Engines",
            "One column per engine; what is compared is compared with the first.",
            ("engine", *titles),
            [[title, *cells] for title, cells in words.engine_rows(result)],
        ),
        _open(
            "Logits, step by step",
            f"Against those of {titles[0]}; roundings are units of the dtype at the largest logit.",
            ("step", *titles[1:]),
            logits,
        ),
    ]
    lines = [("tokens", line) for line in words.token_lines(result)]
    lines += words.engine_lines(result)
    sentence = next(
        (
            f"Logits of {title} are beyond rounding, first in step {found.step}."
            for title, column in zip(titles, result.columns, strict=True)
            for found in column.steps
            if found.agreement == "beyond"
        ),
        f"Logits are {words.AGREEMENT[result.agreement]}.",
    )
    return _head(
        result.ok,
        sentence,
        lines,
        (titles[0], ", ".join(titles[1:])),
        tables,
        notes=result.notes,
    )


def _artifacts(result: ArtifactComparison) -> Head:
    kinds = ("added", "removed", "changed")
    stages: list[list[Cell]] = [
        [
            stage.name,
            Chip(_OF_STATUS.get(stage.status, "wrong"), stage.status),
            *(str(sum(change.kind == kind for change in stage.changes)) for kind in kinds),
        ]
        for stage in result.stages
    ]
    tables = [
        _open(
            "Stages",
            "In order; one that is passed on differs as those before it do.",
            ("stage", "status", *kinds),
            stages,
        )
    ]
    if changes := [
        (stage.name, change.kind, change.baseline or "", change.candidate or "", ", ".join(change.sites))
        for stage in result.stages
        for change in stage.changes
    ]:
        about = "Lines of the graphs that differ."
        tables.append(_open("Changes", about, ("stage", "kind", "baseline", "candidate", "tensors"), changes))
    if result.files:
        tables.append(_open("Files", "Of the back-end, that differ.", ("file",), [(name,) for name in result.files]))
    found = words.artifacts_sentence(result)
    return _head(
        result.ok,
        words.sentence(found),
        [],
        (result.baseline, result.candidate),
        tables,
        facts=[_fact(one) for one in result.differences],
        notes=result.notes,
    )


def _fact(found: Difference) -> Fact:
    name, baseline, candidate = map(printable, words.setting_cells(found))
    return Fact(name, baseline, candidate, differs=True)


def _series(result: SeriesComparison, recordings: Sequence[str | Path]) -> Head:
    lines = [("common", f"{result.num_steps:,} steps, {result.num_series:,} series")]
    if result.first_difference is not None:
        lines.append(("differ", words.point_words(result.first_difference)))
    if result.first_parting is not None:
        lines.append(("apart", words.point_words(result.first_parting)))
        lines.append(("part", f"{result.num_apart:,} of {result.num_series:,} series"))
    if not recordings:
        lines.append(("curves", _WANTS_RECORDINGS))
    tables = []
    if result.partings:
        columns = ("step", "series", "baseline", "candidate", "difference", "variation")
        rows = [words.point_cells(point) for point in result.partings]
        about = "The first number of each series that is beyond the variation, and stays there."
        tables.append(_open("Where series part", about, columns, rows))
    if result.only_one:
        tables.append(_open("Only on one side", "Not compared.", ("what",), [(text,) for text in result.only_one]))
    found = words.series_sentence(result)
    if (parting := result.first_parting) is not None:
        found += f", {parting.site} first, in step {parting.step}"
    drawn: Sequence[Plot] = ()
    if recordings:
        drawn = curves(result, *recordings)
    sides = result.baseline, result.candidate
    return _head(result.ok, words.sentence(found), lines, sides, tables, plots=drawn, notes=result.notes)


def _open(title: str, about: str, columns: tuple[str, ...], rows: Sequence[Sequence[Cell]]) -> PageTable:
    return table(title, about, tuple(map(printable, columns)), rows, is_open=True)


def _head(
    ok: bool,
    sentence: str,
    lines: Sequence[tuple[str, str]],
    sides: tuple[str, str],
    tables: Sequence[PageTable],
    *,
    facts: Sequence[Fact] = (),
    plots: Sequence[Plot] = (),
    notes: Sequence[str] = (),
) -> Head:
    return Head(
        mark="ok" if ok else "NOT OK",
        tone="good" if ok else "bad",
        sentence=printable(sentence),
        lines=tuple((what, printable(text)) for what, text in lines),
        baseline=printable(sides[0]),
        candidate=printable(sides[1]),
        facts=tuple(facts),
        tables=tuple(tables),
        plots=tuple(plots),
        notes=tuple(map(printable, notes)),
    )


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


def with_rollout(head: Head, found: RolloutComparison) -> Head:
    """Return the head of a page with what is known of a rollout."""
    causes = [
        (f"{one.share:.0%}", Chip("rounding" if one.is_rounding else "wrong", one.kind), one.text, "; ".join(one.alike))
        for one in found.causes
    ]
    causes.append((f"{found.rest:.0%}", Chip("none", "rest"), found.rest_is, ""))
    tokens = [
        (str(one.sample), str(one.place), str(one.token), one.text or "", f"{one.engine:.5f}", f"{one.trainer:.5f}")
        for one in found.worst
    ]
    tables = (
        table("Causes", "Shares of the mean gap.", ("share", "kind", "cause", "so would"), causes, is_open=True),
        table(
            "Worst tokens",
            "Their log-probabilities on both sides.",
            ("sample", "place", "token", "text", "engine", "trainer"),
            tokens,
            is_open=True,
        ),
    )
    lines = [("gap", words.gap(found)), *(one for one in head.lines if one[0] != "judged")]
    sides = {"plots": (_curve(found),), "about_plots": "Tokens in the order of the trainer's log-probabilities."}
    return replace(head, tables=(*tables, *head.tables), lines=tuple(lines), **sides)  # type: ignore[arg-type]


def _curve(found: RolloutComparison) -> Plot:
    values = [value for pair in found.curve for value in pair]
    low, high = min(values, default=0.0), max(values, default=1.0)

    def drawn(side: int) -> str:
        return " ".join(
            f"{WIDTH * at / max(len(found.curve) - 1, 1):.1f},{HEIGHT * (high - pair[side]) / (high - low or 1):.1f}"
            for at, pair in enumerate(found.curve)
        )

    about = f"from {low:.3g} to {high:.3g}; baseline: trainer, candidate: engine"
    return Plot("log-probabilities", about, (drawn(0),), (drawn(1),), None)
