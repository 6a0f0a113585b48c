"""Shows results in notebooks: small tables without scripts, data frames, and plots by packages of an extra."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from glassengine.errors import UsageError
from glassengine.extensions import require_package
from glassengine.reading.files import printable
from glassengine.results.sentences import named_mistake, sides

MAX_ROWS = 12
_LONGEST = 160
_COLORS = {"identical": "#999999", "rounding": "#0072b2", "suspicious": "#e69f00", "wrong": "#d55e00"}
"""Of Okabe and Ito, which people with any color vision tell apart."""
_SCALE = ("#ffe99a", "#fec950", "#fe9f36", "#ee7a22", "#c44303", "#8f2c04", "#541b05")
_RATIOS, _DECIBELS, _NOT_FINITE = (4, 16, 100, 1e3, 1e4, 1e6), (100, 80, 60, 40, 20, 0), "#aa3377"
"""Colors of what is beyond rounding, by its size, as on the page of a report (`scale.js`)."""
_SUSPICIOUS, _WRONG = 4.0, 8.0
"""Times the noise floor; `docs/numerics.md`."""


def card(
    title: str,
    facts: Mapping[str, object],
    rows: Iterable[Mapping[str, object]] = (),
    more: int = 0,
    drawing: str = "",
) -> str:
    """Return a title, a table of facts, a drawing, and a table of rows, as HTML that nothing in it can leave.

    Args:
        title: What it is.
        facts: Name -> value; those that are None are left out.
        rows: The same keys each.
        more: How many rows there are beside these.
        drawing: An SVG element.
    """
    told = [
        f"<tr><th>{_cell(name)}</th><td>{_cell(value)}</td></tr>" for name, value in facts.items() if value is not None
    ]
    parts = [f"<div><strong>{_cell(title)}</strong>", f"<table>{''.join(told)}</table>" if told else ""]
    parts.append(drawing)
    listed = list(rows)
    if listed:
        head = "".join(f"<th>{_cell(name)}</th>" for name in listed[0])
        body = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row.values())}</tr>" for row in listed)
        parts.append(f"<table><tr>{head}</tr>{body}</table>")
    if more > 0:
        parts.append(f"<p>and {more:,} more</p>")
    return "".join([*parts, "</div>"])


def comparison_card(result: Any) -> str:
    """Return the card of a `Comparison`: the mistake, both sides with their values and lines, and the worst tensors."""
    first = result.first_divergence
    facts: dict[str, object] = {
        "baseline": result.baseline,
        "candidate": result.candidate,
        "compared": f"{result.counts['compared']:,} tensors, coverage {result.coverage:.1%}",
    }
    for found in result.results[-1:]:
        facts["result"] = found.in_words()
    if first is not None:
        hint = first.hints[0] if first.hints else None
        values = (sides(hint) if hint is not None else None) or ("", "")
        lines = first.source, first.candidate_source or first.source
        facts["first divergence"] = f"{first.site} (step {first.step}, {first.verdict})"
        for side, value, line in zip(("baseline", "candidate"), values, lines, strict=True):
            facts[f"{side} has"] = f"{value}: {line}" if value and line else value or line
        if hint is not None:
            facts |= {"mistake, proven" if hint.proven else "hint": hint.in_words(), "the line should read": hint.line}
    own = [pair for pair in result.pairs if pair.verdict in ("suspicious", "wrong") and not pair.inherited]
    worst = sorted(own, key=lambda pair: (pair.verdict != "wrong", -_ratio(pair)))
    rows = [
        {
            "site": pair.site,
            "step": pair.step,
            "verdict": pair.verdict,
            "error/floor": pair.noise_ratio,
            "max abs": None if pair.figures is None else pair.figures.max_abs_diff,
        }
        for pair in worst[:MAX_ROWS]
    ]
    why = result.verdict if result.ok else named_mistake(result) or result.not_ok_because or result.standing
    title = f"ok: {why}" if result.ok else f"NOT OK: {why}"
    return card(title, facts, rows, more=len(worst) - len(rows), drawing=_map(worst_rows(result)))


def worst_rows(result: Any) -> list[list[tuple[str, Any]]]:
    """Return the map of a comparison: for each of its first steps the modules in order, each with its worst pair.

    It is that of the level of the first divergence, else of the level with the most tensors. A module of which nothing
    was compared in a step has None.
    """
    levels = [pair.level for pair in result.pairs]
    first = result.first_divergence
    level = (
        first.level
        if first is not None and first.level in levels
        else max(dict.fromkeys(levels), key=levels.count, default=None)
    )
    places: dict[str, None] = {}
    worst: dict[tuple[int, str], Any] = {}
    for pair in result.pairs:
        if pair.level == level:
            module = pair.site.rpartition("/")[0] or pair.site
            places[module] = None
            key = pair.step, module
            known = worst.get(key, pair)
            worst[key] = max(known, pair, key=lambda one: (list(_COLORS).index(one.verdict), _level(one)))
    steps = sorted({step for step, _ in worst})[:MAX_ROWS]
    return [[(name, worst.get((step, name))) for name in places] for step in steps]


def _level(pair: Any) -> int:
    """Return the place of the error in `_SCALE`, and its end where it has no size: NaN, or another shape."""
    found = pair.figures
    if pair.noise_ratio is None and (found is None or found.num_nonfinite_mismatch or math.isnan(found.snr_db)):
        return len(_SCALE)
    if pair.noise_ratio is None:
        return sum(found.snr_db < limit for limit in _DECIBELS)
    return sum(pair.noise_ratio >= limit for limit in _RATIOS)


def color_of(pair: Any) -> str:
    """Return the color of a pair: of its verdict, and beyond rounding of the size of its error."""
    return _COLORS[pair.verdict] if pair.verdict in ("identical", "rounding") else (*_SCALE, _NOT_FINITE)[_level(pair)]


def _map(rows: list[list[tuple[str, Any]]]) -> str:
    """Return the map as a drawing: modules from left to right, steps from top to bottom."""
    drawn = "".join(
        f'<rect x="{720 * x / len(row):.1f}" y="{14 * y}" width="{720 / len(row):.2f}" height="13" '
        f'fill="{color_of(pair)}"><title>{_cell(name)}: {pair.verdict}</title></rect>'
        for y, row in enumerate(rows)
        for x, (name, pair) in enumerate(row)
        if pair is not None
    )
    size = f'width="720" height="{14 * len(rows)}"'
    label = "modules in order, colored by their worst tensor"
    return f'<svg {size} role="img" aria-label="{label}">{drawn}</svg>' if rows else ""


def pairs_frame(pairs: Sequence[Any]) -> Any:
    """Return a data frame with a row for each pair: its fields, and those of its figures."""
    columns: dict[str, list[Any]] = {}
    figures = None
    for pair in pairs:
        figures = figures or pair.figures
    own = () if figures is None else tuple(field.name for field in dataclasses.fields(figures))
    for pair in pairs:
        for field in dataclasses.fields(pair):
            # Statistics of both sides are results of their own.
            if field.name not in ("figures", "baseline", "candidate", "abs_error", "rel_error"):
                columns.setdefault(field.name, []).append(getattr(pair, field.name))
        for name in own:
            columns.setdefault(name, []).append(None if pair.figures is None else getattr(pair.figures, name))
    return needed("pandas").DataFrame(columns)


def plot_pairs(pairs: Sequence[Any], ax: Any = None) -> Any:
    """Draw errors in order of execution, by verdict, on a logarithmic axis; returns the axes.

    Args:
        pairs: Of a comparison.
        ax: Axes of matplotlib; None makes new ones.

    Raises:
        UsageError: matplotlib is not installed, or nothing was measured.
    """
    by_floor = any(pair.noise_ratio is not None for pair in pairs)
    sized = [(pair, size) for pair in pairs if (size := _size(pair, by_floor)) is not None]
    if not sized:
        raise UsageError("nothing to plot", got=f"{len(pairs)} tensors, none of which was measured")
    pyplot = needed("matplotlib.pyplot")
    if ax is None:
        _, ax = pyplot.subplots(figsize=(9, 4), layout="constrained")
    measured, values = [pair for pair, _ in sized], [size for _, size in sized]
    finite = [value for value in values if value > 0 and math.isfinite(value)]
    # The noise floor is always within the plot.
    shown = [*finite, 1.0, 2 * _WRONG] if by_floor else finite or [1.0]
    low, high = min(shown) / 2, max(shown) * 2
    for verdict, color in _COLORS.items():
        of_verdict = [place for place, pair in enumerate(measured) if pair.verdict == verdict]
        # What is zero lies on the floor of the plot, and what is not finite above everything.
        for marker, word in (("o", verdict), ("^", f"{verdict}, not finite or of another kind")):
            there = [place for place in of_verdict if math.isfinite(values[place]) == (marker == "o")]
            heights = [max(values[place], low) if marker == "o" else high for place in there]
            if there:
                ax.scatter(there, heights, s=14, color=color, marker=marker, label=f"{word} ({len(there)})", zorder=3)
    ax.set_yscale("log")
    if by_floor:
        ax.axhspan(low, _SUSPICIOUS, color="0.5", alpha=0.15, label="noise floor")
        ax.axhline(_WRONG, color="0.5", linewidth=1, linestyle="--", label="8 times the floor")
    first = next((place for place, pair in enumerate(measured) if pair.verdict == "wrong" and not pair.inherited), None)
    if first is not None:
        height = values[first] if math.isfinite(values[first]) and values[first] > 0 else high
        ax.annotate(
            _plain(measured[first].site).replace("$", r"\$"),
            (first, height),
            (5, 5) if 2 * first < len(measured) else (-5, 5),
            textcoords="offset points",
            horizontalalignment="left" if 2 * first < len(measured) else "right",
            fontsize=8,
        )
    ax.set_ylim(low / 2, high * 2)
    left_out = len(pairs) - len(measured)
    ax.set_xlabel("tensors, as they were judged" + (f" ({left_out} without a number left out)" if left_out else ""))
    ax.set_ylabel("error / noise floor" if by_floor else "largest absolute error")
    ax.legend(loc="best", fontsize=8)
    return ax


def _size(pair: Any, by_floor: bool) -> float | None:
    """Return the height of a pair; of one that is wrong in kind, as NaN is, infinity."""
    size: float | None = pair.noise_ratio if by_floor else getattr(pair.figures, "max_abs_diff", None)
    return math.inf if size is None and pair.verdict in ("suspicious", "wrong") else size


def needed(module: str) -> Any:
    """Return a module of the extra `notebook`.

    Raises:
        UsageError: It is not installed.
    """
    name = module.partition(".")[0]
    return require_package(module, f"the package {name} is missing", "pip install 'glassengine[notebook]'")


def _ratio(pair: Any) -> float:
    value = pair.noise_ratio
    return math.inf if value is None or math.isnan(value) else float(value)


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else _plain(str(value))
    return html.escape(text)


def _plain(text: str) -> str:
    text = printable(text[: 4 * _LONGEST])
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
