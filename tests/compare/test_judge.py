"""Mapped files are compared by rows, bfloat16 as its bits, and equal bytes without arithmetic."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from glassengine.blocks import paths
from glassengine.blocks.arithmetic import Arithmetic
from glassengine.compare import judge
from glassengine.compare.compare import compare
from glassengine.compare.loader import PairLoader

SHAPE = (600, 8, 256)


def pair(dtype: torch.dtype, noise: float, outlier: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=g)
    y = x * (1 + noise * torch.randn(SHAPE, generator=g))
    y[200, 3, 7] += outlier
    return x.to(dtype), y.to(dtype)


def unaligned(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a file whose values begin at an odd place."""
    stored = save(tensors)
    (size,) = struct.unpack("<Q", stored[:8])
    header = json.dumps(json.loads(stored[8 : 8 + size])).encode()
    header += b" " * (1 - (8 + len(header)) % 2)
    path.write_bytes(struct.pack("<Q", len(header)) + header + stored[8 + size :])


def pairs_of(x: Path, y: Path, **options: Any) -> list[dict[str, Any]]:
    return [one.to_dict() for one in compare(x, y, **options).pairs]


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, float) and isinstance(theirs, float):
        return ours == theirs or math.isclose(ours, theirs, rel_tol=1e-6)
    return bool(ours == theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("noise", "outlier"), [(2**-9, 0.0), (2**-6, 0.0), (2**-9, 50.0), (2**-9, math.nan)])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_rows_give_the_figures_of_the_whole(
    dtype: torch.dtype, noise: float, outlier: float, is_compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = pair(dtype, noise, outlier)
    for name, tensor in (("x", x), ("y", y)):
        unaligned(tmp_path / f"{name}.safetensors", {"w": tensor})
    sides = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    if not is_compiled:
        monkeypatch.setattr(paths, "compiled_kind", lambda: Arithmetic)
    monkeypatch.setattr(judge, "ROW_BYTES", 1 << 18)
    by_rows = pairs_of(*sides)
    monkeypatch.setattr(PairLoader, "can_be_cut", lambda *_: False)
    assert same(by_rows[0], pairs_of(*sides)[0])
    assert by_rows[0]["figures"]["num_different"] > 0


def test_equal_bytes_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = pair(torch.bfloat16, 0.0)
    tensors = {"w": x, "one": torch.tensor(2.0), "whole": torch.arange(5), "none": torch.empty(0, 3)}
    for name in "xy":
        save_file(tensors, tmp_path / f"{name}.safetensors")
    sides = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    monkeypatch.setattr(PairLoader, "has_equal_bytes", lambda *_: False)
    measured = {one["site"]: one for one in pairs_of(*sides)}
    monkeypatch.undo()
    asked: list[str] = []
    own = judge.PairJudge._difference
    monkeypatch.setattr(judge.PairJudge, "_difference", lambda self, x, *rest: asked.append(x) or own(self, x, *rest))
    for found in pairs_of(*sides):
        assert found["verdict"] == "identical" and same(found, measured[found["site"]])
    assert len(asked) == 1, "the empty one"


def test_equal_bytes_without_a_number_are_told(tmp_path: Path) -> None:
    for name in "xy":
        save_file({"w": torch.full((4, 5), math.nan)}, tmp_path / f"{name}.safetensors")
    (found,) = compare(tmp_path / "x.safetensors", tmp_path / "y.safetensors").pairs
    assert found.verdict == "identical" and found.reason == "no value is finite, on either side"
