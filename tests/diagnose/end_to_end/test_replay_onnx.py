"""Snapshots of engines of ONNX files hold the graph, and replay without the file that they came from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import glassengine as glass
from glassengine.cli.main import main
from glassengine.errors import CorruptError, UsageError
from tests.onnx_models import onnx_control_flow

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot of an engine with a debug output, whose file and engine are gone."""
    folder = tmp_path_factory.mktemp("snapshots")
    onnx.save(onnx_control_flow(), folder / "flow.onnx")
    engine = glass.build(folder / "flow.onnx", folder / "engine", backend="onnxruntime", add_output=["chosen"])
    x = torch.linspace(-1, 1.5, 8).reshape(2, 4)  # not around a tie of the branch
    with glass.snapshots.take(folder / "kept", on="every", contents="inputs outputs") as snapshots:
        engine(x=x)
    (path,) = snapshots.written
    shutil.rmtree(folder / "engine")
    (folder / "flow.onnx").unlink()
    return Path(path)


def test_f24_a_snapshot_of_an_onnx_engine_replays(kept: Path) -> None:
    assert {item.name for item in kept.iterdir()} >= {"graph.onnx", "meta.json", "weights-0.safetensors"}
    result = glass.replay(kept)
    assert result.ok and result.error is None and all(output.same_bits for output in result.outputs)


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_f24_its_ops_are_judged(kept: Path, backend: str) -> None:
    pytest.importorskip(backend)
    comparison = glass.replay(kept, backend=backend, compare=True).comparison
    assert comparison is not None and comparison.ok, comparison.not_ok_because
    assert comparison.granularity[0].num_sites > 5


def test_f24_what_was_recorded_wrong_is_seen(kept: Path, tmp_path: Path) -> None:
    model = onnx.load(kept / "graph.onnx")
    changed = tmp_path / "changed"
    shutil.copytree(kept, changed)
    next(node for node in model.graph.node if node.op_type == "ReduceSum").op_type = "ReduceMax"
    (changed / "graph.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(CorruptError, match="not what was written"):
        glass.replay(changed)


def test_f24_packed_and_redacted(kept: Path, tmp_path: Path) -> None:
    assert main(["snapshot", "pack", str(kept), "-o", str(tmp_path / "packed.safetensors")]) == 0
    assert glass.replay(tmp_path / "packed.safetensors").ok
    assert glass.replay(kept, first_nonfinite=True).ok
    with pytest.raises(UsageError, match="not bisected"):
        glass.replay(kept, bisect=True)
