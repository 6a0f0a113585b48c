from __future__ import annotations

from pathlib import Path

import pytest
import torch

import glassengine as glass
from glassengine.report.page.data import DataFolder
from glassengine.report.page.values import Values
from glassengine.report.page.write import write_report
from tests.report.made_results import pair


def test_values_are_those_of_both_records_and_why_others_have_none(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(4), "shape": torch.ones(2)}, tmp_path / "x.pt")
    torch.save({"a": torch.full((4,), 1.5), "shape": torch.ones(3)}, tmp_path / "y.pt")
    values = Values(tmp_path / "x.pt", tmp_path / "y.pt")
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
