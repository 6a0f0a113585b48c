"""Weights first: which parameters and buffers of the same name are not the same, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from glassengine.numerics.judgement import unit_roundoff
from glassengine.program.representation.program import Program
from glassengine.results import WeightsComparison

_PREFIX = "user."
_LOOSE = 8.0
"""Weights are the same up to so many roundings of the coarser dtype: an `inv_freq` computed in another order, say."""


def weights_of(program: Program) -> dict[str, torch.Tensor]:
    """Return the weights of a program by the user's own names."""
    names = program.weight_names()
    return {names[node].removeprefix(_PREFIX): tensor for node, tensor in program.weights().items()}


def compare_weights(baseline: Mapping[str, torch.Tensor], candidate: Mapping[str, Any]) -> WeightsComparison:
    """Compare weights by name. A transposed matrix (another layer class) is the same weight.

    Args:
        baseline: Name -> tensor.
        candidate: Name -> tensor; another floating dtype is fine.
    """
    both = [name for name in baseline if name in candidate]
    different = tuple(name for name in both if not _is_same(baseline[name], candidate[name]))
    return WeightsComparison(
        compared=len(both),
        different=different,
        only_baseline=tuple(name for name in baseline if name not in candidate),
        only_candidate=tuple(name for name in candidate if name not in baseline),
    )


def _is_same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.shape != theirs.shape and ours.shape != theirs.T.shape:
        return False
    views = [theirs] if ours.shape == theirs.shape else []
    if theirs.dim() == 2 and theirs.T.shape == ours.shape:
        views.append(theirs.T)
    return any(is_equal(ours, view) for view in views)


def is_equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors of one shape are the same up to a few roundings of the coarser dtype."""
    if not (ours.is_floating_point() and theirs.is_floating_point()):
        return torch.equal(ours, theirs)
    coarser = max((ours.dtype, theirs.dtype), key=unit_roundoff)
    a, b = ours.detach().to(coarser), theirs.detach().to(coarser)
    if torch.equal(a, b):
        return True
    wide, error = a.double(), (a.double() - b.double()).abs()
    return bool((error <= _LOOSE * unit_roundoff(coarser) * wide.abs()).all())
