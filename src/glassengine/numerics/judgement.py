"""The judgment of one tensor, and the limits between verdicts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glassengine.results import Verdict

SUSPICIOUS = 4.0


WRONG = 8.0


# Of an error that one op introduced, where a rounding bound must agree (a bound ratio above 1).
INTRODUCED_SUSPICIOUS = 2.0


INTRODUCED_WRONG = 10.0


UNBOUNDED_WRONG = 1000.0
"""Of an op without a rounding bound the floor alone decides from here on, see `docs/decisions`."""


_FLUSHED = (torch.bfloat16, torch.float32, torch.float64)
"""Dtypes whose numbers below the smallest normal one processors may take for 0."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the unit roundoff u of a floating dtype (half its machine epsilon)."""
    return torch.finfo(dtype).eps / 2


def smallest_precise(dtype: torch.dtype) -> float:
    """Return the largest error of rounding to a floating dtype near zero: half a step, or all that may be flushed."""
    limits = torch.finfo(dtype)
    return limits.tiny if dtype in _FLUSHED else limits.tiny * unit_roundoff(dtype)


def relative_from(dtype: torch.dtype) -> float:
    """Return from which size on errors of rounding to a floating dtype are relative; below, `smallest_precise`."""
    return smallest_precise(dtype) / unit_roundoff(dtype)


@dataclass(frozen=True)
class Judgement:
    """Verdict on one tensor.

    Attributes:
        verdict: The verdict.
        noise_ratio: Error over the noise floor, in the worst slice.
        rms_error: Of the elements that count.
        reason: Set when something other than the two ratios decided.
        bound_ratio: Error over the rounding bound, of the worst element; None where no bound was asked for or is known.
        is_tie: The op chose otherwise among values that differ by less than rounding.
        is_empty: No element counted: all are left out, and the tensor was not judged.
    """

    verdict: Verdict
    noise_ratio: float | None
    rms_error: float | None
    reason: str | None = None
    bound_ratio: float | None = None
    is_tie: bool = False
    is_empty: bool = False
