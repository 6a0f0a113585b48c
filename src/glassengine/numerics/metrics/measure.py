"""How far one tensor is from another: pure functions of two arrays, accumulated in float64 or as good."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from glassengine import blocks
from glassengine.recording.layout.statistics import summarize, summarize_stream
from glassengine.results import Figures, Summary

__all__ = ["figures_of", "measure", "summarize", "summarize_errors"]


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


def figures_of(raw: blocks.Difference, shape: tuple[int, ...], *, rtol: float, atol: float) -> Figures:
    """Return the figures of two tensors of `shape` whose sums are known; see `measure`."""
    worst = None if raw.worst is None else tuple(int(i) for i in np.unravel_index(raw.worst, shape))
    return Figures(
        num_elements=raw.num_elements,
        num_different=raw.num_different,
        max_abs_diff=math.inf if raw.num_mismatched else raw.max_abs,
        mean_abs_diff=raw.sum_abs / max(raw.num_finite, 1),
        rms_diff=math.sqrt(raw.sum_squares / max(raw.num_finite, 1)),
        max_rel_diff=math.inf if raw.num_mismatched else raw.max_rel,
        mean_rel_diff=raw.sum_rel / max(raw.num_nonzero, 1),
        cosine_similarity=_cosine(raw),
        snr_db=_snr_db(raw),
        worst_index=worst,
        baseline_at_worst=raw.baseline_at_worst,
        candidate_at_worst=raw.candidate_at_worst,
        num_nonfinite_mismatch=raw.num_mismatched,
        num_beyond_tolerance=raw.num_beyond,
        rtol=rtol,
        atol=atol,
    )


def summarize_errors(
    baseline: Tensor, candidate: Tensor, *, device: str | torch.device = "cpu"
) -> tuple[Summary, Summary]:
    """Return the statistics of the errors: absolute, `|c - b|`, and relative, `|c - b| / |b|` where `b != 0`."""
    absolute, relative = (
        summarize_stream(
            blocks.error_stream(baseline, candidate, relative=relative, device=device),
            shape=tuple(baseline.shape),
            dtype="float64",
        )
        for relative in (False, True)
    )
    return absolute, relative


def _cosine(raw: blocks.Difference) -> float:
    if raw.num_different == 0 or raw.baseline_squares == raw.candidate_squares == 0:
        return 1.0
    if raw.baseline_squares == 0 or raw.candidate_squares == 0:
        return 0.0
    # The roots are taken one by one: the product of two sums of squares overflows long before the norms do.
    return max(-1.0, min(1.0, raw.dot / math.sqrt(raw.baseline_squares) / math.sqrt(raw.candidate_squares)))


def _snr_db(raw: blocks.Difference) -> float:
    if raw.sum_squares == 0:
        return math.inf
    if raw.baseline_squares == 0:
        return -math.inf
    return 10 * (math.log10(raw.baseline_squares) - math.log10(raw.sum_squares))
