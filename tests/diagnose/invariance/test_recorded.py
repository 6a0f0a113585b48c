"""Scripts beside themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

import glassengine as glass
from glassengine.diagnose.invariance.causes import RANDOM
from glassengine.diagnose.invariance.recorded import check_invariant_script
from glassengine.errors import GlassError, UsageError
from glassengine.plugins.serving.ggml.write import write_gguf
from tests.plugins.serving.ggml.test_backend import made

MODEL = "import torch\n{}\nmodel = torch.nn.Linear(4, 4)\nmodel(torch.randn(2, 4))\n"


@pytest.mark.slow
def test_a_script_without_a_seed_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MODEL.format(""))
    found = check_invariant_script(str(tmp_path / "train.py"))
    (change,) = found.changes
    assert not found.ok and change.verdict == "beyond rounding" and change.cause == RANDOM
    assert change.first is not None and change.switch is not None and "manual_seed" in change.switch


@pytest.mark.slow
def test_a_script_with_a_seed_is_bitwise_equal(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MODEL.format("torch.manual_seed(0)"))
    assert check_invariant_script(str(tmp_path / "train.py")).verdict == "bitwise"


@pytest.mark.slow
def test_a_serving_engine_runs_again_and_with_two_threads(tmp_path: Path) -> None:
    write_gguf(made("llama"), tmp_path / "model.gguf")
    engine = f"gguf:{tmp_path / 'model.gguf'}"
    found = glass.check_invariant(engine, invariant="all")
    assert found.ok and [one.what for one in found.changes] == ["run", "threads"]
    with pytest.raises(UsageError, match="--invariant batch"):
        glass.check_invariant(engine, invariant=["batch"])


def test_a_script_can_only_run_again() -> None:
    with pytest.raises(UsageError, match="a script brings its own inputs"):
        check_invariant_script("train.py", invariant=["batch"])


@pytest.mark.slow
def test_a_script_that_fails_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(GlassError, match="exit status 3"):
        check_invariant_script(str(tmp_path / "train.py"))
