"""Files of tensors that libraries read: signals end nothing, and messages are bounded before they are quoted."""

from __future__ import annotations

import errno
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from glassengine.errors import CorruptError
from glassengine.reading.files import shown
from glassengine.reading.tensors import read_safetensors, read_torch


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
    assert time.process_time() - began < 2


def test_notes_of_torch_are_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3), "b": [torch.zeros(0), torch.arange(70_000)]}, tmp_path / "a.pt")
    assert read_torch(tmp_path / "a.pt")["b"][1][-1] == 69_999


def test_a_message_of_many_megabytes_is_cut_first() -> None:
    began = time.process_time()
    assert len(shown("\0" * (1 << 26))) <= 1000
    assert len(shown("é" * 1000)) == 1000
    assert time.process_time() - began < 1
