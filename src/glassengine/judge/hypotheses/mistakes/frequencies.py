"""Frequencies of positions: numbers that fall by one factor, from a base (the theta of a rotation)."""

from __future__ import annotations

from torch import Tensor

_LEAST = 3
_EVEN = 1e-5
"""Spread of the factors, as a share: as float32 rounds them."""


def base_of(value: Tensor) -> float | None:
    """Return the base of which n numbers (float64, in one axis) are powers -i / n; None where they are not."""
    flat = value.flatten()
    if flat.numel() < _LEAST or flat.numel() != max(value.shape) or bool((flat <= 0).any()):
        return None
    steps = flat[1:] / flat[:-1]
    if float(steps.std()) > _EVEN * float(steps.abs().mean()) or float(steps[0]) >= 1:
        return None
    return float(float(steps.mean()) ** -len(flat))


def of_another_base(here: float, there: float) -> str:
    """Return how the mistake is reported that a base is another one."""
    return f"base of the frequencies (theta): {here:.6g} here, {there:.6g} in the candidate"
