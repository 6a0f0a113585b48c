"""Kernels that are accurate to an absolute error: a fact of the runtime, no mistake of the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import glassengine as glass
from tests.onnx_models import onnx_text

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


def test_sums_of_terms_that_are_alike_are_biased(tmp_path: Path) -> None:
    """OpenVINO adds them one after another: all roundings go in one direction."""
    pytest.importorskip("openvino")
    text = (
        "g (float[2, 128, 256] x) => (float[2, 1] y) { s = ReduceSum <keepdims = 0> (x, axes) y = Unsqueeze (s, last) }"
    )
    weights = {"axes": np.array([1, 2], np.int64), "last": np.array([1], np.int64)}
    onnx.save(onnx_text(text, weights), tmp_path / "sum.onnx")
    x = np.full((2, 128, 256), 0.1, np.float32)
    x[1] = 1 / 3
    result = glass.check(tmp_path / "sum.onnx", backend="openvino", inputs=inputs_of(tmp_path, x=x))
    assert result.ok
    wrong = onnx_text(text, {**weights, "axes": np.array([1, 2], np.int64)})
    wrong.graph.node[0].op_type = "ReduceMean"
    onnx.save(wrong, tmp_path / "mean.onnx")
    assert not glass.check(tmp_path / "sum.onnx", candidate=tmp_path / "mean.onnx").ok


GELU = """g (float[B, 16] x) => (float[B, 32] y) { w = MatMul (x, m)
    r = Constant <value_float = 1.4142135> () o = Constant <value_float = 1.0> () h = Constant <value_float = 0.5> ()
    d = Div (w, r) e = Erf (d) a = Add (e, o) t = Mul (w, a) y = Mul (t, h) }"""


def test_an_activation_that_is_computed_once_more_in_a_fused_kernel(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    generator = np.random.default_rng(0)
    weights = {"m": generator.standard_normal((16, 32)).astype(np.float32)}
    onnx.save(onnx_text(GELU, weights), tmp_path / "gelu.onnx")
    given = inputs_of(tmp_path, x=generator.standard_normal((64, 16)).astype(np.float32))
    assert glass.check(tmp_path / "gelu.onnx", backend="openvino", inputs=given).ok
    onnx.save(onnx_text(GELU.replace("0.5", "0.50002"), weights), tmp_path / "other.onnx")
    engine = glass.build(tmp_path / "other.onnx", tmp_path / "engine", backend="openvino")
    found = glass.check(tmp_path / "gelu.onnx", candidate=engine.directory, inputs=given)
    assert found.first_divergence is not None and found.first_divergence.site == "y"
