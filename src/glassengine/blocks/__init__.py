"""One pass over one or two tensors, in blocks that fit a CPU cache.

`arithmetic` adds up how two arrays differ, in float64 or, where float32 holds the elements and the sums safely, in the
faster and equally good float32, and joins sums of parts; `arrays` has differences, statistics and medians of numpy
arrays without torch; `pieces` cuts tensors of torch and has their differences. Invariants: never more than
one piece per tensor is held besides the tensors, for any size and strides; every dtype that can be widened is allowed,
in any combination; empty tensors and non-finite elements have defined results.
"""

from typing import TYPE_CHECKING

from glassengine.deferred import deferred

if TYPE_CHECKING:
    from glassengine.blocks.arithmetic import RawDifference as RawDifference
    from glassengine.blocks.arithmetic import merged as merged
    from glassengine.blocks.pieces import BLOCK_ELEMENTS as BLOCK_ELEMENTS
    from glassengine.blocks.pieces import agree as agree
    from glassengine.blocks.pieces import blocks as blocks
    from glassengine.blocks.pieces import difference as difference
    from glassengine.blocks.pieces import flat as flat
    from glassengine.blocks.pieces import widen as widen

_PUBLIC = {
    "BLOCK_ELEMENTS": "glassengine.blocks.pieces",
    "RawDifference": "glassengine.blocks.arithmetic",
    "agree": "glassengine.blocks.pieces",
    "blocks": "glassengine.blocks.pieces",
    "difference": "glassengine.blocks.pieces",
    "flat": "glassengine.blocks.pieces",
    "merged": "glassengine.blocks.arithmetic",
    "widen": "glassengine.blocks.pieces",
}
__all__ = list(_PUBLIC)
__getattr__, __dir__ = deferred(__name__, _PUBLIC)
