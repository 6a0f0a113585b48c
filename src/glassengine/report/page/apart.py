"""The page of what is compared and has no tensors: engines side by side, build artifacts, series of watched runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from glassengine.errors import UsageError
from glassengine.reading.files import printable
from glassengine.report import words_apart as words
from glassengine.report.page.head import Head, Plot
from glassengine.report.page.origin import Fact
from glassengine.report.page.tables import Cell, Chip, Table, table
from glassengine.results import ArtifactComparison, SeriesComparison, SideBySide
from glassengine.results.artifacts import Difference
from glassengine.results.stored import Apart

_OF_AGREEMENT = {"bitwise": "identical", "within rounding": "rounding", "beyond": "wrong"}
_WANTS_RECORDINGS = "need both: glass report RESULT -o DIR --recordings BASELINE --recordings CANDIDATE"
_OF_STATUS = {"identical": "identical", "inherited": "suspicious"}


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
            "Stages", "In order; a stage inherits what the stages before it have.", ("stage", "status", *kinds), stages
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
        f"{found[:1].upper()}{found[1:]}.",
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
        # Readers of recordings load what a page of a document does without.
        from glassengine.report.page.curves import curves

        drawn = curves(result, *recordings)
    sides = result.baseline, result.candidate
    return _head(result.ok, f"{found[:1].upper()}{found[1:]}.", lines, sides, tables, plots=drawn, notes=result.notes)


def _open(title: str, about: str, columns: tuple[str, ...], rows: Sequence[Sequence[Cell]]) -> Table:
    return table(title, about, tuple(map(printable, columns)), rows, is_open=True)


def _head(
    ok: bool,
    sentence: str,
    lines: Sequence[tuple[str, str]],
    sides: tuple[str, str],
    tables: Sequence[Table],
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
