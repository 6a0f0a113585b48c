"""The figures of how far one tensor is from another, out of the sums of their difference: without any tensor."""

from __future__ import annotations

import math

import numpy as np

from glassengine.blocks.arithmetic import RawDifference
from glassengine.results import Figures


def figures_of(raw: RawDifference, shape: tuple[int, ...], *, rtol: float, atol: float) -> Figures:
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


def _cosine(raw: RawDifference) -> float:
    if raw.num_different == 0 or raw.baseline_squares == raw.candidate_squares == 0:
        return 1.0
    if raw.baseline_squares == 0 or raw.candidate_squares == 0:
        return 0.0
    # The roots are taken one by one: the product of two sums of squares overflows long before the norms do.
    return max(-1.0, min(1.0, raw.dot / math.sqrt(raw.baseline_squares) / math.sqrt(raw.candidate_squares)))


def _snr_db(raw: RawDifference) -> float:
    if raw.sum_squares == 0:
        return math.inf
    if raw.baseline_squares == 0:
        return -math.inf
    return 10 * (math.log10(raw.baseline_squares) - math.log10(raw.sum_squares))
