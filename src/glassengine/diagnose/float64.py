"""Real float64: dtypes written into a graph (`.to(float32)`, `softmax(dtype=...)`) are retargeted."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def double(value: torch.Tensor) -> torch.Tensor:
    """Return floating tensors in float64, others as they are."""
    return value.double() if value.is_floating_point() else value


def retarget(value: Any) -> Any:
    """Make one argument of a node float64: tensors, and dtypes written into the graph."""
    if isinstance(value, torch.Tensor):
        return double(value)
    return torch.float64 if isinstance(value, torch.dtype) and value in _FLOATS else value


def target_of(node: Node) -> Any:
    """Return what to call for `node` in float64: another kernel's memory layout may not allow a strict view."""
    return torch.ops.aten.reshape.default if node.target is torch.ops.aten.view.default else node.target
