"""Norms of the tensors of a step: at once on the CPU, all of a device together elsewhere, for which no tensor waits.

One pass a tensor: where its sum of squares is finite, so are all its elements. On an accelerator the norms of a step
are asked for in bulk and copied to the CPU while the next step runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glassengine.capture.watch.held import Item
from glassengine.recording.layout.statistics import norm_of

MEASURED = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128))
"""Others (whole numbers, truth values, eight bits) have no series."""
# References to what waits are held as long: not too much, nor too many.
_MOST_BYTES = 64 << 20
_MOST_TENSORS = 512


@dataclass(eq=False, slots=True)
class Number:
    """A number that is not of a site.

    Attributes:
        norm: Its value; NaN where that is not known (yet).
    """

    norm: float = math.nan


class DeviceNorms:
    """Norms of the tensors of one step that are not on the CPU."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[torch.device, torch.dtype], list[tuple[Item, Tensor]]] = {}
        self._num_waiting = self._bytes_waiting = 0
        self._asked: list[tuple[Sequence[Item | Number], Tensor]] = []
        self._copies: list[tuple[list[Item | Number], Tensor, Any]] = []

    def add(self, item: Item, tensor: Tensor) -> None:
        """Measure a tensor soon; not one that is written to until then."""
        self._waiting.setdefault((tensor.device, tensor.dtype), []).append(
            (item, tensor.detach() if item.copy is None else item.copy)
        )
        self._num_waiting += 1
        self._bytes_waiting += tensor.numel() * tensor.element_size()
        if item.column.copies or self._num_waiting >= _MOST_TENSORS or self._bytes_waiting >= _MOST_BYTES:
            self._ask()

    def add_number(self, value: Tensor) -> Number:
        """Bring a number to the CPU with the norms."""
        found = Number()
        self._asked.append(([found], value.detach().reshape(1).float()))
        return found

    def end(self) -> bool:
        """Ask for what is left, and begin to copy the answers; return whether there are any."""
        self._ask()
        by_device: dict[torch.device, list[tuple[Sequence[Item | Number], Tensor]]] = {}
        for items, norms in self._asked:
            by_device.setdefault(norms.device, []).append((items, norms))
        for device, some in by_device.items():
            together = torch.cat([norms for _, norms in some])
            items = [item for items, _ in some for item in items]
            copy = together.to("cpu", non_blocking=device.type == "cuda")
            event = None
            if device.type == "cuda":
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(device))
            self._copies.append((items, copy, event))
        self._asked.clear()
        return bool(self._copies)

    def finish(self) -> None:
        """Wait for the answers, and note them."""
        for items, copy, event in self._copies:
            if event is not None:
                event.synchronize()
            for item, norm in zip(items, copy.tolist(), strict=True):
                if math.isfinite(norm) or isinstance(item, Number):
                    item.norm = norm
                else:
                    _look_closer(item)
        self._copies.clear()

    def _ask(self) -> None:
        for some in self._waiting.values():
            left = [(item, tensor) for item, tensor in some if item.copy is not None or item.is_untouched()]
            items, tensors = [item for item, _ in left], [tensor for _, tensor in left]
            if not items:
                continue
            self._asked.append((items, torch.stack(list(norms_of(tensors))).float()))
        self._waiting.clear()
        self._num_waiting = self._bytes_waiting = 0


def norms_of(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the norms of tensors of one device and dtype, in few launches where torch can do that."""
    dtype = torch.float32 if tensors[0].dtype in (torch.bfloat16, torch.float16) else None
    with torch.no_grad():
        if not tensors[0].is_complex():
            flat = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
            return torch._foreach_norm(flat, 2, dtype)
        return [torch.linalg.vector_norm(tensor) for tensor in tensors]


def measure(item: Item, tensor: Tensor) -> None:
    """Measure a tensor of the CPU."""
    item.norm, item.num_nonfinite = norm_of(tensor)


def _look_closer(item: Item) -> None:
    """Count what is not finite, where the values are still there."""
    values = item.values()
    if values is None:
        item.num_nonfinite = -1
    else:
        item.norm, item.num_nonfinite = norm_of(values)
