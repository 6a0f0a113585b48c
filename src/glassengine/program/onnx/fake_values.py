"""Values of an ONNX graph without their data: dtypes, and sizes that may be symbols."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from glassengine.program.onnx.stored.types import UNKNOWN_SIZE, ValueType


class Fakes:
    """Makes tensors without data, whose dynamic sizes are symbols: one for each name."""

    def __init__(self) -> None:
        self._environment = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._environment)
        self._symbols: dict[str, Any] = {}

    def tensor(self, kind: ValueType | None) -> torch.Tensor:
        """Return a tensor of a type; one of float32 and no dimension where nothing is known."""
        dtype = (kind.dtype if kind is not None else None) or torch.float32
        sizes = [self._size(size) for size in (kind.shape if kind is not None else None) or ()]
        with self._mode:
            return torch.empty(sizes, dtype=dtype)

    def _size(self, size: int | str) -> Any:
        if isinstance(size, int):
            return size
        if size == UNKNOWN_SIZE or size not in self._symbols:
            symbol = self._environment.create_unbacked_symint()
            if size == UNKNOWN_SIZE:
                return symbol
            self._symbols[size] = symbol
        return self._symbols[size]
