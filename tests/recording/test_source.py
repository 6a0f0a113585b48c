"""Foreign files: everything a user may have, and everything an attacker may send."""

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from glassengine.errors import CorruptError, UsageError
from glassengine.extensions import FORMATS
from glassengine.recording import source as sources
from glassengine.recording.formats.files import TorchFile
from glassengine.recording.reader import Recording
from glassengine.recording.source import open_source
from glassengine.recording.write.writer import RecordingWriter


def names(source: object) -> list[str]:
    return [entry.site for entry in source.entries]  # type: ignore[attr-defined]


def reasons(source: object) -> dict[str, str]:
    return {item.site: item.reason for item in source.skipped}  # type: ignore[attr-defined]


def test_nested_torch_file(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    content = {"a": x, "b": {"c": [x[0], (x.t(), 5)], 7: x.bool()}, "text": "hello", "none": None, "s": x.to_sparse()}
    torch.save(content, tmp_path / "f.pt")
    source = open_source(tmp_path / "f.pt")
    assert names(source) == ["a", "b.c.0", "b.c.1.0", "b.c.1.1", "b.7"]
    assert {entry.step for entry in source.entries} == {0}
    assert torch.equal(source.tensor(source.entries[2]), x.t())
    assert reasons(source) == {
        "text": "not a tensor: str",
        "none": "not a tensor: NoneType",
        "s": "not a dense tensor: torch.sparse_coo",
    }


def test_a_bare_tensor_and_colliding_names(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "f.pth")
    assert names(open_source(tmp_path / "f.pth")) == ["tensor"]
    torch.save({"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}, tmp_path / "g.pt")
    source = open_source(tmp_path / "g.pt")
    assert (names(source), reasons(source)) == (["a.b"], {"a.b": "two entries have this name"})


class _Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> object:
        return (Path.touch, (self.marker,))


def test_a_pickle_in_a_torch_file_is_not_run(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": _Evil(tmp_path / "ran")}, tmp_path / "f.pt")
    with pytest.raises(CorruptError, match="would run code"):
        open_source(tmp_path / "f.pt")
    (tmp_path / "g.pt").write_bytes(pickle.dumps(_Evil(tmp_path / "ran")))
    with pytest.raises(CorruptError, match=r"not a file that torch\.save wrote"):
        open_source(tmp_path / "g.pt")
    assert not (tmp_path / "ran").exists()


def test_a_torch_file_that_unfolds_without_end(tmp_path: Path) -> None:
    level: object = [torch.ones(1)]
    for _ in range(40):
        level = [level, level]
    torch.save(level, tmp_path / "f.pt")
    with pytest.raises(CorruptError, match="nests too deeply or holds too much"):
        open_source(tmp_path / "f.pt")


def test_compressed_and_truncated_torch_files(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1000)}, tmp_path / "f.pt")
    with (
        zipfile.ZipFile(tmp_path / "f.pt") as good,
        zipfile.ZipFile(tmp_path / "g.pt", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for member in good.namelist():
            bomb.writestr(member, good.read(member))
    with pytest.raises(CorruptError, match="compressed members"):
        open_source(tmp_path / "g.pt")
    data = (tmp_path / "f.pt").read_bytes()
    for size in (0, 10, 500, len(data) - 1):
        (tmp_path / "h.pt").write_bytes(data[:size])
        with pytest.raises(CorruptError):
            open_source(tmp_path / "h.pt")


def test_safetensors_file(tmp_path: Path) -> None:
    content = {"b": torch.ones(2, 3).bfloat16(), "a": torch.arange(4), "f8": torch.ones(2).to(torch.float8_e5m2)}
    save_file(content, tmp_path / "f.safetensors", metadata={"who": "me"})
    source = open_source(tmp_path / "f.safetensors")
    assert source.metadata == {"who": "me"}
    for entry in source.entries:
        assert torch.equal(source.tensor(entry).double(), content[entry.site].double())
        assert entry.dtype == str(content[entry.site].dtype).removeprefix("torch.")


def test_a_sealed_shard_is_a_source(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "r", metadata={}) as w:
        w.write("x", 0, torch.ones(3))
        w.write("y", 0, torch.ones(5))
        w.commit(0)
    source = open_source(tmp_path / "r" / "shard-00000.safetensors")
    assert names(source) == ["step0/rank0/x", "step0/rank0/y"]
    assert list(reasons(source).values()) == ["alignment padding of a recording"]
    assert names(open_source(tmp_path / "r")) == ["x", "y"]


@pytest.mark.parametrize("kind", ["truncated", "huge header", "overlap", "beyond", "unknown dtype", "empty"])
def test_hostile_safetensors(tmp_path: Path, kind: str) -> None:
    head = {
        "overlap": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],'
        b'"data_offsets":[4,12]}}',
        "beyond": b'{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}',
        "unknown dtype": b'{"a":{"dtype":"X9","shape":[2],"data_offsets":[0,8]}}',
    }.get(kind, b"{}")
    data = struct.pack("<Q", 1 << 60 if kind == "huge header" else len(head)) + head + bytes(12)
    (tmp_path / "f.safetensors").write_bytes({"truncated": data[:5], "empty": b""}.get(kind, data))
    with pytest.raises(CorruptError, match="not a safetensors file"):
        open_source(tmp_path / "f.safetensors")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_numpy_file(tmp_path: Path, save: object) -> None:
    content = {
        "a": np.arange(6.0).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        "big": np.arange(3, dtype=">f4"),
        "scalar": np.array(7, dtype=np.uint64),
        "empty": np.empty((0, 2), dtype=np.float16),
        "flag": np.array([True, False]),
        "complex": np.array([1 + 2j], dtype=np.complex128),
    }
    save(tmp_path / "f.npz", **content, text=np.array(["x"]), object=np.array([{}], dtype=object))  # type: ignore[operator]
    source = open_source(tmp_path / "f.npz")
    assert names(source) == list(content)
    for entry in source.entries:
        got = source.tensor(entry)
        assert np.array_equal(got.numpy(), content[entry.site])
        assert got.dtype == getattr(torch, entry.dtype)
    assert reasons(source)["object"] == "an object array is a pickle, and reading it would run code"
    assert reasons(source)["text"] == "no arithmetic for numpy dtype <U1: save it as float32"


def _member(header: str, data: bytes) -> bytes:
    text = header.encode().ljust(118 - 1) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def test_hostile_numpy(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "f.npz", "w") as archive:
        archive.writestr("absurd.npy", _member("{'descr':'<f8','fortran_order':False,'shape':(1099511627776,)}", b""))
        archive.writestr("code.npy", _member("{'descr':__import__('os'),'fortran_order':False,'shape':()}", b""))
        archive.writestr("readme.txt", "hello")
        long = b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 31) + bytes(1 << 16)
        archive.writestr("long.npy", long, zipfile.ZIP_DEFLATED)
        good = io.BytesIO()
        np.save(good, np.ones(3))
        archive.writestr("../../good.npy", good.getvalue())
        archive.writestr("../../good", good.getvalue())
        archive.writestr("bare", good.getvalue())
    source = open_source(tmp_path / "f.npz")
    assert names(source) == ["../../good", "bare"]
    assert source.tensor(source.entries[1]).sum() == 3
    assert reasons(source)["../../good"] == "two entries have this name"
    assert "claims 8796093022208 bytes, the file has 0" in reasons(source)["absurd"]
    assert reasons(source)["long"] == "not an array: the header claims 2147483648 bytes"
    assert set(reasons(source)) == {"absurd", "code", "readme.txt", "long", "../../good"}
    (tmp_path / "g.npz").write_bytes((tmp_path / "f.npz").read_bytes()[:-30])
    with pytest.raises(CorruptError, match=r"not an \.npz file"):
        open_source(tmp_path / "g.npz")


def test_a_damaged_array_is_noticed(tmp_path: Path) -> None:
    np.savez(tmp_path / "f.npz", a=np.zeros(1000))
    data = bytearray((tmp_path / "f.npz").read_bytes())
    data[4000] ^= 1
    (tmp_path / "f.npz").write_bytes(data)
    source = open_source(tmp_path / "f.npz")
    with pytest.raises(CorruptError, match="cannot be read"):
        source.tensor(source.entries[0])


def test_paths(tmp_path: Path) -> None:
    (tmp_path / "step0.pt").touch()
    with pytest.raises(UsageError, match=r"no such file(.|\n)*step0\.pt"):
        open_source(tmp_path / "step1.pt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no tensors"):
        open_source(tmp_path / "empty")
    (tmp_path / "x.onnx").touch()
    with pytest.raises(UsageError, match=r"kind of file(.|\n)*\.safetensors"):
        open_source(tmp_path / "x.onnx")
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(UsageError, match="not a plain file"):
        open_source(tmp_path / "pipe.pt")


def test_f41_a_directory_with_exactly_one_recording(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "r" / "Net", metadata={}) as writer:
        writer.write("a", 0, torch.ones(2))
        writer.commit(0)
    (tmp_path / "r" / "notes").mkdir()
    assert (
        names(open_source(tmp_path / "r")) == ["a"] == [entry.site for entry in Recording.open(tmp_path / "r").entries]
    )
    with RecordingWriter(tmp_path / "r" / "Other", metadata={}) as writer:
        writer.write("a", 0, torch.ones(2))
        writer.commit(0)
    with pytest.raises(UsageError, match="one of the recordings in it"):
        open_source(tmp_path / "r")
    with pytest.raises(UsageError, match="no recording found"):
        Recording.open(tmp_path / "r")


Register = Callable[[Callable[[], Any]], None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """Make what is given the entry point of another package."""

    def add(load: Callable[[], Any]) -> None:
        entry = SimpleNamespace(name="mine", load=load, dist=None)
        monkeypatch.setattr(sources, "registered", lambda group: {"mine": entry} if group == FORMATS else {})

    return add


def test_a_format_of_another_package_is_asked_first(tmp_path: Path, register: Register) -> None:
    for name in ("a.pt", "b.pt", "a.mine", "b.mine"):
        torch.save({name: torch.ones(2)}, tmp_path / name)
    with pytest.raises(UsageError, match="kind of file is not known"):
        open_source(tmp_path / "a.mine")

    def opens(path: Path) -> TorchFile | None:
        return TorchFile(path) if path.stem == "a" else None

    register(lambda: sources.SourceFormat("files called a", opens, (".pt", ".mine")))
    assert ".mine" in sources.file_suffixes()
    assert names(open_source(tmp_path / "a.mine")) == ["a.mine"]
    assert names(open_source(tmp_path / "b.pt")) == ["b.pt"]
    with pytest.raises(UsageError, match="the MINE file holds no tensors") as caught:
        open_source(tmp_path / "b.mine")
    assert caught.value.expected == "files called a"


def test_a_directory_of_another_package(tmp_path: Path, register: Register) -> None:
    (tmp_path / "odd.bin").touch()

    def opens(path: Path) -> TorchFile | None:
        torch.save({"a": torch.ones(2)}, path / "made.pt")
        return TorchFile(path / "made.pt") if (path / "odd.bin").exists() else None

    register(lambda: sources.SourceFormat("a directory with odd.bin", opens))
    assert names(open_source(tmp_path)) == ["a"]


def test_formats_of_other_packages_that_fail(tmp_path: Path, register: Register) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")

    def fails(path: Path) -> Any:
        raise ZeroDivisionError("theirs")

    register(lambda: sources.SourceFormat("files of theirs", fails, (".pt",)))
    with pytest.raises(CorruptError, match=r"the reader of files of theirs has failed[\s\S]*ZeroDivisionError: theirs"):
        open_source(tmp_path / "a.pt")

    def missing() -> Any:
        raise ImportError("no module named theirs")

    register(missing)
    with pytest.raises(UsageError, match=r"format 'mine' cannot be imported[\s\S]*no module named theirs"):
        open_source(tmp_path / "a.pt")
