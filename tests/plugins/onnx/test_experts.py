"""QMoE has a reference that makes what ONNX Runtime makes, in each of its forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import glassengine as glass
from glassengine.capture.observers import run_program
from glassengine.program.loading.stored import onnx_model, onnx_program
from glassengine.program.onnx.file import read_onnx
from glassengine.program.onnx.function import is_of_runtime_alone

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

E, C, F = 4, 32, 64
FORMS: dict[str, dict[str, Any]] = {
    "gates woven in, blocks": {"activation_type": "swiglu", "swiglu_fusion": 1, "block_size": 16},
    "clamped as gpt-oss is": {
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": 1.702,
        "activation_beta": 1.0,
        "swiglu_limit": 0.5,
        "normalize_routing_weights": 1,
        "bias": True,
        "block_size": 32,
    },
    "rows, not normalized": {"activation_type": "silu", "normalize_routing_weights": 0},
    "zero points": {"activation_type": "swiglu", "swiglu_fusion": 1, "block_size": 16, "zero": True},
    "bytes": {"activation_type": "swiglu", "swiglu_fusion": 1, "expert_weight_bits": 8},
    "shares given": {"activation_type": "silu", "normalize_routing_weights": 1, "shares": True},
}


def saved(path: Path, *, bias: bool = False, zero: bool = False, shares: bool = False, **attributes: Any) -> Path:
    random = np.random.default_rng(0)
    bits, block = attributes.get("expert_weight_bits", 4), attributes.get("block_size", 0)
    rows = {"fc1": (F * (2 if attributes.get("swiglu_fusion") else 1), C), "fc2": (C, F)}
    weights: dict[str, Any] = {}
    for name, (out, inner) in rows.items():
        blocks = inner // block if block else 0
        weights[name] = random.integers(0, 256, (E, out, inner * bits // 8), dtype=np.uint8)
        scales = random.random((E, out, blocks) if block else (E, out))
        weights[f"{name}_scales"] = (scales * (0.5 if bits == 4 else 0.03) / np.sqrt(inner)).astype(np.float32)
        if bias:
            weights[f"{name}_bias"] = random.standard_normal((E, out)).astype(np.float32)
        if zero:
            weights[f"{name}_zero"] = random.integers(0, 256, (E, out, -(-blocks * bits // 8)), dtype=np.uint8)
    inputs = ["x", "router", "fc1", "fc1_scales", "fc1_bias", "fc2", "fc2_scales", "fc2_bias", "", "", ""]
    inputs += ["fc1_zero", "fc2_zero", "", "shares"]
    inputs = [
        name if name in weights or name in ("x", "router") or (shares and name == "shares") else "" for name in inputs
    ]
    while not inputs[-1]:
        inputs.pop()
    node = onnx.helper.make_node("QMoE", inputs, ["mixed"], name="moe", domain="com.microsoft", k=2, **attributes)
    value = onnx.helper.make_tensor_value_info
    ports = [value("x", 1, ["tokens", C]), value("router", 1, ["tokens", E])]
    ports += [value("shares", 1, ["tokens", E])] if shares else []
    held = [onnx.numpy_helper.from_array(one, name) for name, one in weights.items()]
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    graph = onnx.helper.make_graph([node], "g", ports, [value("mixed", 1, ["tokens", C])], held)
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def given(shares: bool = False) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    found = {"x": torch.randn(5, C, generator=random), "router": torch.randn(5, E, generator=random)}
    return found | ({"shares": torch.rand(5, E, generator=random)} if shares else {})


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_makes_what_the_runtime_makes(form: str, tmp_path: Path) -> None:
    file = read_onnx(saved(tmp_path / "model.onnx", **FORMS[form]))
    program = onnx_program(file)
    assert not any(is_of_runtime_alone(one.target) for one in program.graph.nodes)
    inputs = given(FORMS[form].get("shares", False))
    expected, found = onnx_model(file, program).values(inputs), run_program(program, inputs)
    torch.testing.assert_close(found["mixed"], expected["mixed"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "form",
    [
        {"block_size": 32, "accuracy_level": 4},
        {"block_size": 32, "expert_weight_bits": 8},
        {"use_sparse_mixer": 1},
        {"quant_type": "fp4"},
    ],
)
def test_forms_that_are_not_known_stay_the_runtimes(form: dict[str, Any], tmp_path: Path) -> None:
    program = onnx_program(read_onnx(saved(tmp_path / "model.onnx", activation_type="silu", **form)))
    assert sum(is_of_runtime_alone(one.target) for one in program.graph.nodes) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "value"), [("swiglu_limit", 0.2), ("activation_alpha", 1.0)])
def test_a_file_is_judged_by_it(setting: str, value: float, tmp_path: Path) -> None:
    torch.save(given(), tmp_path / "inputs.pt")
    form = FORMS["clamped as gpt-oss is"]
    path = saved(tmp_path / "model.onnx", **form)
    found = glass.check(path, backend="onnxruntime", inputs=str(tmp_path / "inputs.pt"))
    assert found.ok and found.verdict in ("rounding", "identical") and not found.origins
    saved(tmp_path / "changed.onnx", **{**form, setting: value})
    found = glass.check(path, candidate=tmp_path / "changed.onnx", inputs=str(tmp_path / "inputs.pt"))
    assert not found.ok and found.first_divergence is not None and found.first_divergence.site == "mixed"
