"""Tables of docs/families.md: Markdown, written from cells and read again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from glassengine.errors import GlassError

_MARKS = "<!-- {} -->\n", "<!-- end of {} -->\n"


class DisagreementError(GlassError):
    """A cell of a table is neither what it should be nor the failure that is expected of it."""


def render(texts: Mapping[tuple[str, str], str], corner: str, rows: Iterable[str], columns: Sequence[str]) -> str:
    """Return the table.

    Args:
        texts: (row, column) -> text; a cell that is not there is empty.
        corner: What the rows are.
        rows: In order.
        columns: In order.
    """
    lines = [f"| {corner} | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    lines += [f"| {row} | " + " | ".join(texts.get((row, column), "") for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def read(table: str) -> dict[tuple[str, str], str]:
    """Inverse of `render`."""
    rows = [[text.strip() for text in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    columns = rows[0][1:]
    return {(row[0], column): text for row in rows[2:] for column, text in zip(columns, row[1:], strict=True)}


def within(page: str, name: str) -> str:
    """Return the text of the table `name` of a page, where it stands between its marks."""
    begin, end = (mark.format(name) for mark in _MARKS)
    return page.split(begin)[1].split(end)[0]


def put(page: str, name: str, table: str) -> str:
    """Return a page with another text of the table `name`."""
    begin, end = (mark.format(name) for mark in _MARKS)
    before, rest = page.split(begin)
    return before + begin + table + end + rest.split(end)[1]
