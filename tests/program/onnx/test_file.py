"""Reading ONNX files: weights wherever they lie, and nothing beyond the file's own directory and size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from glassengine.errors import CorruptError, GlassError, UsageError
from glassengine.program.onnx.file import bare_model, fill, read_onnx
from tests.onnx_models import onnx_mlp, onnx_text

onnx = pytest.importorskip("onnx")

TEXT = "g (float[N, 4] x) => (float[N, 3] y) { y = MatMul (x, w) }"
VALUES = torch.arange(12, dtype=torch.float32).reshape(4, 3)


def saved(path: Path, *, external: bool = False) -> Path:
    model = onnx_text(TEXT, {"w": VALUES.numpy()})
    onnx.save_model(model, str(path), save_as_external_data=external, location="w.data", size_threshold=0)
    return path


def edited(path: Path, change: Callable[[Any], None]) -> Path:
    """Change the weight of a saved model."""
    model = onnx.load(path, load_external_data=False)
    change(model.graph.initializer[0])
    path.write_bytes(model.SerializeToString())
    return path


def set_entry(key: str, value: str) -> Callable[[Any], None]:
    def change(tensor: Any) -> None:
        kept = {entry.key: entry.value for entry in tensor.external_data} | {key: value}
        del tensor.external_data[:]
        for name, text in kept.items():
            tensor.external_data.add(key=name, value=text)

    return change


@pytest.mark.parametrize("external", [False, True])
def test_weights_are_those_of_the_file(tmp_path: Path, external: bool) -> None:
    file = read_onnx(saved(tmp_path / "m.onnx", external=external))
    assert torch.equal(file.weights()["w"], VALUES)
    file.weights()["w"].add_(1)  # memory of its own


def test_types_of_weights(tmp_path: Path) -> None:
    from onnx import TensorProto, helper

    cases = {
        "half": (TensorProto.FLOAT16, [1.5, -2.0, 0.25], torch.float16),
        "brain": (TensorProto.BFLOAT16, [1.5, -2.0, 0.25], torch.bfloat16),
        "nibble": (TensorProto.INT4, [7, -8, 3], torch.int8),
        "nibbles": (TensorProto.UINT4, [15, 0, 3], torch.uint8),
        "flags": (TensorProto.BOOL, [True, False, True], torch.bool),
        "double": (TensorProto.DOUBLE, [1.5, -2.0, 0.25], torch.float64),
        "nothing": (TensorProto.FLOAT, [], torch.float32),
    }
    model = onnx_text(TEXT, {"w": VALUES.numpy()})
    for name, (kind, values, _) in cases.items():
        model.graph.initializer.append(helper.make_tensor(name, kind, [len(values)], values))
    onnx.save(model, tmp_path / "m.onnx")
    weights = read_onnx(tmp_path / "m.onnx").weights()
    for name, (_, values, dtype) in cases.items():
        assert weights[name].dtype is dtype
        assert weights[name].tolist() == values
    # Taken out and put in again, they are the same.
    bare = bare_model(model)
    assert bare.ByteSize() < model.ByteSize()
    fill(bare, weights)
    onnx.save(bare, tmp_path / "again.onnx")
    again = read_onnx(tmp_path / "again.onnx").weights()
    assert all(torch.equal(again[name], value) for name, value in weights.items())


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("location", "../w.data", "outside of the model directory"),
        ("location", "/etc/hostname", "outside of the model directory"),
        ("location", "a/../../w.data", "outside of the model directory"),
        ("location", "C:\\w.data", "outside of the model directory"),
        ("location", "link.data", "outside of the model directory"),
        # To runtimes this is no file, but a place in the memory of the process.
        ("location", "*/_ORT_MEM_ADDR_/*", "outside of the model directory"),
        ("location", "", "outside of the model directory"),
        ("location", "other.data", r"is missing[\s\S]*next to the .onnx file"),
        ("offset", "8", "goes beyond its file"),
        ("offset", "-8", "goes beyond its file"),
        ("offset", "eight", "is not a number"),
        ("length", str(1 << 60), "goes beyond its file"),
        ("length", "8", "does not hold what its shape says"),
    ],
)
def test_external_data_stays_inside(tmp_path: Path, key: str, value: str, problem: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = edited(saved(folder / "m.onnx", external=True), set_entry(key, value))
    (tmp_path / "w.data").write_bytes(bytes(48))
    (folder / "link.data").symlink_to(tmp_path / "w.data")
    (folder / "*" / "_ORT_MEM_ADDR_").mkdir(parents=True)
    (folder / "*" / "_ORT_MEM_ADDR_" / "*").write_bytes(bytes(1 << 12))
    with pytest.raises(CorruptError, match=problem):
        read_onnx(path)


def test_s1_settings_of_the_runtime_in_a_file_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = onnx.load(saved(tmp_path / "m.onnx"))
    model.metadata_props.add(key="ort_config", value='{"session_options": {"enable_profiling": 1}}')
    onnx.save(model, tmp_path / "m.onnx")
    assert read_onnx(tmp_path / "m.onnx").weights()  # the runtime passes them over
    monkeypatch.setenv("ORT_LOAD_CONFIG_FROM_MODEL", "1")
    with pytest.raises(CorruptError, match="ort_config"):
        read_onnx(tmp_path / "m.onnx")


def test_a_hubs_cache_of_links_is_read(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    saved(blobs / "m.onnx", external=True)
    (blobs / "m.onnx").rename(blobs / "1234")
    (blobs / "w.data").rename(blobs / "5678")
    (snapshot / "m.onnx").symlink_to(blobs / "1234")
    (snapshot / "w.data").symlink_to(blobs / "5678")
    assert torch.equal(read_onnx(snapshot / "m.onnx").weights()["w"], VALUES)


def giant(tensor: Any) -> None:
    tensor.dims[:] = [1 << 40, 1 << 20]


def negative(tensor: Any) -> None:
    tensor.dims[0] = -4


def unknown(tensor: Any) -> None:
    tensor.data_type = 99


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize(
    ("change", "problem"),
    [(giant, "does not hold what|goes beyond"), (negative, "a negative size"), (unknown, "an unknown type")],
)
def test_a_weight_holds_what_its_shape_says(
    tmp_path: Path, external: bool, change: Callable[[Any], None], problem: str
) -> None:
    path = edited(saved(tmp_path / "m.onnx", external=external), change)
    if external and change is giant:
        edited(path, lambda tensor: tensor.external_data.pop())  # no length: what the shape says
    with pytest.raises(CorruptError, match=problem):
        read_onnx(path)


@pytest.mark.parametrize("content", [b"", b"hello", bytes(range(256)) * 4, b"PK\x03\x04"])
def test_files_that_are_no_model_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(UsageError, match="is not an ONNX model"):
        read_onnx(tmp_path / "m.onnx")


def test_damage_anywhere_is_an_error_of_ours(tmp_path: Path) -> None:
    whole = onnx_mlp().SerializeToString()
    path = tmp_path / "m.onnx"
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        with pytest.raises(GlassError):
            read_onnx(path)


@pytest.mark.parametrize("name", ["x", "MatMul", "w.data", "location", "w"])
def test_names_that_are_no_text_are_refused(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "m.onnx", external=True)
    data = path.read_bytes()
    assert name.encode() in data
    path.write_bytes(data.replace(name.encode(), b"\xff" * len(name)))
    with pytest.raises(CorruptError, match="a name in an ONNX file is not text"):
        read_onnx(path)


def test_prose_in_any_encoding_is_let_be(tmp_path: Path) -> None:
    model = onnx_text(TEXT, {"w": VALUES.numpy()})
    model.doc_string, model.producer_name = "Gr--sse", "by J--rgen"
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString().replace(b"r--", b"r-\xfc"))
    assert torch.equal(read_onnx(tmp_path / "m.onnx").weights()["w"], VALUES)
