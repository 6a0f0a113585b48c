"""Flat records of servers beside records of rows; one tensor without the dimension stays a mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import glassengine as glass
from glassengine.cli.main import main

SITES = [f"model.layers.{layer}.mlp" for layer in range(6)]


def write(path: Path, *, flat: set[str] = frozenset(), changed: str = "") -> Path:  # type: ignore[assignment]
    torch.manual_seed(0)
    values = {site: torch.randn(1, 5, 8) for site in SITES} | {"logits": torch.randn(1, 16)}
    if changed:
        values[changed] = values[changed].roll(1, 1)
    save_file({name: value[0].clone() if name in flat else value for name, value in values.items()}, path)
    return path


def test_a_flat_record_is_compared_as_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, flat = write(tmp_path / "rows.safetensors"), write(tmp_path / "flat.safetensors", flat={*SITES})
    for one, other, side in ((rows, flat, "candidate"), (flat, rows, "baseline")):
        found = glass.compare(one, other)
        assert found.ok and found.verdict == "identical"
        assert found.environment[side]["flat"] == {"flat [5, 8] for [1, 5, 8]": 6}
    assert main(["compare", str(rows), str(flat)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "no dimension for rows (flat [5, 8] for [1, 5, 8]): 6 of its tensors" in said


def test_what_is_wrong_in_a_flat_record_is_wrong(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.safetensors")
    found = glass.compare(rows, write(tmp_path / "flat.safetensors", flat={*SITES}, changed=SITES[3]))
    assert not found.ok and [pair.site for pair in found.pairs if pair.verdict == "wrong"] == [SITES[3]]


def test_one_tensor_without_the_dimension_is_a_mistake(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.safetensors")
    found = glass.compare(rows, write(tmp_path / "other.safetensors", flat={SITES[2]}))
    assert not found.ok and [pair.site for pair in found.pairs if pair.verdict == "wrong"] == [SITES[2]]
