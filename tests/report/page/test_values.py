from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import glassengine as glass
from glassengine.report.page.data import DataFolder
from glassengine.report.page.values import Values, item_of, worst_elements
from glassengine.report.page.write import write_report
from tests.report.made_results import pair


def test_the_worst_elements_come_with_both_values() -> None:
    x = torch.zeros(2, 3, 4)
    y = x.clone()
    y[1, 2, 3], y[0, 1, 0], y[0, 0, 0] = 5.0, -7.0, math.nan
    x[1, 0, 0] = y[1, 0, 0] = math.nan
    assert [one[0] for one in worst_elements(x, y)] == [[0, 0, 0], [0, 1, 0], [1, 2, 3]]
    assert worst_elements(x, y)[1][1:] == [0.0, -7.0]
    assert worst_elements(torch.tensor(1), torch.tensor(3)) == [[[], 1, 3]]
    assert worst_elements(torch.ones(0), torch.ones(0)) == []
    assert worst_elements(torch.tensor([True]), torch.tensor([False])) == [[[0], True, False]]
    assert worst_elements(torch.tensor([1j]), torch.tensor([2j])) == [[[0], "1j", "2j"]]


def test_an_axis_shows_the_head_that_is_wrong() -> None:
    x = torch.randn(2, 4, 600, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    y[:, 3] += 1e-3
    found = item_of(x, y)
    heads = found["axes"][1]["maxima"]
    assert heads[:3] == [0.0, 0.0, 0.0] and heads[3] > 9e-4
    assert found["axes"][2]["step"] == 3 and len(found["axes"][2]["maxima"]) == 200
    assert found["ulp"].histogram[0] == 3600
    assert item_of(x, y.double())["ulp"] is None


def test_values_are_those_of_both_records_and_why_others_have_none(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(4), "shape": torch.ones(2)}, tmp_path / "x.pt")
    torch.save({"a": torch.full((4,), 1.5), "shape": torch.ones(3)}, tmp_path / "y.pt")
    values = Values(tmp_path / "x.pt", tmp_path / "y.pt")
    folder = DataFolder(tmp_path / "report")
    wanted = [(7, pair(0, "a", "wrong", 1.0)), (8, pair(0, "b", "wrong", 1.0)), (9, pair(0, "shape", "wrong", 1.0))]
    assert values.write(folder, wanted) == (7,)
    assert folder.read("values", 0)[0]["worst"][0] == [[0], 1.0, 1.5]
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
