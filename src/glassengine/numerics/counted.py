"""Sums over the elements of a tensor that count: a mask says which, None means all."""

from __future__ import annotations

import math

import torch

from glassengine.blocks import agree


def is_finite(value: torch.Tensor) -> bool:
    """Whether a floating tensor holds numbers only; one pass and no mask for what does."""
    return math.isfinite(float(value.sum())) or bool(value.isfinite().all())


def same_where(candidate: torch.Tensor, native: torch.Tensor, valid: torch.Tensor | None) -> bool:
    """Whether two tensors are the same, NaN for NaN."""
    if torch.equal(candidate, native):
        return True
    if valid is None and is_finite(candidate):
        return False
    same = agree(candidate, native)
    return bool(same.all() if valid is None else (same | ~valid).all())


def mean_where(square: torch.Tensor, counted: torch.Tensor | None) -> float:
    """Return the mean."""
    if counted is None:
        return float(square.mean()) if square.numel() else 0.0
    number = int(counted.sum())
    return float(torch.where(counted, square, 0.0).sum()) / number if number else 0.0


def rms_where(error: torch.Tensor, counted: torch.Tensor | None) -> float:
    """Return the root of the mean square."""
    return float(mean_where(error.square(), counted) ** 0.5)
