"""Measures the distance between two tensors: pure functions of two arrays, accumulated in float64 or as good."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glassengine import blocks
from glassengine.numerics.slices import figures_of
from glassengine.results import Figures

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def measure(
    baseline: Tensor, candidate: Tensor, *, rtol: float, atol: float, device: str | torch.device = "cpu"
) -> Figures:
    """Return the figures of `candidate` against `baseline` in one bounded-memory pass.

    Counts, `max_abs_diff` and `worst_index` are exact, means and ratios good to 1e-6 (see `blocks.difference`). Means,
    cosine and SNR are over elements that are finite on both sides. When some element is finite on one side only (or
    the kinds of non-finite value differ), `max_abs_diff` and `max_rel_diff` are inf and `worst_index` is the first
    such element. Of complex tensors the magnitudes are given. Defined for the rest: nothing to compare or both sides
    zero: cosine 1; one side zero: cosine 0; no error: SNR inf; a zero baseline with an error: SNR -inf.

    Args:
        baseline: Any dtype and strides.
        candidate: Same shape; any dtype and strides.
        rtol: Relative tolerance behind `num_beyond_tolerance`.
        atol: Absolute tolerance behind `num_beyond_tolerance`.
        device: Where the arithmetic runs; it must know float64.

    Raises:
        ValueError: The shapes differ.
    """
    raw = blocks.difference(baseline, candidate, rtol=rtol, atol=atol, device=device)
    return figures_of(raw, tuple(baseline.shape), rtol=rtol, atol=atol)
