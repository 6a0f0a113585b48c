"""Models of llama.cpp in a process."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from glassengine.plugins.serving.ggml import library as llama_cpp


class _Library:
    """Keeps what it is given as C does: a pointer, and no reference."""

    def __init__(self, _: str) -> None:
        self.log: weakref.ref[Any] | None = None

    def llama_log_set(self, callback: Any, _: None) -> None:
        self.log = weakref.ref(callback)

    def has(self, _: str) -> bool:
        return False

    def __getattr__(self, _: str) -> Any:
        return lambda *_: 1


def test_the_log_callback_outlives_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pointer to it is of the process: a later line would be written by memory that was freed."""
    monkeypatch.setattr(llama_cpp, "Library", _Library)
    model = llama_cpp.GgufModel("library", "file")
    library: Any = model.library
    del model
    gc.collect()
    assert library.log is not None and library.log() is not None
