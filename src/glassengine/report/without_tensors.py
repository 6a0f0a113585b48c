"""Makes the pages of results without tensors: engines, build artifacts, series of watched runs, rollouts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import starmap
from operator import attrgetter
from pathlib import Path

import numpy as np

from glassengine.errors import UsageError, shortened
from glassengine.recording.series import MEASURED, Chosen, SeriesReader
from glassengine.report import words
from glassengine.report.head import Cell, Chip, Head, PageTable, Plot, filled, table
from glassengine.results import ArtifactComparison, SeriesComparison, SideBySide
from glassengine.results.engines import AGREEMENTS, EngineColumn, StepDifference
from glassengine.results.stored import Apart
from glassengine.results.without_tensors import RolloutComparison

_OF_AGREEMENT = {"bitwise": "identical", "within rounding": "rounding", "beyond": "wrong"}
_WANTS_RECORDINGS = "need both: glass report RESULT -o DIR --recordings BASELINE --recordings CANDIDATE"
_OF_STATUS = {"identical": "identical", "inherited": "suspicious"}
_STANDING = {"same": "the series are the same", "apart": "the series part", "uncalibrated": "the series differ"}
_MAX_NAMES = 3
WIDTH, HEIGHT = 600, 120
_MOST_PLOTS = 12
_MOST_ALIKE = 2
_MOST_POINTS = 600
# A series over more than this factor is drawn by its logarithms.
_WIDE = 20.0
Array = np.typing.NDArray[np.float64]


def head_of_apart(result: Apart, recordings: Sequence[str | Path] = ()) -> Head:
    """Return everything that is shown of such a result.

    Args:
        result: What it shows.
        recordings: Of watched runs, baseline and candidate; none: no curves.

    Raises:
        UsageError: Recordings are named, and are not of two watched runs.
        CorruptError: A recording is damaged.
    """
    if recordings and not (isinstance(result, SeriesComparison) and len(recordings) == 2):
        raise UsageError("the recordings are not those of the result", got=", ".join(map(str, recordings)))
    if isinstance(result, SeriesComparison):
        return _series(result, recordings)
    return _artifacts(result) if isinstance(result, ArtifactComparison) else _engines(result)


def _engines(result: SideBySide) -> Head:
    columns = result.columns
    titles = words.short_names([column.engine for column in columns])
    steps = zip(*(column.steps for column in columns[1:]), strict=True)
    logits: list[list[Cell]] = [
        [str(row[0].step), *(Chip(_OF_AGREEMENT[found.agreement], _step_words(found)) for found in row)]
        for row in steps
    ]
    about = f"Against those of {titles[0]}; roundings are units of the dtype at the largest logit."
    sentence = next(
        (
            f"Logits of {title} are beyond rounding, first in step {found.step}."
            for title, column in zip(titles, columns, strict=True)
            for found in column.steps
            if found.agreement == "beyond"
        ),
        f"Logits are {words.AGREEMENT[result.agreement]}.",
    )
    lines = [
        (
            "tokens",
            f"{title}: first different token in step {found.step}, sequence {found.row}: {found.candidate} instead "
            f"of {found.baseline}; its logit is ahead by {found.candidate_margin:.4g} here and behind by "
            f"{found.baseline_margin:.4g} in the first engine",
        )
        for title, column in zip(titles, columns, strict=True)
        if (found := column.first_different_token) is not None
    ]
    judged_by = ", ".join(dict.fromkeys(step.judged_by for column in columns for step in column.steps))
    lengths = ", ".join(str(len(row)) for row in result.prompt_token_ids)
    judged = f"by {judged_by}; prompts of {lengths} tokens, {len(result.token_ids[0])} steps, all with the tokens that"
    lines.append(("judged", f"{judged} {titles[0]} chose"))
    rounds = f"are medians of {result.rounds} alternating rounds, {result.num_threads} threads, {result.cpu}"
    lines.append(("times", rounds))
    if "model" not in columns[0].options:
        lines.append(("model", columns[0].model))
    engines = [[title, *cells] for title, cells in _engine_rows(result, titles)]
    about_engines = "What is compared is compared with the first."
    return Head(
        sentence,
        result.ok,
        lines=tuple(lines),
        baseline=titles[0],
        candidate=", ".join(titles[1:]),
        tables=(
            table("Engines", about_engines, ("engine", *titles), engines, is_open=True),
            table("Logits, step by step", about, ("step", *titles[1:]), logits, is_open=True),
        ),
        notes=result.notes,
    )


def _engine_rows(result: SideBySide, titles: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield what is known of each engine: (what, one text per engine)."""
    columns = result.columns
    directories = [column.engine for column in columns]
    if titles != directories:
        yield "directory", directories
    yield "backend", [column.backend for column in columns]
    yield "dtype", [column.dtype for column in columns]
    added = (column.added_outputs for column in columns)
    yield "added outputs", [f"{len(names)}: {shortened(names, _MAX_NAMES)}" if names else "none" for names in added]
    for option in columns[0].options:
        yield option, [column.options[option] for column in columns]
    for what in ("total", "executable", "weights"):
        sizes = [getattr(column, f"{what}_bytes") for column in columns]
        yield f"{what} size", [_with_ratio(words.bytes_text(size), size, sizes[0]) for size in sizes]
    for what in ("prefill", "decode"):
        times = [getattr(column, f"{what}_ms") for column in columns]
        told = ["-" if time is None else _with_ratio(f"{time:.4g} ms", time, times[0]) for time in times]
        yield f"{what} step" if what == "decode" else what, told
    total = sum(len(tokens) for tokens in result.token_ids)
    others = (column.num_different_tokens for column in columns[1:])
    yield "tokens", ["chosen", *(f"{number} of {total} differ" if number else "equal" for number in others)]
    yield "logits", ["-", *(_worst_step(column) for column in columns[1:])]


