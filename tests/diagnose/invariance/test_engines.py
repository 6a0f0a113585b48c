"""Engines beside themselves, and the proof of `glass build --batch-invariant`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import glassengine as glass
from glassengine.diagnose.invariance.causes import MIXED
from glassengine.diagnose.invariance.engines import prove_batch_invariant
from glassengine.errors import UsageError
from tests.diagnose.invariance.planted import seeded


class Layers(nn.Module):
    """Two layers over rows x [n, 32]; `mixes` subtracts a share of the mean over rows."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.mixes = mixes
        self.first, self.last = nn.Linear(32, 48), nn.Linear(48, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.last(hidden - 0.1 * hidden.mean(0)) if self.mixes else self.last(hidden)


INPUTS = [{"x": seeded((4, 32))}, {"x": seeded((7, 32))}]


def built(folder: Path, *, mixes: bool, backend: str) -> Path:
    torch.manual_seed(0)
    module = Layers(mixes=mixes).eval()
    glass.build(module, folder / backend, backend=backend, inputs=INPUTS, add_output=["*"])
    return folder / backend


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_an_engine_that_mixes_rows_is_named(backend: str, tmp_path: Path) -> None:
    found = glass.check_invariant(
        built(tmp_path, mixes=True, backend=backend), invariant=["run", "batch"], inputs=INPUTS
    )
    assert not found.ok and found.change("run").verdict == "bitwise"
    change = found.change("batch")
    assert change.verdict == "beyond rounding" and change.cause == MIXED
    assert change.first is not None and change.first.name == "mean" and "test_engines.py" in (change.first.source or "")
    assert not prove_batch_invariant(tmp_path / backend, INPUTS[0], num_batches=5).ok


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_an_engine_that_does_not_is_ok(backend: str, tmp_path: Path) -> None:
    found = glass.check_invariant(built(tmp_path, mixes=False, backend=backend), invariant="all", inputs=INPUTS)
    assert found.ok, found
    assert {one.what for one in found.changes} == {"run", "batch", "cache", "order"}


def test_changes_that_engines_do_not_support_are_refused(tmp_path: Path) -> None:
    engine = built(tmp_path, mixes=False, backend="eager")
    with pytest.raises(UsageError, match="--invariant compile"):
        glass.check_invariant(engine, invariant=["compile"], inputs=INPUTS)
    with pytest.raises(UsageError, match="needs inputs"):
        glass.check_invariant(engine, invariant=["batch"])


def test_other_back_ends_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="depend on their number"):
        glass.build(Layers(mixes=False), tmp_path / "engine", backend="eager", inputs=INPUTS, batch_invariant=True)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnxruntime", "inductor"])
def test_a_batch_invariant_engine_gives_rows_the_bits_that_they_have_alone(
    backend: str, root: Path, tmp_path: Path
) -> None:
    glass.build(root / "examples/tiny-llama", tmp_path / "engine", backend=backend, batch_invariant=True)
    proof = prove_batch_invariant(tmp_path / "engine")
    assert proof.ok and proof.num_batches == 200 and proof.num_rows > 200
    found = glass.check_invariant(tmp_path / "engine", invariant="all")
    assert found.ok and found.change("batch").verdict == "bitwise"
