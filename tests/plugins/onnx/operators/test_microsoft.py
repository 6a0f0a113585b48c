"""Operators of ONNX Runtime's own domain have references of their own, which make what the runtime makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import glassengine as glass
from glassengine.capture.observers.interpreter import run_program
from glassengine.program.loading.onnx import onnx_model, onnx_program
from glassengine.program.onnx.operators.fallback import is_of_runtime_alone
from glassengine.program.onnx.stored.file import read_onnx

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def node(kind: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    return onnx.helper.make_node(kind, inputs, outputs, name=outputs[0], domain="com.microsoft", **attributes)


def saved(path: Path, level: int = 0) -> Path:
    random = np.random.default_rng(0)
    packed = random.integers(0, 256, (24, 2, 16), dtype=np.uint8)
    weights: dict[str, Any] = {
        "table": random.integers(0, 256, (10, 24), dtype=np.uint8),
        "table_scales": random.random((10, 2)).astype(np.float32) * 0.1,
        "gain": random.random(48).astype(np.float32),
        "bias": random.random(48).astype(np.float32),
        "b": packed,
        "scales": random.random(48).astype(np.float32) * 0.1,
        "zeros": random.integers(0, 256, 24, dtype=np.uint8),
        "cos": np.cos(np.arange(16)[:, None] / np.array([1, 2, 4, 8])).astype(np.float32),
        "sin": np.sin(np.arange(16)[:, None] / np.array([1, 2, 4, 8])).astype(np.float32),
    }
    blocks = {"bits": 4, "block_size": 32, "K": 48, "N": 24}
    nodes = [
        node(
            "GatherBlockQuantized", ["table", "ids", "table_scales"], ["rows"], bits=4, block_size=32, quantize_axis=1
        ),
        node("SkipSimplifiedLayerNormalization", ["rows", "rows", "gain"], ["norm", "", "", "sum"], epsilon=1e-5),
        node("SkipLayerNormalization", ["norm", "sum", "gain", "bias"], ["norm2"], epsilon=1e-5),
        node("MatMulNBits", ["norm2", "b", "scales", "zeros"], ["wide"], accuracy_level=level, **blocks),
        node("RotaryEmbedding", ["wide", "positions", "cos", "sin"], ["turned"], num_heads=3, rotary_embedding_dim=0),
    ]
    integers = [onnx.helper.make_tensor_value_info(name, 7, ["batch", "new"]) for name in ("ids", "positions")]
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        integers,
        [onnx.helper.make_tensor_value_info("turned", 1, ["batch", "new", 24])],
        [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


INPUTS = {"ids": torch.tensor([[1, 5, 9], [2, 2, 0]]), "positions": torch.tensor([[0, 1, 2], [3, 4, 5]])}


def test_references_make_what_the_runtime_makes(tmp_path: Path) -> None:
    file = read_onnx(saved(tmp_path / "model.onnx"))
    program = onnx_program(file)
    assert not any(is_of_runtime_alone(one.target) for one in program.graph.nodes)
    expected = onnx_model(file, program).values(INPUTS)
    named = {site.node: site.name for site in program.sites if site.kind == "op"}
    found: dict[str, torch.Tensor] = {}
    run_program(program, INPUTS, lambda one, value: found.update({named[one.name]: value} if one.name in named else {}))
    assert {"rows", "norm", "sum", "norm2", "wide", "turned"} <= found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


def test_a_product_that_rounds_its_activations_is_the_runtimes(tmp_path: Path) -> None:
    program = onnx_program(read_onnx(saved(tmp_path / "model.onnx", level=4)))
    assert sum(is_of_runtime_alone(one.target) for one in program.graph.nodes) == 1


def test_a_file_is_judged_by_them(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.onnx")
    torch.save(INPUTS, tmp_path / "inputs.pt")
    found = glass.check(path, backend="onnxruntime", inputs=str(tmp_path / "inputs.pt"))
    assert found.ok and found.verdict == "rounding" and not found.origins
    assert max(pair.bound_ratio or 0.0 for pair in found.pairs) <= 1.0
    model = onnx.load(path)
    next(one for one in model.graph.node if one.op_type == "SkipLayerNormalization").attribute[0].f = 1e-2
    onnx.save(model, tmp_path / "changed.onnx")
    found = glass.check(path, candidate=tmp_path / "changed.onnx", inputs=str(tmp_path / "inputs.pt"))
    assert not found.ok and found.first_divergence is not None and found.first_divergence.site == "norm2"
