from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np

from glassengine.report.page.data import DataFolder
from glassengine.report.page.rows import INHERITED, NONFINITE, SHAPE, Rows
from glassengine.results import Divergence
from tests.report.made_results import figures, layered, pair

TYPES = {"Uint8": "u1", "Uint16": "<u2", "Uint32": "<u4", "Float32": "<f4"}


def rows_of(folder: Path, pairs: list) -> tuple[Rows, DataFolder]:
    data = DataFolder(folder)
    rows = Rows(data)
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
        assert (again.figures, again.reason, again.rung) == (one.figures, one.reason, one.rung)


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
        pair(1, "a", "wrong", 3.0, rung="engine", inherited=True, case="one"),
        pair(1, "a", "wrong", 3.0, rung="engine", case="two", rank=1),
        pair(1, "a", "rounding", 0.1, rung="program"),
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
