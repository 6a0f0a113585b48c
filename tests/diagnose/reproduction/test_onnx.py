"""Reproductions of divergences in ONNX graphs: one node, its inputs, and a script without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import glassengine as glass
from tests.onnx_models import onnx_mlp, onnx_text

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def run(directory: Path) -> subprocess.CompletedProcess[str]:
    forbidden = "import sys; sys.modules['torch'] = sys.modules['glassengine'] = None; import runpy; "
    code = forbidden + "runpy.run_path('test_repro.py', run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code], cwd=directory, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("as_engine", [False, True], ids=["file", "engine"])
def test_one_node_and_its_inputs(tmp_path: Path, as_engine: bool) -> None:
    onnx.save(onnx_mlp(), tmp_path / "mlp.onnx")
    onnx.save(onnx_mlp(activation="Elu"), tmp_path / "other.onnx")
    candidate = tmp_path / "other.onnx"
    if as_engine:
        candidate = glass.build(candidate, tmp_path / "engine").directory
    result = glass.check(tmp_path / "mlp.onnx", candidate=candidate, reproduction=tmp_path / "repro")
    assert result.first_divergence is not None
    assert result.first_divergence.reproduction == str(tmp_path / "repro")
    files = {path.name for path in (tmp_path / "repro").iterdir()}
    arrays = {"inputs.npz", "expected.npz", "actual.npz"}
    assert files == {"test_repro.py", "model.onnx", *arrays, "issue.md", "reproduction.json"}
    text = (tmp_path / "repro" / "issue.md").read_text()
    assert "polygraphy run model.onnx --onnxrt --load-inputs inputs.json --load-outputs expected.json" in text
    model = onnx.load(tmp_path / "repro" / "model.onnx")
    onnx.checker.check_model(model)
    assert [node.op_type for node in model.graph.node] == ["Elu"]
    about = json.loads((tmp_path / "repro" / "reproduction.json").read_text())
    assert about["runner"] == "onnxruntime" and about["site"] == "/mlp/act"
    shown = run(tmp_path / "repro")
    assert shown.returncode == 1 and "further from float64 than rounding explains" in shown.stderr
    model.graph.node[0].op_type = "Relu"  # mended
    onnx.save(model, tmp_path / "repro" / "model.onnx")
    shown = run(tmp_path / "repro")
    assert shown.returncode == 0 and "agrees with float64" in shown.stdout


def test_f5_judge_and_reproduction_have_one_bound(tmp_path: Path) -> None:
    """What is called wrong is shown by its reproduction, and numbers are printed with digits that tell them apart."""
    onnx.save(onnx_text("g (float[64] x) => (float[64] y) { y = Sigmoid (x) }"), tmp_path / "one.onnx")
    other = (
        "g (float[64] x) => (float[64] y) { f = Constant <value_float = 1.000003> () z = Mul (x, f) y = Sigmoid (z) }"
    )
    onnx.save(onnx_text(other), tmp_path / "other.onnx")
    np.savez(tmp_path / "inputs.npz", x=np.linspace(-12, 4, 64, dtype=np.float32))
    given = str(tmp_path / "inputs.npz")
    result = glass.check(
        tmp_path / "one.onnx", candidate=tmp_path / "other.onnx", inputs=given, reproduction=tmp_path / "repro"
    )
    if result.first_divergence is not None:
        shown = run(tmp_path / "repro")
        assert shown.returncode == 1
        found, wanted = shown.stderr.split(": ")[-1].split(", give")[0].split(", expected ")
        assert found != wanted


def test_weights_come_with_the_node(tmp_path: Path) -> None:
    onnx.save(onnx_mlp(), tmp_path / "mlp.onnx")
    onnx.save(onnx_mlp(scale=1.001), tmp_path / "other.onnx")
    result = glass.check(tmp_path / "mlp.onnx", candidate=tmp_path / "other.onnx", reproduction=tmp_path / "repro")
    assert result.first_divergence is not None and result.first_divergence.site == "scores"
    model = onnx.load(tmp_path / "repro" / "model.onnx")
    assert [node.op_type for node in model.graph.node] == ["MatMul"]
    assert [tensor.name for tensor in model.graph.initializer] == ["second"]
    assert run(tmp_path / "repro").returncode == 1
