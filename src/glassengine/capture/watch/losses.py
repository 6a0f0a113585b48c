"""Notes the scalars on which a backward is called: the losses of a run, wherever its code computes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Note = Callable[[Tensor], None]

_lock = threading.Lock()
_listeners: list[Note] = []
_original: Callable[..., Any] | None = None


def listen(note: Note) -> None:
    """Call `note` with every floating scalar that `backward` is called on, ahead of it."""
    global _original
    with _lock:
        _listeners.append(note)
        if _original is None:
            _original = torch.autograd.backward
            torch.autograd.backward = _backward


def listen_no_more(note: Note) -> None:
    """Undo `listen`."""
    global _original
    with _lock:
        if note in _listeners:
            _listeners.remove(note)
        # Another one may have taken the place meanwhile, and calls ours.
        if not _listeners and _original is not None and torch.autograd.backward is _backward:
            torch.autograd.backward = _original
            _original = None


def _backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        for tensor in (tensors,) if isinstance(tensors, Tensor) else tuple(tensors):
            if type(tensor) is Tensor and tensor.numel() == 1 and tensor.is_floating_point():
                for note in tuple(_listeners):
                    note(tensor.detach())
    assert _original is not None
    return _original(tensors, *args, **kwargs)
