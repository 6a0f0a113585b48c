"""Operators that the standard defines by others are judged by these, random ones are not judged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import glassengine as glass
from glassengine.capture.observers.interpreter import run_program
from glassengine.program.loading.onnx import onnx_program
from glassengine.program.onnx.operators.function import Composite
from glassengine.program.onnx.stored.file import OnnxFile
from glassengine.testing.onnx_models import onnx_text

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

HEADS = "float[1, 2, 5, 8]"
ATTENTION = f"g ({HEADS} q, {HEADS} k, {HEADS} v) => ({HEADS} y) {{ y = Attention <is_causal = 1> (q, k, v) }}"
OTHERS = {
    "MeanVarianceNormalization": "g (float[2, 3, 4, 4] x) => (float[2, 3, 4, 4] y) "
    "{ y = MeanVarianceNormalization (x) }",
    "CenterCropPad": "g (float[6, 8] x) => (float[4, 10] y) { s = Constant <value_ints = [4, 10]> () "
    "y = CenterCropPad (x, s) }",
}


@pytest.mark.parametrize("operator", OTHERS)
def test_values_are_those_of_onnx_runtime(operator: str) -> None:
    model = onnx_text(OTHERS[operator])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    shape = session.get_inputs()[0].shape
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    program = onnx_program(OnnxFile(Path("model.onnx"), model))
    assert any(isinstance(node.target, Composite) for node in program.graph.nodes)
    found = run_program(program, {"x": torch.from_numpy(x)})["y"]
    torch.testing.assert_close(found, torch.from_numpy(session.run(None, {"x": x})[0]), rtol=1e-5, atol=1e-6)


def test_attention_is_judged(tmp_path: Path) -> None:
    onnx.save(onnx_text(ATTENTION, opset=23), tmp_path / "one.onnx")
    result = glass.check(tmp_path / "one.onnx", backend="onnxruntime")
    assert result.ok
    assert all(pair.bound_ratio is not None for pair in result.pairs if pair.level == "source")
    onnx.save(onnx_text(ATTENTION.replace("is_causal = 1", "scale = 0.354"), opset=23), tmp_path / "other.onnx")
    assert not glass.check(tmp_path / "one.onnx", candidate=tmp_path / "other.onnx").ok


def test_what_is_drawn_anew_is_not_judged(tmp_path: Path) -> None:
    text = "g (float[4, 8] x) => (float[4, 8] y) { r = RandomNormalLike (x) t = Tanh (r) y = Add (t, x) }"
    onnx.save(onnx_text(text), tmp_path / "noise.onnx")
    result = glass.check(tmp_path / "noise.onnx", backend="onnxruntime")
    assert not [pair for pair in result.pairs if pair.verdict in ("suspicious", "wrong")]


def test_dequantized_numbers_that_cancel(tmp_path: Path) -> None:
    """OpenVINO computes q scale - zero scale, which rounds where the two cancel."""
    pytest.importorskip("openvino")
    generator = np.random.default_rng(0)
    weights = {"table": generator.integers(0, 255, (40, 8)).astype(np.uint8)}
    weights |= {"scale": np.float32(0.0123), "zero": np.uint8(131)}
    text = "g (int64[6] ids) => (float[6, 8] y) { q = Gather (table, ids) y = DequantizeLinear (q, scale, zero) }"
    onnx.save(onnx_text(text, weights), tmp_path / "table.onnx")
    assert glass.check(tmp_path / "table.onnx", backend="openvino").ok
    onnx.save(onnx_text(text, {**weights, "zero": np.uint8(130)}), tmp_path / "other.onnx")
    engine = glass.build(tmp_path / "other.onnx", tmp_path / "engine", backend="openvino")
    assert not glass.check(tmp_path / "table.onnx", candidate=engine.directory).ok
