"""Engines of ONNX files: the source graph itself, with outputs added to it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import glassengine as glass
from glassengine import commands
from glassengine.errors import BackendError
from glassengine.recording.reader import Recording
from tests import children
from tests.onnx_models import onnx_control_flow, onnx_mlp, onnx_text

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

X = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "mlp.onnx"
    onnx.save(onnx_mlp(), path)
    return path


@pytest.fixture(scope="module")
def engine(mlp: Path) -> glass.Engine:
    return glass.build(mlp, mlp.parent / "engine", add_output=["/mlp/act", "wide=w"])


def test_the_graph_is_the_source_with_more_outputs(mlp: Path, engine: glass.Engine) -> None:
    source, built = onnx.load(mlp), onnx.load(engine.directory / "main" / "model.onnx")
    assert list(built.graph.node) == list(source.graph.node)
    assert list(built.graph.initializer) == list(source.graph.initializer)
    assert [value.name for value in built.graph.output] == ["y", "wide", "/mlp/act"]
    assert engine.manifest.backend == "onnxruntime"  # the default for such files
    found = engine(x=X)
    assert list(found) == ["y", "/mlp/act", "w"]
    assert torch.equal(found["/mlp/act"], found["w"].relu())
    assert (engine.directory / "weights.safetensors").stat().st_size < 100  # they are in the graph


@pytest.mark.parametrize("backend", ["eager", "openvino"])
def test_other_backends_give_the_same(mlp: Path, engine: glass.Engine, tmp_path: Path, backend: str) -> None:
    if backend == "openvino":
        pytest.importorskip("openvino")
    other = glass.build(mlp, tmp_path / "engine", backend=backend, add_output=["*"])
    for name, value in engine(x=X).items():
        torch.testing.assert_close(other(x=X)["wide" if name == "w" else name], value, rtol=1e-4, atol=1e-5)


def test_weights_beside_the_graph_and_weights_as_inputs(tmp_path: Path) -> None:
    from onnx import helper

    model = onnx_mlp()
    for tensor in model.graph.initializer:  # as files of old versions have them
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    model.ir_version = 3
    onnx.save_model(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    engine = glass.build(tmp_path / "m.onnx", tmp_path / "engine")
    (tmp_path / "m.data").unlink()
    assert [entry.name for entry in engine.manifest.inputs] == ["x"]
    plain = tmp_path / "plain.onnx"
    onnx.save(onnx_mlp(), plain)
    assert torch.equal(engine(x=X)["y"], glass.build(plain, tmp_path / "other")(x=X)["y"])
    assert engine.program.weights().keys() == glass.load(tmp_path / "other").program.weights().keys()


def test_several_outputs_of_one_value_and_empty_tensors(tmp_path: Path) -> None:
    onnx.save(onnx_control_flow(), tmp_path / "flow.onnx")
    engine = glass.build(tmp_path / "flow.onnx", tmp_path / "flow", add_output=["*"])
    found = engine(x=torch.rand(2, 4))
    assert torch.equal(found["y"], found["again"])
    text = "g (float[N, 4] x, float[M, 4] z) => (float[K, 4] y) { y = Concat <axis = 0> (x, z) }"
    onnx.save(onnx_text(text), tmp_path / "cat.onnx")
    joined = glass.build(tmp_path / "cat.onnx", tmp_path / "cat")
    assert joined(x=torch.ones(0, 4), z=torch.ones(2, 4))["y"].shape == (2, 4)


def test_an_operator_that_the_runtime_does_not_have(tmp_path: Path) -> None:
    model = onnx_mlp()
    model.graph.node[2].domain = "somebody.else"
    model.opset_import.add(domain="somebody.else", version=1)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(BackendError, match=r"does not take m.onnx[\s\S]*somebody.else"):
        glass.build(tmp_path / "m.onnx", tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_artifacts(mlp: Path, tmp_path: Path) -> None:
    glass.build(mlp, tmp_path / "engine", artifacts=tmp_path / "artifacts", backend="onnxruntime")
    listing = (tmp_path / "artifacts" / "onnxruntime_network_def.py").read_text()
    assert "scores = network.MatMul(_mlp_act, second)" in listing or "network.MatMul(" in listing
    assert "scores: float32[N, 8] = call_function" in (tmp_path / "artifacts" / "graph.txt").read_text()
    assert not list((tmp_path / "artifacts").rglob("graph_module.py"))  # nothing else could run it


SCRIPT = """
import onnxruntime, torch
session = onnxruntime.InferenceSession("mlp.onnx")
session.run(None, {"x": torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).numpy()})
"""


def test_recordings_of_one_file_pair(mlp: Path, engine: glass.Engine, tmp_path: Path) -> None:
    """A script's session, the file itself and an engine of it name their tensors alike."""
    script = mlp.parent / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "glassengine.cli", "record", "-o", str(tmp_path / "script"), "--", "script.py"]
    children.run(command, cwd=mlp.parent, check=True)
    engine.forward(inputs={"x": X}, record=tmp_path / "engine")
    commands.record_target(mlp, tmp_path / "source", inputs={"x": X})
    sites = {entry.site for entry in Recording.open(tmp_path / "source").entries}
    assert sites == {".:in.x", "normal", "wide", "/mlp/act", "scores", "y", ".:out.y"}
    for baseline, candidate, number in [
        (tmp_path / "engine", tmp_path / "source", 3),
        (tmp_path / "script" / "mlp", tmp_path / "source", 2),
        (tmp_path / "script" / "mlp", tmp_path / "engine", 1),
    ]:
        result = glass.compare(baseline, candidate, min_coverage=0.4)
        assert result.ok
        assert len(result.pairs) == number
