"""Files of tensors that libraries read."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from glassengine.errors import CorruptError
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
