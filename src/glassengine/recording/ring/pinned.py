"""Copies from an accelerator that the model does not wait for: into pinned memory, on the stream the model runs on.

Later operations of that stream run after the copy, so a later change of the tensor does not reach it. Only the
thread that writes waits for the copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from glassengine.recording.ring.flag import Flag


class PinnedCopies:
    """Hands out copies under a limit of memory.

    Args:
        most_bytes: Of all copies that are not given back; one tensor may exceed it by itself.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._in_flight = 0
        self._lock = threading.Lock()
        self._has_room = Flag()

    @staticmethod
    def takes(tensor: Tensor) -> bool:
        """Return whether a tensor is on a device from which copies run by themselves."""
        return tensor.is_cuda

    def take(self, tensor: Tensor, num_bytes: int, on_wait: Callable[[], None]) -> tuple[Tensor, Any]:
        """Begin to copy the values of `tensor` in row-major order.

        Args:
            tensor: Dense, any strides.
            num_bytes: Their size.
            on_wait: Called again and again while too much is in flight; may raise.

        Returns:
            The bytes, and an event to wait for before they are read.
        """
        while self._in_flight and self._in_flight + num_bytes > self._most_bytes:
            self._has_room.clear()
            on_wait()
            self._has_room.wait(0.05)
        with self._lock:
            self._in_flight += num_bytes
        target = _allocate(num_bytes)
        target.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach(), non_blocking=True)
        return target, _event(tensor.device)

    def give_back(self, num_bytes: int) -> None:
        """Note that a copy is not needed any more."""
        with self._lock:
            self._in_flight -= num_bytes
        self._has_room.set()


def _allocate(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _event(device: torch.device) -> Any:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
