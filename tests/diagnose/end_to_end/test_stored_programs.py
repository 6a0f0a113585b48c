"""ONNX files and .pt2 programs in a check: the file as it is, engines of it, and mistakes in another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import glassengine as glass
from glassengine.errors import BackendError, UsageError
from glassengine.results import Comparison
from tests.onnx_models import onnx_control_flow, onnx_mlp, onnx_text

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stored")


@pytest.fixture(scope="module")
def mlp(folder: Path) -> Path:
    onnx.save(onnx_mlp(), folder / "mlp.onnx")
    return folder / "mlp.onnx"


def levels(result: Comparison) -> dict[str, str]:
    return {level.name: level.verdict for level in result.levels}


@pytest.mark.parametrize("backend", [None, "eager", "openvino"])
def test_the_ladder_of_an_onnx_file(mlp: Path, backend: str | None) -> None:
    if backend == "openvino":
        pytest.importorskip("openvino")
    result = glass.check(mlp, backend=backend)
    assert result.ok
    assert set(levels(result)) == {"source", "engine", "release"}
    assert result.coverage == 1.0
    assert {pair.site for pair in result.pairs} == {"normal", "wide", "/mlp/act", "scores", "y"}


def test_branches_loops_and_functions(folder: Path) -> None:
    onnx.save(onnx_control_flow(), folder / "flow.onnx")
    result = glass.check(folder / "flow.onnx")
    assert result.ok
    assert result.coverage == 1.0


def rounded_weight(model: Any) -> None:
    tensor = next(one for one in model.graph.initializer if one.name == "second")
    values = onnx.numpy_helper.to_array(tensor).astype(np.float16).astype(np.float32)
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, "second"))


@pytest.mark.parametrize(
    ("options", "change", "site"),
    [
        ({"activation": "Elu"}, None, "/mlp/act"),
        ({"scale": 1.001}, None, "scores"),
        ({"epsilon": 1e-4}, None, "normal"),
        ({}, rounded_weight, "scores"),
    ],
)
def test_a_mistake_in_another_file_is_named(
    mlp: Path, tmp_path: Path, options: dict[str, Any], change: Callable[[Any], None] | None, site: str
) -> None:
    model = onnx_mlp(**options)
    if change is not None:
        change(model)
    onnx.save(model, tmp_path / "other.onnx")
    found = glass.check(mlp, candidate=tmp_path / "other.onnx")
    assert not found.ok
    assert found.first_divergence is not None
    assert (found.first_divergence.site, found.first_divergence.verdict) == (site, "wrong")
    assert (found.first_divergence.source or "").startswith("mlp.onnx:")


def test_an_engine_of_another_file_is_judged_op_by_op(mlp: Path, tmp_path: Path) -> None:
    onnx.save(onnx_mlp(activation="Elu"), tmp_path / "other.onnx")
    glass.build(tmp_path / "other.onnx", tmp_path / "engine")
    found = glass.check(mlp, candidate=tmp_path / "engine")
    assert levels(found) == {"source": "rounding", "engine": "wrong", "release": "wrong"}
    assert found.first_divergence is not None
    assert found.first_divergence.site == "/mlp/act"
    same = glass.check(tmp_path / "other.onnx", candidate=tmp_path / "engine")
    assert same.ok


def quantized(path: Path, *, step: float = 0.05) -> Path:
    generator = np.random.default_rng(0)
    weights = {
        # Of seven bits: products with uint8 saturate on no processor.
        "w": generator.integers(-63, 63, (16, 8)).astype(np.int8),
        "w_step": np.linspace(0.005, 0.02, 8, dtype=np.float32),
        "w_zero": np.zeros(8, np.int8),
        "step": np.float32(step),
        "zero": np.uint8(128),
    }
    text = """
    quantized (float[N, 16] x) => (float[N, 8] y) {
        q = QuantizeLinear (x, step, zero)
        d = DequantizeLinear (q, step, zero)
        wd = DequantizeLinear <axis = 1> (w, w_step, w_zero)
        product = MatMul (d, wd)
        y = Relu (product)
    }
    """
    onnx.save(onnx_text(text, weights), path)
    return path


def test_quantized_graphs(tmp_path: Path) -> None:
    path = quantized(tmp_path / "right.onnx")
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    torch.save({"x": x}, tmp_path / "inputs.pt")
    wrong = quantized(tmp_path / "wrong.onnx", step=0.051)
    found = glass.check(path, candidate=wrong, inputs=str(tmp_path / "inputs.pt"))
    assert found.first_divergence is not None
    assert found.first_divergence.site == "q"
    assert any("step" in hint.text for hint in found.first_divergence.hints)
    # On the edge between two steps either is right.
    x[0] = 0.05 * (torch.arange(16) + 0.5)
    torch.save({"x": x}, tmp_path / "inputs.pt")
    assert glass.check(path, inputs=str(tmp_path / "inputs.pt")).ok


class Net(nn.Module):
    def __init__(self, slope: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.norm(torch.nn.functional.leaky_relu(self.first(x), self.slope)), -1)


def exported(path: Path, **options: Any) -> Path:
    torch.manual_seed(0)
    dynamic = {"x": {0: torch.export.Dim("rows", min=2)}}
    torch.export.save(torch.export.export(Net(**options).eval(), (torch.randn(4, 8),), dynamic_shapes=dynamic), path)
    return path


@pytest.fixture(scope="module")
def net(folder: Path) -> Path:
    return exported(folder / "net.pt2", slope=0.1)


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_the_ladder_of_a_pt2_program(net: Path, backend: str) -> None:
    result = glass.check(net, backend=backend)
    assert result.ok
    assert levels(result)["source"] == "identical"
    assert {"first/linear.0", "norm/layer_norm.0", "./leaky_relu.0"} <= {pair.site for pair in result.pairs}


def test_a_mistake_in_another_pt2_program_is_named(net: Path, tmp_path: Path) -> None:
    found = glass.check(net, candidate=exported(tmp_path / "other.pt2", slope=0.2))
    assert found.first_divergence is not None
    assert (found.first_divergence.site, found.first_divergence.verdict) == ("./leaky_relu.0", "wrong")


def test_impossible_requests_are_refused(mlp: Path, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"'inductor' cannot build an ONNX file[\s\S]*onnxruntime"):
        glass.check(mlp, backend="inductor")
    with pytest.raises(UsageError, match=r"a pass changes a graph of torch"):
        glass.build(mlp, tmp_path / "engine", passes=["file.py:function"])
    with pytest.raises(UsageError, match=r"is a program already[\s\S]*glass run"):
        glass.build(mlp, tmp_path / "engine", inputs={"x": torch.randn(2, 16)})
    assert not (tmp_path / "engine").exists()
