"""Kernels that are accurate to an absolute error: a fact of the runtime, no mistake of the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import glassengine as glass
from glassengine.testing.onnx_models import onnx_text

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

RANGE = {"x": np.linspace(-12, 4, 64, dtype=np.float32)}


def inputs_of(folder: Path, **arrays: np.ndarray) -> str:
    np.savez(folder / "inputs.npz", **arrays)
    return str(folder / "inputs.npz")


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("operator", ["Sigmoid", "HardSigmoid", "HardSwish", "Softplus", "Mish", "Gelu", "Tanh", "Erf"])
def test_f5_kernels_of_a_runtime_are_no_mistakes(tmp_path: Path, operator: str, backend: str) -> None:
    if backend == "openvino":
        pytest.importorskip("openvino")
    onnx.save(onnx_text(f"g (float[64] x) => (float[64] y) {{ y = {operator} (x) }}"), tmp_path / "one.onnx")
    result = glass.check(tmp_path / "one.onnx", backend=backend, inputs=inputs_of(tmp_path, **RANGE))
    assert [pair for pair in result.pairs if pair.verdict not in ("identical", "rounding")] == []
    assert result.ok


WRONG = {
    "hard": "y = HardSigmoid <alpha = 0.1666667, beta = 0.5> (x)",
    "scaled": "z = Sigmoid (x) factor = Constant <value_float = 1.00001> () y = Mul (z, factor)",
    "steeper": "factor = Constant <value_float = 1.00002> () z = Mul (x, factor) y = Sigmoid (z)",
    "tanh": "half = Constant <value_float = 0.49999> () z = Mul (x, half) t = Tanh (z) one = Constant"
    " <value_float = 1.0> () two = Constant <value_float = 0.5> () s = Add (t, one) y = Mul (s, two)",
}


@pytest.mark.parametrize("mistake", WRONG)
def test_f5_a_wrong_sigmoid_is_found_beside_them(tmp_path: Path, mistake: str) -> None:
    model = onnx_text("g (float[64] x) => (float[64] y) { y = Sigmoid (x) }")
    onnx.save(model, tmp_path / "one.onnx")
    onnx.save(onnx_text(f"g (float[64] x) => (float[64] y) {{ {WRONG[mistake]} }}"), tmp_path / "other.onnx")
    given = inputs_of(tmp_path, **RANGE)
    result = glass.check(tmp_path / "one.onnx", candidate=tmp_path / "other.onnx", inputs=given)
    assert not result.ok
    engine = glass.build(tmp_path / "other.onnx", tmp_path / "engine")
    assert not glass.check(tmp_path / "one.onnx", candidate=engine.directory, inputs=given).ok


def test_f17_products_of_symbolic_sizes(tmp_path: Path) -> None:
    text = "g (float[B, S, 8] q, float[B, 8, S] k) => (float[B, S, S] s) { s = MatMul (q, k) }"
    onnx.save(onnx_text(text), tmp_path / "scores.onnx")
    generator = np.random.default_rng(0)
    for name, size in (("many", 5), ("one", 1)):
        q, k = (generator.standard_normal(shape).astype(np.float32) for shape in ((2, size, 8), (2, 8, size)))
        given = inputs_of(tmp_path, q=q, k=k)
        result = glass.check(tmp_path / "scores.onnx", backend="onnxruntime", inputs=given)
        assert result.ok and result.coverage == 1.0, name
        ported = glass.check(tmp_path / "scores.onnx", candidate=tmp_path / "scores.onnx", inputs=given)
        assert ported.ok
