"""Scripts beside themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import glassengine as glass
from glassengine.diagnose.invariance import recorded
from glassengine.diagnose.invariance.causes import RANDOM
from glassengine.diagnose.invariance.recorded import check_invariant_script
from glassengine.errors import GlassError, UsageError
from glassengine.plugins.serving.ggml.write import write_gguf
from glassengine.serving.protocol import ServingRun
from glassengine.testing.architectures import FAMILIES
from glassengine.testing.checkpoints import save_checkpoint
from glassengine.testing.genai import build_genai
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
    assert found.ok and [one.what for one in found.changes] == ["run", "length", "threads"]
    with pytest.raises(UsageError, match="--invariant batch"):
        glass.check_invariant(engine, invariant=["batch"])


class _Engine:
    """Records a linear map for each step; `change` is applied to the last one where tokens came one by one."""

    def __init__(self, change: float) -> None:
        torch.manual_seed(0)
        self.model, self.change = torch.nn.Linear(8, 8), change

    def record(self, run: ServingRun, path: Path) -> None:
        with glass.record(self.model, path), torch.no_grad():
            for step in range(run.steps + 1):
                is_last = step == run.steps and len(run.prompt) == 1
                self.model(torch.ones(1, 8) * (self.change if is_last else 1.0))


@pytest.mark.parametrize(
    ("change", "verdict"),
    [(1.0, "bitwise"), (1 + 1e-6, "within rounding"), (1.02, "undecided"), (2.0, "beyond rounding")],
)
def test_the_length_of_the_prefill(monkeypatch: pytest.MonkeyPatch, change: float, verdict: str) -> None:
    monkeypatch.setattr(recorded, "open_served", lambda *_: _Engine(change))
    found = glass.check_invariant("gguf:any", invariant="length")
    (one,) = found.changes
    assert (one.what, one.verdict) == ("length", verdict)
    assert found.ok == (verdict in ("bitwise", "within rounding"))
    assert verdict == "bitwise" or (one.first is not None and one.first.name == ".:in[0]")


def test_what_an_engine_cannot_try_is_told() -> None:
    with pytest.raises(UsageError, match=r"(?s)batch cannot be tried .*one request .*run, length, threads"):
        glass.check_invariant("gguf:any", invariant="batch")
    with pytest.raises(UsageError, match="too short"):
        glass.check_invariant("gguf:any", invariant="length", inputs={"input_ids": torch.tensor([[3, 4]])})


@pytest.mark.slow
def test_a_decoder_of_onnx_runtime(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_genai")
    torch.manual_seed(0)
    save_checkpoint(FAMILIES["llama"]().eval(), tmp_path / "checkpoint")
    found = glass.check_invariant(f"genai:{build_genai(tmp_path / 'checkpoint', tmp_path / 'genai')}", invariant="all")
    assert [one.what for one in found.changes] == ["run", "length", "threads"]
    assert all(one.verdict in ("bitwise", "within rounding") for one in found.changes)


def test_a_script_can_only_run_again() -> None:
    with pytest.raises(UsageError, match="a script brings its own inputs"):
        check_invariant_script("train.py", invariant=["batch"])


@pytest.mark.slow
def test_a_script_that_fails_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(GlassError, match="exit status 3"):
        check_invariant_script(str(tmp_path / "train.py"))
