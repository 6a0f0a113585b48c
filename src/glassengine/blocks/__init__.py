"""One pass over one or two tensors, in blocks that fit a CPU cache.

Pipeline: `pieces` cuts tensors of one shape into aligned flat pieces in row-major order and widens them; `totals` adds
up how two tensors differ, in float64 or, where float32 holds the elements and the sums safely, in the faster and
equally good `float32`; `statistics` has moments and the median of one stream. Invariants: never more than one piece
per tensor is held besides the tensors, for any size and strides; every dtype that can be widened is allowed, in
any combination; empty tensors and non-finite elements have defined results.
"""

from glassengine.blocks.pieces import BLOCK_ELEMENTS, Stream, agree, blocks, error_stream, flat, real_stream, widen
from glassengine.blocks.statistics import Moments, lower_median, moments
from glassengine.blocks.totals import Difference, difference, merged

__all__ = [
    "BLOCK_ELEMENTS",
    "Difference",
    "Moments",
    "Stream",
    "agree",
    "blocks",
    "difference",
    "error_stream",
    "flat",
    "lower_median",
    "merged",
    "moments",
    "real_stream",
    "widen",
]
