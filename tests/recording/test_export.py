"""What is exported is read back as it was: by us, by torch, by numpy, by safetensors."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import glassengine as glass
from glassengine.errors import CorruptError, UsageError
from glassengine.recording.formats import debug_tree_writer as debug_tree
from glassengine.recording.source import TensorSource, open_source
from glassengine.recording.write.writer import RecordingWriter

TENSORS = {
    ".:in.x": torch.arange(6.0).reshape(2, 3),
    "a:in[0]": torch.arange(6.0).reshape(2, 3).t(),
    "a": torch.tensor([1.5, float("nan")]).bfloat16(),
    "a@1": torch.tensor([[True], [False]]),
    "layers.10.b:out[0]": torch.tensor(2**60),
    "layers.10.b:out[1].k": torch.zeros(0, 4),
    "layers.10.b:kv.key": torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
    "layers.10.b/mul.0": torch.tensor([1 + 2j]),
    "inter": torch.tensor([1e300], dtype=torch.float64),
    "w.weight:param": torch.tensor([1.0]).half(),
    "../../etc/passwd": torch.ones(1),
    "a\u202eb": torch.ones(2),
    ".:out": torch.ones(3),
    ".:out.scale": torch.ones(4),
    "c:in[999999999]": torch.ones(5),
    "d" * 5000: torch.ones(6),
}


@pytest.fixture
def recording(tmp_path: Path) -> glass.Recording:
    with RecordingWriter(tmp_path / "r", metadata={"class": "some.module.Net"}) as writer:
        for step in (0, 3):
            for rank in (0, 1):
                for site, tensor in TENSORS.items():
                    writer.write(
                        site,
                        step,
                        tensor + step if tensor.is_floating_point() and tensor.dtype.itemsize > 1 else tensor,
                        rank=rank,
                    )
            writer.commit(step)
    return glass.Recording.open(tmp_path / "r")


def check(found: TensorSource, recording: glass.Recording, *, numpy: bool = False, step: int | None = None) -> None:
    wanted = {(e.site, e.step, e.rank): e for e in recording.entries if step in (None, e.step)}
    assert not found.skipped
    assert {(e.site, 0 if step else e.step, e.rank) for e in found.entries} == {
        (site, 0 if step else number, rank) for site, number, rank in wanted
    }
    for entry in found.entries:
        expected = recording.tensor(wanted[entry.site, step or entry.step, entry.rank])
        tensor = found.tensor(entry)
        if numpy and expected.dtype in (torch.bfloat16, torch.float8_e4m3fn):
            expected = expected.float()
        assert tensor.dtype == expected.dtype and tensor.shape == expected.shape
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["pt", "npz", "debug-tree"])
def test_a_directory_holds_every_step_and_rank(recording: glass.Recording, tmp_path: Path, kind: str) -> None:
    files = glass.export(tmp_path / "r", tmp_path / "out", format=kind)  # type: ignore[arg-type]
    assert all(file.is_file() for file in files)
    check(open_source(tmp_path / "out"), recording, numpy=kind == "npz")
    assert {item.name for item in tmp_path.iterdir()} == {"r", "out"}
    assert not [item for item in (tmp_path / "out").rglob("*") if "partial" in item.name]


@pytest.mark.parametrize("name", ["x.pt", "x.pth", "x.npz"])
def test_a_file_holds_one_step(recording: glass.Recording, tmp_path: Path, name: str) -> None:
    one = [entry for entry in recording.entries if entry.rank == 0]
    source = _Part(recording, one)
    with pytest.raises(UsageError, match="one step of one rank"):
        glass.export(source, tmp_path / name)
    glass.export(source, tmp_path / name, step=3)
    found = torch.load(tmp_path / name, weights_only=True) if "pt" in name else np.load(tmp_path / name)
    assert set(found) == set(TENSORS)
    with pytest.raises(UsageError, match="exists already"):
        glass.export(source, tmp_path / name, step=3)
    glass.export(source, tmp_path / name, step=0, overwrite=True)


class _Part:
    """Some of the entries of a recording."""

    def __init__(self, recording: glass.Recording, entries: list[object]) -> None:
        self.path, self.metadata, self.complete, self.skipped = recording.path, recording.metadata, True, ()
        self.entries = tuple(entries)
        self.tensor = recording.tensor


def test_a_tree_is_what_the_document_says(recording: glass.Recording, tmp_path: Path) -> None:
    glass.export(recording, tmp_path / "out")
    names = {item.name for item in (tmp_path / "out").iterdir()}
    assert {"Net_debug_tree_FULL_TENSORS.json", "Net_debug_tree_SUMMARY.json",
            "Net_debug_tree_step3_rank1_SUMMARY.json", "Net.a_inputs_args_0.safetensors",
            "Net_inputs_kwargs_x.safetensors", "Net.a_outputs.safetensors", "Net.a@1_outputs.safetensors",
            "Net.layers.10.b_outputs_1_k.safetensors",
            "Net.layers.10.b_outputs_0_step3_rank1.safetensors"} <= names  # fmt: skip
    assert torch.equal(load_file(tmp_path / "out" / "Net.a_inputs_args_0.safetensors")["data"], TENSORS["a:in[0]"])
    tree = json.loads((tmp_path / "out" / "Net_debug_tree_SUMMARY.json").read_text())
    assert tree["module_path"] == "Net" and tree["inputs"]["kwargs"]["x"]["shape"] == "torch.Size([2, 3])"
    assert [child["module_path"] for child in tree["children"]][:2] == ["Net.a", "Net.a"]


def test_a_full_disk_leaves_nothing_half_written(recording: glass.Recording, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for kind in ("pt", "npz", "debug-tree"):
        with pytest.raises(UsageError, match="cannot"):
            glass.export(recording, tmp_path / "file" / "x", format=kind)  # type: ignore[arg-type]


def test_damage_of_the_source_is_said_and_leaves_no_file(recording: glass.Recording, tmp_path: Path) -> None:
    shard = next((tmp_path / "r").glob("shard-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-8:] = b"\xff" * 8
    shard.write_bytes(data)
    for kind in ("pt", "npz", "debug-tree"):
        with pytest.raises(CorruptError, match="checksum"):
            glass.export(tmp_path / "r", tmp_path / kind, format=kind)  # type: ignore[arg-type]
        assert not [item for item in (tmp_path / kind).rglob("*") if item.is_file() and item.name.startswith(".")]


def test_recordings_that_cannot_be_exported_are_refused(recording: glass.Recording, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown format"):
        glass.export(recording, tmp_path / "x", format="xlsx")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="nothing to export"):
        glass.export(recording, tmp_path / "x", step=1)


def test_names_that_are_no_text_in_a_zip(tmp_path: Path) -> None:
    for name in ("a\0b", "\udc80"):
        with RecordingWriter(tmp_path / "r", metadata={}, overwrite=True) as writer:
            writer.write(name, 0, torch.ones(1))
            writer.commit(0)
        with pytest.raises(UsageError, match=r"cannot be one in an \.npz file"):
            glass.export(tmp_path / "r", tmp_path / "x.npz")
        for kind in ("pt", "debug-tree"):
            glass.export(tmp_path / "r", tmp_path / kind, format=kind, overwrite=True)  # type: ignore[arg-type]
            assert [entry.site for entry in open_source(tmp_path / kind).entries] == [name]


def test_s10_a_disk_that_fills_up_leaves_no_directory(
    recording: glass.Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(debug_tree, "save_safetensors", full)
    (tmp_path / "there").mkdir()
    for folder in ("there", "new/inner"):
        with pytest.raises(UsageError, match="cannot write the"):
            glass.export(recording, tmp_path / folder)
    assert [path.name for path in tmp_path.rglob("*") if path.name in ("there", "new", "inner")] == ["there"]
    monkeypatch.undo()
    assert glass.export(recording, tmp_path / "new" / "inner")


def test_a_tree_that_cannot_be_moved_into_place_leaves_nothing_new(
    recording: glass.Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = Path.replace, [3]

    def replace(self: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, "Input/output error")
        return real(self, target)

    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "notes.txt").write_text("mine")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace)
        with pytest.raises(UsageError, match="Input/output error"):
            glass.export(recording, tmp_path / "x", format="debug-tree")
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["notes.txt"]
    glass.export(recording, tmp_path / "x", format="debug-tree")
    assert len(list((tmp_path / "x").iterdir())) > 3
