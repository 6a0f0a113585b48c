"""Real float64: dtypes written into a graph (`.to(float32)`, `softmax(dtype=...)`) are retargeted."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import of_any_layout, op_name

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
CHECKED = frozenset({"_weight_norm"})
"""Ops whose arguments are checked before they are called."""


def double(value: torch.Tensor) -> torch.Tensor:
    """Return floating tensors in float64, complex ones of two such, others as they are."""
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


def retarget(value: Any) -> Any:
    """Make one argument of a node float64: tensors, and dtypes written into the graph."""
    if isinstance(value, torch.Tensor):
        return double(value)
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _FLOATS else torch.complex128 if value is torch.complex64 else value
    return value


def retargeted(arguments: Any) -> Any:
    """Make what a node holds, or is called with, float64; walked in C++, which is forty times as fast as pytree."""
    return map_aggregate(arguments, retarget)


def target_of(node: Node) -> Any:
    """Return what to call for `node` in float64.

    Another kernel's memory layout may not allow a strict view, uninitialized memory is NaN, products of the
    rows of each expert with its matrix have no kernel in float64, and a weight norm does not look at what it is given.
    """
    if op_name(node) in CHECKED:
        return partial(_normed, node.target)
    if op_name(node) == "_grouped_mm":
        return partial(_grouped, node.target)
    return partial(_unwritten, node.target) if traits_of(node).is_unwritten else of_any_layout(node.target)


def _grouped(target: Any, rows: torch.Tensor, matrices: torch.Tensor, ends: Any = None, *rest: Any) -> torch.Tensor:
    """Multiply rows [T, I] by matrices [E, I, O]; expert e has the rows up to ends[e]."""
    if rows.dtype is not torch.float64 or ends is None or (rows.dim(), matrices.dim()) != (2, 3):
        result: torch.Tensor = target(rows, matrices, ends, *rest)
        return result
    result = rows.new_zeros(len(rows), matrices.shape[-1])
    start = 0
    for end, matrix in zip(ends.tolist(), matrices, strict=True):
        result[start:end] = rows[start:end] @ matrix
        start = end
    return result


def _normed(target: Any, v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """A weight norm whose kernel is asked only for sizes that fit: for others it writes where it should not."""
    if dim in (0, v.dim() - 1) and list(g.shape) != [v.shape[i] if i == dim else 1 for i in range(v.dim())]:
        raise ValueError(f"norms of shape {list(g.shape)} for a weight of shape {list(v.shape)} along {dim}")
    result: torch.Tensor = target(v, g, dim)
    return result


def _unwritten(target: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    value: torch.Tensor = target(*args, **kwargs)
    return value.fill_(math.nan) if value.is_floating_point() else value.zero_()
