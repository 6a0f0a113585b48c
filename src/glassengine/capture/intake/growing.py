"""Finds the rows that a step adds to a key/value cache, so that a generation records each row once."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

_SPARE = 1.5
"""Capacity of a new copy, in rows of the cache: all copies of a generation of n rows have about 3 n rows together."""

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class GrowingTensors:
    """Copies of the caches of the last step, in memory of the host.

    Args:
        axes: Positions of dimensions; the one named "cache" grows.
    """

    def __init__(self, axes: Mapping[str, int]) -> None:
        self._axis = axes["cache"]
        self._lock = threading.Lock()
        # Site -> step, rows, and a copy of these that may have room for more.
        self._last: dict[str, tuple[int, int, Tensor]] = {}

    def added(self, site: str, step: int, tensor: Tensor) -> Tensor | None:
        """Return the rows, maybe none, that `step` adds; None unless the others are bitwise those of the step before.

        Steps of several threads end in any order. Only numbers that follow each other have no step in between.
        """
        if tensor.itemsize not in _WORDS or tensor.is_complex():
            return None
        values = tensor.detach().to("cpu").view(_WORDS[tensor.itemsize])
        count = values.shape[self._axis]
        with self._lock:
            before, size, copy = self._last.pop(site, (-1, 0, values))
            is_next = before == step - 1 and 0 < size <= count
            if not (is_next and torch.equal(self._rows(copy, 0, size), self._rows(values, 0, size))):
                size = 0
            first = size
            if not size or copy.shape[self._axis] < count:
                shape = list(values.shape)
                shape[self._axis] = int(count * _SPARE) + 1
                copy, first = torch.empty(shape, dtype=values.dtype, device="cpu"), 0
            self._rows(copy, first, count).copy_(self._rows(values, first, count))
            self._last[site] = (step, count, copy)
        return self._rows(values, size, count).contiguous().view(tensor.dtype) if size else None

    def _rows(self, tensor: Tensor, first: int, end: int) -> Tensor:
        return tensor.narrow(self._axis, first, end - first)
