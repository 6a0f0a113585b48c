"""Files of tensors that libraries read: signals end nothing, and messages are bounded before they are quoted."""

from __future__ import annotations

import errno
import io
import resource
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import save_file

from glassengine.errors import CorruptError
from glassengine.reading import tensors
from glassengine.reading import tensors as arrays
from glassengine.reading.files import shown
from glassengine.reading.tensors import MAX_UNFOLDED_BYTES, check_unfolded, read_npz, read_safetensors, read_torch


def interrupted(read: Callable[..., Any], times: int, message: str) -> Callable[..., Any]:
    left = [message] * times

    def wrapped(*given: Any, **named: Any) -> Any:
        if left:
            raise RuntimeError(left.pop())
        return read(*given, **named)

    return wrapped


@pytest.mark.parametrize("how", [f"Interrupted system call ({errno.EINTR})", f"x (os error {errno.EINTR})"])
def test_a_signal_does_not_end_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    save_file({"x": torch.ones(3)}, tmp_path / "x.safetensors")
    torch.save({"x": torch.ones(3)}, tmp_path / "x.pt")
    monkeypatch.setattr(safetensors, "safe_open", interrupted(safetensors.safe_open, 3, how))
    monkeypatch.setattr(torch, "load", interrupted(torch.load, 3, how))
    assert read_safetensors(tmp_path / "x.safetensors")["x"].tolist() == [1, 1, 1]
    assert read_torch(tmp_path / "x.pt")["x"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("times", "number"), [(1, errno.EIO), (1000, errno.EINTR)])
def test_other_errors_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, number: int) -> None:
    save_file({"x": torch.ones(3)}, tmp_path / "x.safetensors")
    monkeypatch.setattr(safetensors, "safe_open", interrupted(safetensors.safe_open, times, f"error ({number})"))
    with pytest.raises(CorruptError, match=rf"\({number}\)"):
        read_safetensors(tmp_path / "x.safetensors")


def with_note(path: Path, name: str, size: int) -> Path:
    """Write a file of `torch.save` in which a note about the tensors is as large as said."""
    torch.save({"a": torch.ones(3)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {item.filename: archive.read(item) for item in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, b"\0" * size if member.endswith(name) else content)
    return path


@pytest.mark.parametrize("name", ["byteorder", "version", ".data/serialization_id"])
def test_a_note_of_many_megabytes_is_refused_at_once(name: str, tmp_path: Path) -> None:
    path = with_note(tmp_path / "a.pt", name, 1 << 25)
    began = time.process_time()
    with pytest.raises(CorruptError, match=r"33,554,432 bytes in \S*" + name):
        read_torch(path)
    assert time.process_time() - began < 20


def test_notes_of_torch_are_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3), "b": [torch.zeros(0), torch.arange(70_000)]}, tmp_path / "a.pt")
    assert read_torch(tmp_path / "a.pt")["b"][1][-1] == 69_999


def test_a_message_of_many_megabytes_is_cut_first() -> None:
    began = time.process_time()
    assert len(shown("\0" * (1 << 26))) <= 1000
    assert len(shown("é" * 1000)) == 1000
    assert time.process_time() - began < 20


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def zeros(path: Path, num_bytes: int) -> Path:
    """Write a compressed archive of one array of zeros, which is never in memory."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (num_bytes,)})
    piece = bytes(1 << 20)
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("x.npy", "w", force_zip64=True) as file,
    ):
        file.write(header.getvalue())
        for begin in range(0, num_bytes, len(piece)):
            file.write(piece[: num_bytes - begin])
    return path


def test_s4_a_compressed_archive_above_the_bound_is_refused_before_it_unfolds(tmp_path: Path) -> None:
    path = zeros(tmp_path / "x.npz", MAX_UNFOLDED_BYTES)  # and its header is beyond
    assert path.stat().st_size < 8 << 20
    before = peak()
    with pytest.raises(CorruptError, match="unfold to"):
        read_npz(path)
    assert peak() - before < 64 << 20


def test_up_to_the_bound_it_unfolds_and_what_is_stored_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "MAX_UNFOLDED_BYTES", 1 << 20)
    header = 128
    assert read_npz(zeros(tmp_path / "most.npz", (1 << 20) - header))["x"].nbytes == (1 << 20) - header
    with pytest.raises(CorruptError, match="save them uncompressed"):
        read_npz(zeros(tmp_path / "more.npz", (1 << 20) - header + 1))
    np.savez(tmp_path / "stored.npz", x=np.zeros(3 << 20, np.uint8))
    assert read_npz(tmp_path / "stored.npz")["x"].nbytes == 3 << 20


def nested(num_values: int, depth: int = 1) -> Any:
    value: Any = [0] * num_values
    for _ in range(depth):
        value = {"a": value}
    return value


def test_s4_values_and_depth_of_a_file_are_bounded(tmp_path: Path) -> None:
    most = tensors._MAX_LEAVES - 2  # a dict and a list
    check_unfolded(nested(most), "x.pt")
    for bad in (nested(most + 1), nested(1, depth=tensors._MAX_DEPTH), [nested(most // 2)] * 3):
        with pytest.raises(CorruptError, match="nests too deeply or holds too much"):
            check_unfolded(bad, "x.pt")
    check_unfolded(nested(1, depth=tensors._MAX_DEPTH - 1), "x.pt")
    # One list that is named many times is one in the file, and 2^40 when it is walked.
    value: Any = [torch.ones(1)]
    for _ in range(40):
        value = [value, value]
    torch.save(value, tmp_path / "x.pt")
    with pytest.raises(CorruptError, match="nests too deeply or holds too much"):
        check_unfolded(read_torch(tmp_path / "x.pt"), "x.pt")
