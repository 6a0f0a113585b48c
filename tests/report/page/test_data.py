from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import glassengine as glass
from glassengine.report.page.data import INHERITED, NONFINITE, SHAPE, DataFolder, ListFiles, PageRows, PageValues
from glassengine.report.page.write import write_report
from glassengine.results import Divergence
from tests.report.made_results import figures, layered, pair


@pytest.mark.parametrize("text", ["plain", "\u202e\u2028</script>", "\ud800 alone", "\U0001f600", '"\\\x00'])
def test_every_text_is_ascii_json_and_comes_back(tmp_path: Path, text: str) -> None:
    folder = DataFolder(tmp_path)
    folder.write("rows", 3, {text: [text, 0.1, -0.0, 5e-324, 2**60, None, True]})
    raw = folder.path("rows", 3).read_bytes()
    assert raw.isascii() and raw.startswith(b'glassReport("rows",3,') and raw.endswith(b");\n")
    assert folder.read("rows", 3) == {text: [text, 0.1, -0.0, 5e-324, 2**60, None, True]}


def test_a_file_is_written_as_soon_as_it_is_full(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    items = ListFiles(folder, "sites", 2)
    for number in range(5):
        items.add(number)
    assert folder.path("sites", 1).is_file() and not folder.path("sites", 2).exists()
    items.close()
    assert [items.item(number) for number in range(5)] == list(range(5))
    assert (folder.kinds["sites"].num_items, folder.kinds["sites"].items_per_file) == (5, 2)


def test_values_are_those_of_both_records_and_why_others_have_none(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(4), "shape": torch.ones(2)}, tmp_path / "x.pt")
    torch.save({"a": torch.full((4,), 1.5), "shape": torch.ones(3)}, tmp_path / "y.pt")
    values = PageValues(tmp_path / "x.pt", tmp_path / "y.pt")
    folder = DataFolder(tmp_path / "report")
    wanted = [(7, pair(0, "a", "wrong", 1.0)), (8, pair(0, "b", "wrong", 1.0)), (9, pair(0, "shape", "wrong", 1.0))]
    assert values.write(folder, wanted) == (7,)
    assert folder.read("values", 0)[0]["worst"][0] == {"index": [0], "baseline": 1.0, "candidate": 1.5}
    assert dict(values.without) == {
        "the records given do not have the tensor": 1,
        "the two sides have other shapes or layouts": 1,
    }


@pytest.mark.parametrize("number", [1, 2])
def test_compare_gives_its_recordings_to_the_report(tmp_path: Path, number: int) -> None:
    torch.save({"a": torch.ones(4)}, tmp_path / "x.pt")
    torch.save({"a": torch.ones(4) * 2}, tmp_path / "y.pt")
    result = glass.compare(tmp_path / "x.pt", tmp_path / "y.pt")
    written = write_report(result, tmp_path / "report", recordings=[tmp_path / "x.pt", tmp_path / "y.pt"])
    assert written.num_with_values == 1 and written.without_values == {}


TYPES = {"Uint8": "u1", "Uint16": "<u2", "Uint32": "<u4", "Float32": "<f4"}


def rows_of(folder: Path, pairs: list) -> tuple[PageRows, DataFolder]:
    data = DataFolder(folder)
    rows = PageRows(data)
    for one in pairs:
        rows.add(one, one.to_dict())
    return rows, data


def test_columns_and_details_hold_the_pairs(tmp_path: Path) -> None:
    pairs = layered()
    rows, data = rows_of(tmp_path, pairs)
    columns = rows.close()
    part = data.read("rows", 0)
    found = {c.name: np.frombuffer(base64.b64decode(part[c.name]), dtype=TYPES[c.type]) for c in columns}
    assert {len(column) for column in found.values()} == {len(pairs)}
    sites = data.read("sites", 0)
    for row, one in enumerate(pairs):
        assert sites[found["site"][row]] == one.site and found["step"][row] == one.step
        assert rows.names["verdict"][found["verdict"][row]] == one.verdict
        assert bool(found["flags"][row] & INHERITED) == one.inherited
        # All of it comes back; ratios to the digits of a float32.
        again = rows.pair(row)
        assert (again.figures, again.reason, again.level) == (one.figures, one.reason, one.level)


def test_worst_first_puts_what_has_no_size_above_any_number_and_introduced_above_inherited(tmp_path: Path) -> None:
    pairs = [
        pair(0, "rounding", "rounding", 0.5),
        pair(0, "inherited", "wrong", 1e6, inherited=True),
        pair(0, "small", "wrong", 9.0),
        pair(0, "large", "wrong", 99.0),
        pair(0, "shape", "wrong", None, judged_by="shape"),
        pair(0, "nan", "wrong", float("nan"), figures=figures(1.0, nonfinite=3)),
        pair(0, "suspicious", "suspicious", 1e9),
        pair(0, "tolerance", "wrong", None, figures=figures(0.5)),
    ]
    rows, _ = rows_of(tmp_path, pairs)
    order = [pairs[row].site for row in rows.worst_first()]
    assert set(order[:2]) == {"shape", "nan"}
    assert order[2:] == ["large", "small", "tolerance", "inherited", "suspicious", "rounding"]
    flags = rows._array("flags")
    assert [flags[row] for row in (4, 5)] == [SHAPE, NONFINITE]
    assert list(rows.flagged(3)) == list(rows.worst_first()[:3])


def test_the_row_of_the_divergence_is_its_own_and_not_an_inherited_one(tmp_path: Path) -> None:
    pairs = [
        pair(1, "a", "wrong", 3.0, level="engine", inherited=True, case="one"),
        pair(1, "a", "wrong", 3.0, level="engine", case="two", rank=1),
        pair(1, "a", "rounding", 0.1, level="program"),
    ]
    rows, _ = rows_of(tmp_path, pairs)
    told: Any = {"node": None, "candidate_site": "a", "source": None, "verdict": "wrong", "noise_ratio": 3.0}
    told |= {"bound_ratio": None}
    first = Divergence("engine", 1, "a", introduced=None, inherited=None, **told)
    assert rows.row_of(first) == 1
    assert rows.row_of(Divergence("engine", 0, "a", introduced=None, inherited=None, **told)) is None
    assert rows.row_of(Divergence("engine", 1, "b", introduced=None, inherited=None, **told)) is None
    assert rows.row_of(None) is None


def test_nothing_judged_is_an_empty_table(tmp_path: Path) -> None:
    rows, data = rows_of(tmp_path, [])
    rows.close()
    assert len(rows) == 0 and rows.steps == [] and data.kinds["rows"].num_items == 0


def test_the_end_of_a_region_is_no_origin_where_an_op_in_it_is_known(tmp_path: Path) -> None:
    reads = {"a/mm.0": ["x"], "b/sdpa.0": ["a/mm.0"], "b/linear.0": ["b/sdpa.0"], "c/linear.0": ["b/linear.0"]}
    rows = PageRows(DataFolder(tmp_path))
    own = [pair(0, "b/sdpa.0", "wrong", 9.0), pair(0, "b/linear.0", "wrong", 9.0, inherited=True)]
    ends = [pair(0, name, "wrong", 9.0, judged_by="segment", level="candidate, untouched") for name in "bc"]
    for one in (*own, *ends):
        rows.add(one, {})
    rows.leave_out_regions(reads)
    rows.close()
    # The region that ends in b has the op; the one that ends in c begins behind b, and makes an error of its own.
    assert [bool(flags & INHERITED) for flags in rows._array("flags")] == [False, True, True, False]
