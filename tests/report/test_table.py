"""Long tables are written line by line: the same text as rich's, in time that grows with the rows alone."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from glassengine.cli.options import SafeConsole
from glassengine.report import table
from glassengine.report.table import new_table
from glassengine.report.words import of_side


def shown(rows: list[tuple[str | Text, ...]], *, width: int | None = None) -> str:
    found = new_table("verdict", "step", "site", "max abs")
    for row in rows:
        found.add_row(*row)
    file = io.StringIO()
    console = SafeConsole(file=file, markup=False, soft_wrap=True, force_terminal=width is not None, width=width)
    console.print(found)
    return file.getvalue()


ROWS: list[tuple[str | Text, ...]] = [
    ("x", "1", Text("a.b"), "1.5"),
    (Text("wrong", style="bold red"), "20", "a\u202eb", "0"),
    (Text("model.layers", style="bold"),),
    ("\u4e2d\u6587", "3", "with words", "-1e-05"),
]


def test_s9_long_tables_look_like_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    short = shown(ROWS)
    monkeypatch.setattr(table, "MAX_LAID_OUT", 0)
    assert [line.rstrip() for line in shown(ROWS).splitlines()] == [line.rstrip() for line in short.splitlines()]
    assert "\\u202e" in short


def test_s9_long_tables_fit_a_terminal_and_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MAX_LAID_OUT", 0)
    name = "".join(f"m{i}." for i in range(30))
    text = shown([*ROWS, ("x", "4", name, "2")], width=60)
    lines = [line for line in text.splitlines() if "\x1b" not in line]
    assert all(len(line) <= 60 for line in lines)
    folded = [part for line in lines for part in line.split() if part.strip(".").startswith("m") or "m1" in part]
    assert "".join(folded) == name


def test_s9_rich_lays_out_no_long_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("rich takes a millisecond a row")

    monkeypatch.setattr("rich.table.Table._render", never)
    assert len(shown([("x", str(i), "a", "0") for i in range(5000)]).splitlines()) == 5002


def test_u7_columns_go_before_anything_is_folded() -> None:
    def drawn(width: int, name: str = "float32[1,11,64]") -> str:
        table = new_table("site", "tensor", "mean", "std", first=("std", "mean"))
        for number in range(3):
            table.add_row(f"model.layers.{number}.mlp", name, "0.12345", "1.03312")
        console = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
        console.print(table)
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    assert "std" in drawn(80) and "mean" in drawn(80)
    assert "std" not in drawn(52) and "mean" in drawn(52)
    assert "mean" not in drawn(40)
    for width in (80, 52, 40):
        assert drawn(width).count("float32[1,11,64]") == 3, "in one piece"
    assert "int64[2]" in drawn(32, "int64[2]") and "mean" not in drawn(32, "int64[2]")


@pytest.mark.parametrize(("side", "text"), [("both", "both sides"), ("baseline", "the baseline")])
def test_u7_a_side_is_called_in_english(side: str, text: str) -> None:
    assert of_side(side) == text
