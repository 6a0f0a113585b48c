"""A tensor of any size in a few numbers that can be compared with those of another: where its values lie, and which.

The quantiles do not depend on the order of the elements: another layout of the same values has the same. The projection
does, and its differences estimate those of tensors of one size: the expectation of `|p - q|^2` is `|x - y|^2`. Both are
the same on every machine: what is random in them comes from a hash of the position in row-major order.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from glassengine import blocks
from glassengine.blocks.pieces import one_thread

if TYPE_CHECKING:
    from torch import Tensor

NUM_QUANTILES = 33
LENGTH = 32
"""Numbers of a projection; a power of two."""

_SEED = 0x9E3779B97F4A7C15
_MAX_SAMPLED = 1 << 18

_Floats = np.typing.NDArray[np.float64]


@dataclass(frozen=True)
class Sketch:
    """What stands for a tensor where its values are too many.

    Attributes:
        quantiles: `NUM_QUANTILES` elements at equal distances of rank, from the smallest to the largest, of a sample of
            the finite ones; empty where there are none.
        projection: `LENGTH` sums of the finite elements, each in one of them and with a sign.
        num_sampled: Elements in the sample: all finite ones of a small tensor, of a large one those at equal distances.
    """

    quantiles: tuple[float, ...]
    projection: tuple[float, ...]
    num_sampled: int


def sketch(tensor: Tensor) -> Sketch:
    """Return the sketch of `tensor`, computed in float64 block by block; complex elements count by their magnitude.

    Args:
        tensor: Any shape, strides and dtype that can be converted to float64.
    """
    every = max(1, math.ceil(tensor.numel() / _MAX_SAMPLED))
    sample = []
    projection = np.zeros(LENGTH)
    with one_thread(), np.errstate(all="ignore"):
        for start, (piece,) in blocks.blocks(tensor):
            wide = blocks.widen(piece)
            values: _Floats = (wide.abs() if wide.is_complex() else wide).numpy()
            is_finite = np.isfinite(values)
            first = -start % every
            sample.append(values[first::every][is_finite[first::every]])
            places, signs = _places(start, len(values)) if start else _first_places(len(values))
            projection += np.bincount(places, np.where(is_finite, values, 0.0) * signs, LENGTH)
    sampled = np.sort(np.concatenate(sample)) if sample else np.zeros(0)
    ranks = np.arange(NUM_QUANTILES) * (len(sampled) - 1) // (NUM_QUANTILES - 1)
    quantiles = sampled[ranks].tolist() if len(sampled) else []
    # Sums of the largest numbers there are may be none.
    return Sketch(tuple(quantiles), tuple(np.nan_to_num(projection).tolist()), len(sampled))


@functools.lru_cache(maxsize=16)
def _first_places(count: int) -> tuple[np.typing.NDArray[np.int64], _Floats]:
    return _places(0, count)


def _places(start: int, count: int) -> tuple[np.typing.NDArray[np.int64], _Floats]:
    """Return, for each position from `start` on, the sum it belongs to and its sign."""
    # The finaliser of splitmix64: every bit of the position changes half of the result.
    bits = np.arange(start + 1, start + 1 + count, dtype=np.uint64) * np.uint64(_SEED)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    signs = np.where(bits & np.uint64(LENGTH), 1.0, -1.0)
    return (bits & np.uint64(LENGTH - 1)).astype(np.int64), signs
