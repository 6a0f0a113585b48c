"""What engines, build artifacts and series of runs say of each other: the same on a terminal and on a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from glassengine.reading.files import printable
from glassengine.results import ArtifactComparison, EngineColumn, SeriesComparison, SeriesPoint, SideBySide
from glassengine.results.artifacts import Difference
from glassengine.results.engines import StepDifference

AGREEMENT = {"bitwise": "bitwise equal", "within rounding": "within rounding", "beyond": "beyond rounding"}
_STANDING = {"same": "the series are the same", "apart": "the series part", "uncalibrated": "the series differ"}
_MAX_NAMES = 3


def titles(result: SideBySide) -> list[str]:
    """Return the names of the directories of engines where these tell them apart, else the directories."""
    directories = [column.engine for column in result.columns]
    names = [Path(directory).name for directory in directories]
    return names if len(set(names)) == len(names) and all(names) else directories


def engine_rows(result: SideBySide) -> Iterator[tuple[str, list[str]]]:
    """Yield what is known of each engine: (what, one text per engine)."""
    columns = result.columns
    directories = [column.engine for column in columns]
    if titles(result) != directories:
        yield "directory", directories
    yield "backend", [column.backend for column in columns]
    yield "dtype", [column.dtype for column in columns]
    yield "added outputs", [_names(column.added_outputs) for column in columns]
    for option in columns[0].options:
        yield option, [column.options[option] for column in columns]
    for what in ("total", "executable", "weights"):
        sizes = [getattr(column, f"{what}_bytes") for column in columns]
        yield f"{what} size", [_with_ratio(_bytes(size), size, sizes[0]) for size in sizes]
    for what in ("prefill", "decode step"):
        times = [column.prefill_ms if what == "prefill" else column.decode_ms for column in columns]
        yield what, ["-" if time is None else _with_ratio(f"{time:.4g} ms", time, times[0]) for time in times]
    total = sum(len(tokens) for tokens in result.token_ids)
    yield "tokens", ["chosen", *(_tokens(column, total) for column in columns[1:])]
    yield "logits", ["-", *(AGREEMENT[column.agreement] for column in columns[1:] if column.agreement)]


def engine_lines(result: SideBySide) -> list[tuple[str, str]]:
    """Return how engines were judged and measured, each line as its first word and the rest."""
    judged_by = ", ".join(dict.fromkeys(step.judged_by for column in result.columns for step in column.steps))
    lengths = ", ".join(str(len(row)) for row in result.prompt_token_ids)
    lines = [
        (
            "judged",
            f"by {judged_by}; prompts of {lengths} tokens, {len(result.token_ids[0])} steps, all with the tokens that "
            f"{titles(result)[0]} chose",
        ),
        ("times", f"are medians of {result.rounds} alternating rounds, {result.num_threads} threads, {result.cpu}"),
    ]
    if "model" not in result.columns[0].options:
        lines.append(("model", result.columns[0].model))
    return lines


def step_words(difference: StepDifference) -> str:
    """Return the size of a difference, in epsilons of the position's largest logit, and over the floor."""
    if difference.agreement == "bitwise":
        return AGREEMENT["bitwise"]
    over = "" if difference.noise_ratio is None else f", noise ratio {difference.noise_ratio:.2g}"
    return f"max abs {difference.figures.max_abs_diff:.3g}, {difference.rounding_units:.2g} roundings{over}"


def token_lines(result: SideBySide) -> list[str]:
    """Return the first other token of each engine that has one."""
    lines = []
    for title, column in zip(titles(result), result.columns, strict=True):
        if (found := column.first_different_token) is not None:
            lines.append(
                f"{title}: first different token in step {found.step}, sequence {found.row}: {found.candidate} instead "
                f"of {found.baseline}; its logit is ahead by {found.candidate_margin:.4g} here and behind by "
                f"{found.baseline_margin:.4g} in the first engine"
            )
    return lines


def artifacts_sentence(result: ArtifactComparison) -> str:
    """Return whether two builds have the same artifacts, and where they differ first."""
    if result.ok:
        return "identical: every stage, option and version"
    first = next((stage for stage in result.stages if stage.status != "identical"), None)
    if first is not None:
        return f"different: first in stage {first.name}, {first.status}"
    if not result.complete and not result.differences and not result.files:
        return "no verdict: the same as far as they go, but a build did not end well"
    return "different: the graphs are the same at every stage, settings or files are not"


def setting_cells(found: Difference) -> tuple[str, str, str]:
    """Return the name of a setting, and its value on both sides."""
    baseline, candidate = ("none" if value is None else str(value) for value in (found.baseline, found.candidate))
    return found.name, baseline, candidate


def series_sentence(result: SeriesComparison) -> str:
    """Return whether two runs go apart."""
    told = _STANDING.get(result.standing, f"the series are {result.standing}")
    return told + ("; uncalibrated: too few steps to know their variation" if result.standing == "uncalibrated" else "")


def point_words(point: SeriesPoint) -> str:
    """Return where two series differ, and by how much."""
    sides = f"{number_words(point.baseline)} against {number_words(point.candidate)}"
    told = f"step {point.step}, {printable(point.site)}: {sides}"
    if point.variation is not None:
        told += f", a difference of {number_words(point.difference)} where the variation is "
        told += number_words(point.variation)
    return told


def point_cells(point: SeriesPoint) -> Sequence[str]:
    """Return a point as cells: step, site, baseline, candidate, difference, variation."""
    numbers = (point.baseline, point.candidate, point.difference, point.variation)
    return [str(point.step), printable(point.site), *map(number_words, numbers)]


def number_words(value: float | None) -> str:
    """Return a number of a series."""
    return "not finite" if value is None else f"{value:.6g}"


def _tokens(column: EngineColumn, total: int) -> str:
    return f"{column.num_different_tokens} of {total} differ" if column.num_different_tokens else "equal"


def _names(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{len(names)}: {', '.join(names[:_MAX_NAMES])}{more}" if names else "none"


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def _with_ratio(text: str, value: float, first: float | None) -> str:
    return f"{text} ({value / first:.2f}x)" if first and value != first else text
