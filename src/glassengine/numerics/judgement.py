"""The judgment of one tensor, and the limits between verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from glassengine.numerics.limits import limits
from glassengine.results import Verdict

if TYPE_CHECKING:
    import torch

SUSPICIOUS = 4.0


WRONG = 8.0


# Of an error that one op introduced, where a rounding bound must agree (a bound ratio above 1).
INTRODUCED_SUSPICIOUS = 2.0


INTRODUCED_WRONG = 10.0


UNBOUNDED_WRONG = 1000.0
"""Of an op without a rounding bound the floor alone decides from here on, see `docs/decisions`."""


_FLUSHED = ("bfloat16", "float32", "float64")
"""Dtypes whose numbers below the smallest normal one processors may take for 0."""


def unit_roundoff(dtype: torch.dtype | str) -> float:
    """Return the unit roundoff u of a floating dtype (half its machine epsilon), or of the one of this name."""
    return limits(dtype).eps / 2


def smallest_precise(dtype: torch.dtype | str) -> float:
    """Return the largest error of rounding to a floating dtype near zero: half a step, or all that may be flushed."""
    tiny = limits(dtype).tiny
    return tiny if str(dtype).removeprefix("torch.") in _FLUSHED else tiny * unit_roundoff(dtype)


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
