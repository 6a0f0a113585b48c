"""Moments and the median of a stream of float64 pieces, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from glassengine.blocks.pieces import Stream, one_thread

# Up to this many float64 values (8 MiB) are gathered to select a median; beyond, histograms narrow the search first.
_SELECT_ELEMENTS = 1 << 20


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
        m2 += float(torch.dot(deviation, deviation)) + shift * shift * num_finite * count / total
        mean += shift * count / total
        num_finite = total
    return Moments(num_elements, num_finite, num_nan, low, high, mean, m2)


@one_thread()
def lower_median(stream: Stream, num_finite: int) -> float:
    """Return the exact lower median of the finite elements of `stream`, in bounded memory.

    The convention is that of `torch.median`: an element of the tensor, never an average of two.

    Args:
        stream: The pieces; read once when small, up to five times when large.
        num_finite: How many finite elements it has, at least 1.
    """
    rank = (num_finite - 1) // 2
    prefix, shift, count = 0, 64, num_finite
    while count > _SELECT_ELEMENTS and shift > 0:
        # Radix selection: each pass fixes 16 more bits of the answer's key.
        shift -= 16
        histogram = torch.zeros(1 << 16, dtype=torch.int64)
        for _, keys in _keys_below(stream, prefix, shift + 16):
            histogram += torch.bincount((keys >> shift) & 0xFFFF, minlength=1 << 16).cpu()
        cumulative = histogram.cumsum(0)
        digit = int(torch.searchsorted(cumulative, rank, right=True))
        count = int(histogram[digit])
        rank -= int(cumulative[digit]) - count
        prefix = (prefix << 16) | digit
    if shift == 0:
        key = torch.tensor(prefix - (1 << 64) if prefix >= 1 << 63 else prefix, dtype=torch.int64)
        return float(_flip(key ^ torch.iinfo(torch.int64).min).view(torch.float64))
    kept = torch.cat([values for values, _ in _keys_below(stream, prefix, shift)])
    return float(kept.kthvalue(rank + 1).values)


def _flip(bits: Tensor) -> Tensor:
    """Map float64 bits to int64 keys in the order of the values; its own inverse."""
    return bits ^ ((bits >> 63) & torch.iinfo(torch.int64).max)


def _keys_below(stream: Stream, prefix: int, shift: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the finite values whose key starts with `prefix` (all bits above `shift`), and their keys."""
    for block in stream():
        values = block if math.isfinite(block.sum().item()) else block[block.isfinite()]
        # With the sign bit inverted the keys are unsigned: digits of 16 bits count up from the smallest value.
        keys = _flip(values.view(torch.int64)) ^ torch.iinfo(torch.int64).min
        if shift < 64:
            wanted = ((keys >> shift) & ((1 << (64 - shift)) - 1)) == prefix
            values, keys = values[wanted], keys[wanted]
        yield values, keys