def _with_ratio(text: str, value: float, first: float | None) -> str:
    return f"{text} ({value / first:.2f}x)" if first and value != first else text


def _worst_step(column: EngineColumn) -> str:
    worst = max(column.steps, key=lambda one: (AGREEMENTS.index(one.agreement), one.noise_ratio or one.rounding_units))
    return _step_words(worst) + ("" if worst.agreement == "bitwise" else f" (step {worst.step})")


def _step_words(difference: StepDifference) -> str:
    """Return the size of a difference, in epsilons of the position's largest logit, and over the floor."""
    if difference.agreement == "bitwise":
        return words.AGREEMENT["bitwise"]
    over = "" if difference.noise_ratio is None else f", noise ratio {difference.noise_ratio:.2g}"
    return f"max abs {difference.figures.max_abs_diff:.3g}, {difference.rounding_units:.2g} roundings{over}"


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
    changes = [
        (stage.name, line, ", ".join(change.sites))
        for stage in result.stages
        for change in stage.changes
        for line in change.lines
    ]
    settings = [(one.name, _setting(one.baseline), _setting(one.candidate)) for one in result.differences]
    files = [(name,) for name in result.files]
    about = "In order; one that is passed on differs as those before it do."
    return Head(
        words.sentence(words.artifacts_sentence(result)),
        result.ok,
        has_verdict=not words.is_unfinished(result),
        baseline=result.baseline,
        candidate=result.candidate,
        tables=filled(
            table("Stages", about, ("stage", "status", *kinds), stages, is_open=True),
            table("Changes", "Lines of the graphs that differ.", ("stage", "change", "tensors"), changes, is_open=True),
            table("Settings", "Options that differ.", ("setting", "baseline", "candidate"), settings, is_open=True),
            table("Files", "Files of the back-end that differ.", ("file",), files, is_open=True),
        ),
        notes=result.notes,
    )


def _setting(value: object) -> str:
    return "none" if value is None else str(value)


def _series(result: SeriesComparison, recordings: Sequence[str | Path]) -> Head:
    lines = [("common", f"{result.num_steps:,} steps, {result.num_series:,} series")]
    if result.first_difference is not None:
        lines.append(("differ", words.point_words(result.first_difference)))
    if result.first_parting is not None:
        lines.append(("apart", words.point_words(result.first_parting)))
        lines.append(("part", f"{result.num_apart:,} of {result.num_series:,} series"))
    if not recordings:
        lines.append(("curves", _WANTS_RECORDINGS))
    columns = ("step", "series", "baseline", "candidate", "difference", "variation")
    numbers = attrgetter(*columns[2:])
    rows = [(str(one.step), one.site, *map(words.number_words, numbers(one))) for one in result.partings]
    about = "The first number of each series that is beyond the variation, and stays there."
    only_one = [(text,) for text in result.only_one]
    found = _STANDING.get(result.standing, f"the series are {result.standing}")
    if result.standing == "uncalibrated":
        found += "; uncalibrated: too few steps to know their variation"
    if (parting := result.first_parting) is not None:
        found += f", {parting.site} first, in step {parting.step}"
    return Head(
        words.sentence(found),
        result.ok,
        lines=tuple(lines),
        baseline=result.baseline,
        candidate=result.candidate,
        tables=filled(
            table("Where series part", about, columns, rows, is_open=True),
            table("Only on one side", "What only one side has is not compared.", ("what",), only_one, is_open=True),
        ),
        plots=curves(result, *recordings) if recordings else (),
        notes=result.notes,
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
    bottom, top = (math.log(low), math.log(high)) if by_logarithm else (low, high)

    def across(step: float) -> float:
        return WIDTH * (step - first) / max(last - first, 1)

    def point(step: float, value: float) -> str:
        there = math.log(value) if by_logarithm else value
        return f"{across(step):.1f},{HEIGHT - HEIGHT * (there - bottom) / (top - bottom or 1.0):.1f}"

    drawn = [tuple(" ".join(starmap(point, piece)) for piece in _pieces(*line)) for line in lines]
    return Plot(name, scale, drawn[0], drawn[1], None if parting is None else f"{across(float(parting)):.1f}")


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
    return replace(
        head,
        tables=(*rollout_tables(found), *head.tables),
        lines=(("gap", words.gap(found)), *(one for one in head.lines if one[0] != "judged")),
        plots=(_curve(found),),
        about_plots="Tokens in the order of the trainer's log-probabilities.",
    )


def rollout_tables(found: RolloutComparison) -> tuple[PageTable, ...]:
    """Return the causes of the gap, and the tokens where it is largest."""
    causes: list[list[Cell]] = []
    for one in found.causes:
        alike = f" (so would: {'; '.join(one.alike[:_MOST_ALIKE])})" if one.alike else ""
        kind = Chip("rounding" if one.is_rounding else "wrong", one.kind)
        causes.append([f"{one.share:.0%}", kind, f"{one.text}{alike}"])
    causes.append([f"{found.rest:.0%}", Chip("none", "rest"), found.rest_is])
    tokens = []
    for token in found.worst:
        if token.engine != token.trainer:
            text = "" if token.text is None else repr(token.text)[1:-1]
            places = map(str, (token.sample, token.place, token.token))
            tokens.append((*places, text, f"{token.engine:.5f}", f"{token.trainer:.5f}"))
    columns = ("sample", "place", "token", "text", "engine", "trainer")
    return filled(
        table("Causes", "Shares of the mean gap.", ("share", "kind", "cause"), causes, is_open=True),
        table("Worst tokens", "Their log-probabilities on both sides.", columns, tokens, is_open=True),
    )


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
