"""Back-end "tensorrt_rtx": what is built, listed and refused without a GPU. What it computes nobody has seen here.

Tests that build need the wheels of `pip install 'glassengine[tensorrt-rtx]'`, which `make test` does not install.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.backends.protocol.backend import LARGEST, Layer, Network, NetworkTensor
from glassengine.cli.main import main
from glassengine.errors import BackendError, CorruptError
from glassengine.plugins.tensorrt_rtx.backend import (
    NETWORK_FILE,
    PLAN_FILE,
    UNBOUNDED,
    TensorRtRtxBackend,
    read_listing,
    shape_ranges,
    write_listing,
)
from glassengine.program.export.export import export_module
from glassengine.program.representation.program import Port, Program

BACKEND = TensorRtRtxBackend()

needs_wheels = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None, reason="needs glassengine[tensorrt-rtx]"
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.up(x).relu()
        return {"y": y, "same": x, "again": y, "positive": y > 0}


def _block() -> Program:
    return export_module(Block().eval(), [{"x": torch.randn(2, 8)}, {"x": torch.randn(3, 8)}])


def test_the_profile_of_a_language_model_is_that_of_the_engine() -> None:
    ports = (
        Port("input_ids", "input_ids", "int64", ("batch", "sequence")),
        Port("attention_mask", "attention_mask", "int64", ("batch", "cache")),
        Port("past_key_0", "past_key_0", "float32", ("batch", 2, "cache", 16)),
    )
    largest = {"batch": 4, "sequence": 32, "cache": 64}
    found = {name: sizes for name, *sizes in shape_ranges(replace(_block(), inputs=ports, metadata={LARGEST: largest}))}
    assert found["input_ids"] == [(1, 1), (1, 1), (4, 32)]
    assert found["attention_mask"] == [(1, 1), (1, 64), (4, 64)]
    assert found["past_key_0"] == [(1, 2, 1, 16), (1, 2, 64, 16), (4, 2, 64, 16)]


def test_the_profile_of_a_module_is_that_of_its_sizes() -> None:
    ((name, low, best, high),) = shape_ranges(_block())
    assert (name, best, high) == ("x", low, (UNBOUNDED, 8)) and low[0] in (1, 2)
    fixed = export_module(Block().eval(), [{"x": torch.randn(2, 8)}])
    assert shape_ranges(fixed) == []


def test_a_listing_is_read_as_it_was_written(tmp_path: Path) -> None:
    result = NetworkTensor("y", "float32", "[batch, 8]")
    layers = (Layer("mm", "MATRIX_MULTIPLY", ("linear",), ("x", ""), (result,), is_plugin=True),)
    network = Network(layers, (NetworkTensor("x"),), ("y",), "a note")
    write_listing(network, tmp_path)
    assert read_listing(tmp_path) == network
    for text in ("{", "[]", '{"layers": [{}]}', json.dumps({"layers": [], "inputs": [{"title": 1}], "outputs": []})):
        (tmp_path / NETWORK_FILE).write_text(text)
        with pytest.raises(CorruptError, match=NETWORK_FILE):
            read_listing(tmp_path)


def test_a_missing_package_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx_bindings", None)
    found = BACKEND.available()
    assert not found.available and found.install == "pip install 'glassengine[tensorrt-rtx]'"
    for use in (lambda: BACKEND.load(tmp_path, None), lambda: BACKEND.options(_block())):
        with pytest.raises(BackendError, match="cannot be used here"):
            use()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("block")
    BACKEND.build(_block(), directory)
    return directory


@needs_wheels
def test_a_plan_is_built_without_a_gpu(built: Path) -> None:
    assert sorted(path.name for path in built.iterdir()) == ["io.json", PLAN_FILE, NETWORK_FILE]
    assert (built / PLAN_FILE).stat().st_size > 1000


@needs_wheels
def test_layers_are_named_after_nodes_and_their_parts(built: Path) -> None:
    network = BACKEND.network(_block(), built)
    layers = {layer.name: layer for layer in network.layers}
    assert len(layers) == len(network.layers)
    # The layer of that name yields the node's value; the product without the bias is a part of it.
    assert layers["linear"].outputs[0].name == "linear" and layers["linear"].nodes == ("linear",)
    assert layers["linear/MATRIX_MULTIPLY_0"].nodes == ("linear",)
    assert layers["linear/SHUFFLE_0"].inputs == (layers["up.bias"].outputs[0].name,)
    assert layers["relu"].outputs[0] == NetworkTensor("y", "float32", layers["linear"].outputs[0].shape)
    assert layers["gt"].outputs[0].dtype == "bool"
    assert network.outputs == ("y", "same", "again", "positive")
    computed = {name for layer in network.layers for name in layer.outputs}
    assert {tensor.name for tensor in computed} >= set(network.outputs)


@needs_wheels
def test_precision_is_always_said() -> None:
    options = BACKEND.options(_block())
    assert (options["tf32"], options["strongly_typed"], options["flags"]) == (False, True, [])
    assert options["workspace_bytes"] > 0 and options["profile"]["x"]["max"] == (UNBOUNDED, 8)
    json.dumps(options)


@needs_wheels
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tensors_have_the_dtype_of_the_program(dtype: str, tmp_path: Path) -> None:
    module = Block().to(getattr(torch, dtype)).eval()
    program = export_module(module, [{"x": torch.randn(2, 8, dtype=getattr(torch, dtype))}])
    BACKEND.build(program, tmp_path)
    layers = {layer.name: layer for layer in BACKEND.network(program, tmp_path).layers}
    assert layers["linear"].outputs[0].dtype == layers["relu"].outputs[0].dtype == dtype


@needs_wheels
def test_running_is_refused_without_a_gpu_with_the_flag_that_helps(built: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    run = BACKEND.load(built, None)
    with pytest.raises(BackendError, match="needs a GPU") as refused:
        run({"x": torch.randn(2, 8)})
    assert "--backend inductor" in str(refused.value.hint) and "torch" in str(refused.value.got)


@needs_wheels
def test_errors_of_the_compiler_are_quoted(tmp_path: Path) -> None:
    class Determinant(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.det(x)

    with pytest.raises(BackendError, match="TensorRT-RTX cannot") as refused:
        BACKEND.build(export_module(Determinant(), [{"x": torch.randn(2, 3, 3)}]), tmp_path)
    assert "Det" in str(refused.value.got)


@needs_wheels
def test_an_onnx_file_is_compiled_as_it_is(tmp_path: Path) -> None:
    weight = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [4, 3], [float(i) for i in range(12)])
    nodes = [onnx.helper.make_node("MatMul", ["x", "w"], ["m"]), onnx.helper.make_node("Relu", ["m"], ["y"])]
    sides = [
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", size])]
        for name, size in (("x", 4), ("y", 3))
    ]
    graph = onnx.helper.make_graph(nodes, "g", *sides, [weight])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, tmp_path / "model.onnx")
    engine = glass.build(str(tmp_path / "model.onnx"), tmp_path / "engine", backend="tensorrt_rtx")
    assert engine.manifest.device == "cuda"
    assert [layer.operation for layer in read_listing(engine.directory / "main").layers] == [
        "CONSTANT",
        "MATRIX_MULTIPLY",
        "ACTIVATION",
    ]
    assert sum(t.numel() for t in glass.load(engine.directory).program.weights().values()) == 12


@needs_wheels
def test_an_engine_with_outputs_and_artifacts(tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifacts = tmp_path / "artifacts"
    command = ["build", str(root / "examples" / "tiny-llama"), "-o", str(tmp_path / "engine"), "--max-seq-len", "64"]
    command += ["--backend", "tensorrt_rtx", "--add-output", "layers.2.mlp=inter", "--artifacts", str(artifacts)]
    assert main(command) == 0
    engine = glass.load(tmp_path / "engine")
    assert [output.name for output in engine.manifest.added_outputs] == ["inter"]
    listing = (artifacts / "tensorrt_rtx_network_def.py").read_text()
    assert "network.MATRIX_MULTIPLY(" in listing and "model.layers.2.mlp" in listing
    found: dict[str, Any] = json.loads((artifacts / "builder_config.json").read_text())["backend_options"]
    assert found["tf32"] is False and found["profile"]["input_ids"]["max"] == [8, 64]
    capsys.readouterr()
    assert main(["run", str(tmp_path / "engine"), "--input-text", "a", "--max-new-tokens", "1"]) == (
        0 if torch.cuda.is_available() else 3
    )
    assert torch.cuda.is_available() or "needs a GPU" in capsys.readouterr().err
