"""The tables of all reports: rich lays them out where they are short, and long ones are written line by line.

Rich takes a millisecond a row; a step may have a hundred thousand tensors.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from rich import box
from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from glassengine.reading.files import printable

MAX_LAID_OUT = 200
"""Rows that rich lays out."""
MOST_ROWS = 25
"""Of an answer, with the lines that one may do without left out."""

VERDICT_STYLES = {"identical": "green", "rounding": "green", "suspicious": "yellow", "wrong": "bold red"}

_GAP = "  "
_LABEL = re.compile(r" *[a-z]+ {2,}|(?:compared|together) | {2}(?:baseline|candidate) | +")
_LEAST = 8
_FOLDED = ("site", "note", "candidate", "first divergence", "snapshot", "input", "output")
_WORDS = {*_FOLDED, "", "verdict", "close", "equal", "tensor", "kind", "module", "span", "change"}


class Table(RichTable):
    """A table that is as wide as it needs to be where no person looks at it: a pipe has no right edge.

    Args:
        first: Columns that are left out where there is no room for all, one after the other, before anything is folded.
    """

    def __init__(self, first: Sequence[str] = ()) -> None:
        super().__init__(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
        self._cells: list[tuple[str | Text, ...]] = []
        self._first = first

    def add_row(self, *cells: str | Text) -> None:  # type: ignore[override]
        """Add a row; cells that are left out are empty."""
        self._cells.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not console.is_terminal:
            options = options.update(max_width=1 << 16)
        self._leave_out(options.max_width)
        if len(self._cells) > MAX_LAID_OUT:
            return self._lines(console, options.max_width)
        for cells in self._cells[len(self.rows) :]:
            # Escaped first: what takes the place of a character is wider.
            super().add_row(*(Text(_plain(cell), cell.style if isinstance(cell, Text) else "") for cell in cells))
        return super().__rich_console__(console, options)

    def _texts(self) -> tuple[list[str], list[tuple[str, ...]]]:
        """Return the heads of the columns, and a text for each of them in each row."""
        names = [str(column.header) for column in self.columns]
        return names, [tuple(map(_plain, cells)) + ("",) * (len(names) - len(cells)) for cells in self._cells]

    def _leave_out(self, width: int) -> None:
        names, rows = self._texts()
        sizes = [[max(map(_width, text.split("\n"))) for text in row] for row in (names, *rows)]
        while self._first and sum(map(max, zip(*sizes, strict=True))) + len(_GAP) * (len(names) - 1) > width:
            name, *self._first = self._first
            at = names.index(name)
            self._cells = [(*cells[:at], *cells[at + 1 :]) for cells in self._cells]
            of_columns: list[list[Any]] = [names, self.columns, *sizes]
            for row in of_columns:
                del row[at]
        for at, column in enumerate(self.columns):
            column._index = at

    def _lines(self, console: Console, width: int) -> Iterator[Segment]:
        names, rows = self._texts()
        columns = zip(names, *rows, strict=True)
        widths = [max(map(len if "".join(texts).isascii() else _width, texts)) for texts in columns]
        _fit(widths, self.columns, width)
        is_right = [column.justify == "right" for column in self.columns]
        yield Segment(_line(names, widths, is_right), console.get_style("table.header"))
        yield Segment("\u2500" * (sum(widths) + len(_GAP) * (len(widths) - 1)) + "\n")
        for cells, texts in zip(self._cells, rows, strict=True):
            style = next((cell.style for cell in cells if isinstance(cell, Text) and cell.style), None)
            yield Segment(_line(texts, widths, is_right), console.get_style(style) if style else None)


class Screen:
    """An answer: its lines are wrapped at words, below their own text; in a pipe they are not wrapped.

    Args:
        parts: Lines, tables and answers.
        spare: Parts among them that are left out, the first of them first, where there are more than `MOST_ROWS`.
        more: The last line, where some were left out.
    """

    def __init__(self, *parts: RenderableType, spare: Sequence[RenderableType] = (), more: Text | None = None) -> None:
        self.parts, self.spare, self.more = parts, spare, more

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = list(self.parts)
        over = height(parts, console, options) - MOST_ROWS if self.spare else 0
        if over > 0 and self.more is not None:
            parts.append(self.more)
            over += 1
        for line in self.spare:
            if over <= 0:
                break
            del parts[len(parts) - 1 - parts[::-1].index(line)]
            over -= height([line], console, options)
        for part in parts:
            if isinstance(part, Text) and not options.no_wrap:
                yield from map(_hanging, part.split("\n", allow_blank=True))
            else:
                yield part


def height(parts: Sequence[RenderableType], console: Console, options: ConsoleOptions) -> int:
    """Return how many rows of a screen parts of an answer take."""
    return len(console.render_lines(Screen(*parts), options, pad=False))


def indent(line: str) -> int:
    """Return the width of the word before a line and of the space up to its text."""
    label = _LABEL.match(line)
    return 0 if label is None else label.end()


def _hanging(line: Text) -> RenderableType:
    width = indent(line.plain)
    if not width:
        return line
    grid = RichTable.grid(padding=0)
    grid.add_column(width=width, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(line[:width], line[width:])
    return grid


def mark(ok: bool) -> Text:
    """Return the first word of an answer."""
    return Text().append("ok" if ok else "NOT OK", style="bold green" if ok else "bold red")


def new_table(*columns: str, first: Sequence[str] = ()) -> Table:
    """Return an empty table in the style of all tables; columns of words are set left, and long names are folded.

    Args:
        columns: Their heads.
        first: Columns that are left out first where there is no room.
    """
    table = Table(first)
    for column in columns:
        # Names are folded, not cut, so that they survive to be copied; numbers stay in one piece.
        folds = column in _FOLDED
        justify: Literal["left", "right"] = "left" if column in _WORDS else "right"
        table.add_column(Text(column), justify=justify, overflow="fold", no_wrap=not folds)
    return table


def _plain(cell: object) -> str:
    text = cell if type(cell) is str else cell.plain if isinstance(cell, Text) else str(cell)
    return text if text.isprintable() else printable(text, also="\n\t")


def _width(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)


def _fit(widths: list[int], columns: Sequence[Column], width: int) -> None:
    """Make the widest columns that fold narrower until the table is no wider than `width`, if that is possible."""
    over = sum(widths) + len(_GAP) * (len(widths) - 1) - width
    while over > 0:
        place = max((i for i, column in enumerate(columns) if not column.no_wrap), key=widths.__getitem__, default=None)
        if place is None or widths[place] <= _LEAST:
            return
        others = [one for i, one in enumerate(widths) if not columns[i].no_wrap and i != place]
        less = min(over, max(1, widths[place] - max([_LEAST, *others])))
        widths[place] -= less
        over -= less


def _line(texts: Sequence[str], widths: Sequence[int], is_right: Sequence[bool]) -> str:
    """Return a row, in as many lines as its longest cell needs."""
    row = [
        text.rjust(width) if right else text.ljust(width)
        for text, width, right in zip(texts, widths, is_right, strict=True)
    ]
    line = _GAP.join(row)
    if line.isascii() and "\n" not in line and len(line) == sum(widths) + len(_GAP) * (len(widths) - 1):
        return line + "\n"
    folded = [
        [piece for part in text.split("\n") for piece in chop_cells(part, width)]
        for text, width in zip(texts, widths, strict=True)
    ]
    lines = []
    for pieces in itertools.zip_longest(*folded, fillvalue=""):
        rooms = [" " * (width - _width(piece)) for piece, width in zip(pieces, widths, strict=True)]
        cells = zip(pieces, rooms, is_right, strict=True)
        lines.append(_GAP.join(room + piece if right else piece + room for piece, room, right in cells))
    return "\n".join(lines) + "\n"
