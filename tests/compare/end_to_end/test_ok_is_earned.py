"""Comparing nothing, next to nothing, or without knowing what rounding makes never ends in a bare "ok"."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glassengine.cli.main import main

NUM_TENSORS = 300


def glass_compare(*arguments: object) -> int:
    return main(["compare", *map(str, arguments)])


@pytest.fixture
def many(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layers.{i}.out": torch.randn(4, generator=generator) for i in range(NUM_TENSORS)}
    torch.save(tensors, tmp_path / "all.pt")
    torch.save({name: tensor * (1 + 1e-7) for name, tensor in tensors.items()}, tmp_path / "rounded.pt")
    first = next(iter(tensors))
    torch.save({first: tensors[first]}, tmp_path / "one.pt")
    torch.save({"layers.7.in": tensors[first]}, tmp_path / "none.pt")
    return tmp_path


def test_one_of_three_hundred_tensors_is_not_ok(many: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert glass_compare(many / "all.pt", many / "one.pt") == 4
    shown = capsys.readouterr().out
    assert shown.startswith("NOT OK") and "1 compared" in shown
    assert "only 0.3% of the" in shown
    assert f"{NUM_TENSORS - 1}" in shown, "how many were not compared"


def test_nothing_in_common_is_an_error(many: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert glass_compare(many / "all.pt", many / "none.pt") == 4
    shown = capsys.readouterr()
    assert shown.out == "" and "nothing to compare" in shown.err


def test_two_records_without_a_floor_are_ok_by_tolerance_alone_and_say_so(
    many: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert glass_compare(many / "all.pt", many / "rounded.pt") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("ok (uncalibrated)") and f"{NUM_TENSORS} compared" in shown
