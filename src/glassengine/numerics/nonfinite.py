"""Non-finite values, and the ops that made them."""

from __future__ import annotations

import math
from typing import Any

import torch

from glassengine.numerics.counted import is_finite
from glassengine.numerics.ops import Operation
from glassengine.ops.row import Rounding


def is_broken(value: Any) -> bool:
    """Return whether there is a NaN or a positive infinity (masks hold negative ones)."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return False
    return not bool(value.amax() < math.inf)


def num_newly_broken(
    operation: Operation, candidate: torch.Tensor, unwritten: torch.Tensor | None, hidden: torch.Tensor | None = None
) -> int:
    """Return how many NaN and infinities the op made of finite inputs; padding counts: what comes later reads it.

    A row of padding that may see nothing has a softmax of its own in every kernel, and uninitialized memory
    holds anything.

    Args:
        operation: On finite inputs.
        candidate: What the candidate made of them.
        unwritten: Bool mask of the elements that depend on memory that nothing has written; None if there are none.
        hidden: Bool mask of those that hide a place, where minus infinity equals any number.
    """
    traits = operation.traits
    is_of_rows = traits.kind in ("softmax", "log_softmax") or traits.rounding is Rounding.ATTENTION
    if is_of_rows or is_finite(candidate):
        return 0
    largest = torch.finfo(candidate.dtype).max / 2
    broken = ~candidate.isfinite() & operation.exact.isfinite() & (operation.exact.abs() < largest)
    if hidden is not None:
        broken = broken & ~(hidden & (candidate < 0))
    return int((broken if unwritten is None else broken & ~unwritten).sum())
