"""The table of docs/families.md: complete, and true in the cells that are checked again today."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest

from benchmarks.tables import conformance_table, families_table, markdown, ranks_table
from benchmarks.tables.families_table import CELLS, LIMITATIONS, Cell, check_cell, read, render
from benchmarks.tables.markdown import DisagreementError
from glassengine.errors import BackendError

CHEAP = [cell for cell in CELLS if cell[1] == "eager" and cell[0] in ("bert", "vit")]
TODAY = dt.datetime.now(dt.UTC).date().toordinal()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "families.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def table(page: str) -> dict[Cell, str]:
    return read(markdown.within(page, "table"))


def test_every_cell_is_a_number_or_a_limitation(table: dict[Cell, str], page: str, root: Path) -> None:
    assert table.keys() == set(CELLS)
    limitations = (root / "LIMITATIONS.md").read_text(encoding="utf-8")
    known = {limit.number for limit in LIMITATIONS}
    for cell, text in table.items():
        assert text.isdecimal() or text in known, (cell, text)
    for limit in LIMITATIONS:
        assert f"**{limit.number}**" in limitations


def test_every_cell_of_the_op_sites_is_a_number(page: str) -> None:
    table = conformance_table.read(markdown.within(page, "op sites"))
    assert table.keys() == set(conformance_table.CELLS)
    assert all(text.isdecimal() for text in table.values()), table


def test_families_are_shared_by_ranks_as_the_page_says(page: str) -> None:
    table = ranks_table.read(markdown.within(page, "ranks"))
    assert table.keys() == set(ranks_table.CELLS)
    refused = [cell for cell in ranks_table.CELLS if table[cell].startswith("refused") and cell[0] != "mamba"]
    for cell in (refused[TODAY % len(refused)], ("gpt2", "tensor parallel 2")):
        assert ranks_table.check_cell(cell) == table[cell]


@pytest.mark.slow
@pytest.mark.parametrize("cell", ranks_table.CELLS, ids="/".join)
def test_every_cell_of_the_ranks_is_true(cell: tuple[str, str], page: str) -> None:
    assert ranks_table.check_cell(cell) == ranks_table.read(markdown.within(page, "ranks"))[cell]


@pytest.mark.parametrize("cell", [CHEAP[TODAY % len(CHEAP)]], ids="/".join)
def test_a_cell_is_still_true_today(cell: Cell, table: dict[Cell, str], checkpoints: Path) -> None:
    assert check_cell(cell, checkpoints) == table[cell]


def test_a_limitation_fails_for_its_reason(table: dict[Cell, str], checkpoints: Path) -> None:
    cell = ("vit", "onnxruntime", "bfloat16")
    assert check_cell(cell, checkpoints) == table[cell] == "F1"


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids="/".join)
def test_every_cell_is_true(cell: Cell, table: dict[Cell, str], checkpoints: Path) -> None:
    assert check_cell(cell, checkpoints) == (table[cell] or ANY)


def test_the_example_of_a_back_end_of_ones_own(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = page.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, "families.md", "exec"), names)
    assert names["report"].num_checked > 500


def test_the_tables_are_read_as_they_were_written() -> None:
    texts = {cell: str(number) for number, cell in enumerate(CELLS)}
    assert read(render(texts)) == texts
    page = markdown.put("a\n<!-- table -->\nold\n<!-- end of table -->\nb\n", "table", render(texts))
    assert read(markdown.within(page, "table")) == texts
    assert page.startswith("a\n<!-- table -->\n") and page.endswith("<!-- end of table -->\nb\n")
    of_sites = {cell: str(number) for number, cell in enumerate(conformance_table.CELLS)}
    assert conformance_table.read(conformance_table.render(of_sites)) == of_sites


def result(ok: bool, judged: int) -> Any:
    return SimpleNamespace(ok=ok, verdict="wrong", counts={"compared": judged})


@pytest.mark.parametrize(
    ("cell", "outcome", "message"),
    [
        (("vit", "eager", "float32"), result(False, 9), "not ok"),
        (("vit", "eager", "float32"), result(True, 0), "0 tensors judged"),
        (("vit", "eager", "float32"), BackendError("broken"), "failed[\\s\\S]*broken"),
        (("vit", "onnxruntime", "bfloat16"), result(True, 9), "runs[\\s\\S]*F1"),
        (("vit", "onnxruntime", "bfloat16"), BackendError("no such file"), "failed[\\s\\S]*no such file"),
    ],
)
def test_a_cell_that_does_not_agree_is_an_error(
    cell: Cell, outcome: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(*_: Any, **__: Any) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(families_table, "check", check)
    (tmp_path / "vit").mkdir()
    with pytest.raises(DisagreementError, match=message):
        check_cell(cell, tmp_path)
