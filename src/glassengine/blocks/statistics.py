"""Moments of a stream of float64 pieces, in bounded memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from glassengine.blocks.pieces import Stream, one_thread


@dataclass(frozen=True)
class Moments:
    """Counts and central moments of a stream; `min`, `max`, `mean` and `m2` are over its `num_finite` elements."""

    num_elements: int
    num_finite: int
    num_nan: int
    min: float
    max: float
    mean: float
    m2: float


@one_thread()
def moments(stream: Stream) -> Moments:
    """Return counts, extremes, mean and sum of squared deviations of `stream` in one pass."""
    num_elements = num_finite = num_nan = 0
    low, high, mean, m2 = math.inf, -math.inf, 0.0, 0.0
    for block in stream():
        num_elements += block.numel()
        block_sum = block.sum().item()
        if not math.isfinite(block_sum):
            num_nan += int(block.isnan().sum())
            block = block[block.isfinite()]
            block_sum = block.sum().item()
        count = block.numel()
        if count == 0:
            continue
        low, high = min(low, block.amin().item()), max(high, block.amax().item())
        # Chan's update: block moments are merged, so a large common offset does not cancel.
        block_mean = block_sum / count
        deviation = block - block_mean
        shift = block_mean - mean
        total = num_finite + count
        m2 += float(deviation.dot(deviation)) + shift * shift * num_finite * count / total
        mean += shift * count / total
        num_finite = total
    return Moments(num_elements, num_finite, num_nan, low, high, mean, m2)
