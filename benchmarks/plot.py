"""Points and the lines fitted to them, or bars on a logarithmic scale, as one small SVG file."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT, MARGIN = 360, 280, 52
# Told apart by people who do not see all colors alike (Okabe and Ito), and by shape in print: dash patterns.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
DASHES = ("", "6 3", "2 3", "8 3 2 3")


@dataclass(frozen=True)
class Line:
    """The least-squares line `intercept + slope * x` through points; `r_squared` is the share it explains."""

    intercept: float
    slope: float
    r_squared: float

    def at(self, x: float) -> float:
        """Return its value at `x`."""
        return self.intercept + self.slope * x


def fit_line(points: Points) -> Line:
    """Fit a line to at least two points with different x."""
    num = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / num, sum(y for _, y in points) / num
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    intercept = mean_y - slope * mean_x
    around = sum((y - mean_y) ** 2 for _, y in points)
    left = sum((y - intercept - slope * x) ** 2 for x, y in points)
    return Line(intercept, slope, 1 - left / around if around else 1.0)


def panels(charts: Sequence[tuple[str, str, Mapping[str, Points]]], x_label: str) -> str:
    """Return an SVG document with charts side by side.

    Args:
        charts: (title, label of the y axis, name -> points) each; both axes begin at 0.
        x_label: Of all x axes.
    """
    drawn = [
        f'<g transform="translate({index * WIDTH} 0)">{_chart(*chart, x_label)}</g>'
        for index, chart in enumerate(charts)
    ]
    return _document(WIDTH * len(charts), HEIGHT, drawn)


@dataclass(frozen=True)
class Bar:
    """A ratio with its limit, and whether it is of another tool."""

    name: str
    ratio: float
    limit: float | None = None
    is_peer: bool = False


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Return an SVG document with a bar for each ratio, and a mark at its limit; both on a logarithmic scale."""
    names, width, height = 250, 700, 34 + 20 * len(rows)
    every = [value for row in rows for value in (row.ratio, row.limit) if value]
    low, high = math.log(min(every) * 0.8), math.log(max(every) * 1.25)

    def place(value: float) -> float:
        return names + (math.log(value) - low) / (high - low) * (width - names - 130)

    parts = [_text(8, 18, title, "start", "bold")]
    for index, row in enumerate(rows):
        y = 30 + 20 * index
        end = place(row.ratio)
        parts.append(_text(names - 6, y + 12, row.name, "end"))
        parts.append(f'<path d="M{names} {y + 1}H{end:.1f}v14H{names}z" fill="{COLORS[row.is_peer]}"/>')
        if row.limit:
            parts.append(f'<path d="M{place(row.limit):.1f} {y - 1}v18" stroke="#222" stroke-width="2"/>')
        shown = f"{row.ratio:.3g} x" + (f", limit {row.limit:g}" if row.limit else "")
        parts.append(_text(max(end, place(row.limit or row.ratio)) + 5, y + 12, shown, "start"))
    return _document(width, height, parts)


def _document(width: int, height: int, parts: Sequence[str]) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', background, *parts, "</svg>", ""])


def _chart(title: str, y_label: str, series: Mapping[str, Points], x_label: str) -> str:
    every = [point for points in series.values() for point in points]
    most_x, most_y = _round_up(max(x for x, _ in every)), _round_up(max(y for _, y in every))
    right, bottom = WIDTH - 12, HEIGHT - MARGIN

    def place(x: float, y: float) -> tuple[float, float]:
        return MARGIN + x / most_x * (right - MARGIN), bottom - y / most_y * (bottom - 30)

    parts = [
        _text(WIDTH / 2, 16, title, "middle", "bold"),
        _text(WIDTH / 2, HEIGHT - 14, x_label, "middle"),
        f'<g transform="translate(12 {HEIGHT / 2}) rotate(-90)">{_text(0, 0, y_label, "middle")}</g>',
        f'<path d="M{MARGIN} 30V{bottom}H{right}" fill="none" stroke="#444"/>',
    ]
    for share in (0.25, 0.5, 0.75, 1.0):
        x, y = place(share * most_x, share * most_y)
        parts += [
            _text(x, bottom + 14, f"{share * most_x:g}", "middle"),
            _text(MARGIN - 4, y + 4, f"{share * most_y:g}", "end"),
        ]
        parts.append(f'<path d="M{MARGIN} {y:.1f}H{right}" stroke="#ddd"/>')
    for index, (name, points) in enumerate(series.items()):
        color = COLORS[index % len(COLORS)]
        for point in points:
            x, y = place(*point)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>')
        line = fit_line(points)
        (x0, y0), (x1, y1) = place(0, line.at(0)), place(most_x, line.at(most_x))
        dash = f'stroke-dasharray="{DASHES[index % len(DASHES)]}"'
        parts.append(f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" stroke="{color}" fill="none" {dash}/>')
        parts.append(_text(MARGIN + 8, 42 + 14 * index, name, "start", fill=color))
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str, weight: str = "normal", fill: str = "#222") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-weight="{weight}" fill="{fill}">{html.escape(text)}</text>'


def _round_up(value: float) -> float:
    """Return the least 1, 2, 4 or 8 times a power of ten, or that of 0.1, that is at least `value`."""
    scale = 10.0 ** (len(str(int(value))) - 1) if value >= 1 else 0.1
    return next(step * scale for step in (1, 2, 4, 6, 8, 10) if step * scale >= value)
