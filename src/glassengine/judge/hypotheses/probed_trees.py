"""Trees of both sides on values around all their thresholds: the inputs of a check reach few of the leaves."""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.errors import BackendError
from glassengine.program.onnx.operators.fallback import thresholds_of

_ROWS = 1024
_APART = 1e-3
"""Relative distance of the values on both sides of a threshold from it."""
_SAME = 1e-5


def trees_differ(ours: Node, theirs: Node) -> str | None:
    """Return what to say of two calls of trees that make different results of some values; None where none do.

    Args:
        ours: Of the baseline.
        theirs: Its counterpart.
    """
    known = thresholds_of(ours.target), thresholds_of(theirs.target)
    if known[0] is None or known[1] is None or not known[0] or not known[1]:
        return None
    probe = _around([*known[0], *known[1]])
    calls = [(node.target, dict(node.kwargs)) for node in (ours, theirs)]
    try:
        found = [pytree.tree_leaves(target(probe, **kwargs)) for target, kwargs in calls]  # type: ignore[operator]
    except (BackendError, RuntimeError, ValueError, IndexError):
        return None
    for one, other in zip(*found, strict=False):
        is_number = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.is_floating_point()
        if not is_number:
            continue  # of labels two may have as many votes
        rows = len(probe)
        if one.shape == other.shape:
            apart = (one.double() - other.double()).abs().reshape(len(probe), -1).amax(1)
            rows = int((apart > _SAME * max(float(one.double().abs().max()), 1e-30)).sum())
        if rows:
            return f"the trees differ: {rows} of {len(probe)} rows around their thresholds end in another leaf"
    return None


def _around(thresholds: list[tuple[int, float]]) -> torch.Tensor:
    """Return rows whose values are a little below or above thresholds of their features."""
    generator = torch.Generator().manual_seed(0)
    width = max(feature for feature, _ in thresholds) + 1
    columns = []
    for feature in range(width):
        own = [value for other, value in thresholds if other == feature] or [0.0]
        values = torch.tensor(own)[torch.randint(len(own), (_ROWS,), generator=generator)]
        sign = torch.randint(2, (_ROWS,), generator=generator) * 2.0 - 1
        columns.append(values + sign * _APART * values.abs().clamp(min=1e-2))
    return torch.stack(columns, 1)
