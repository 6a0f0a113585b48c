"""Values that hide (see `mask_values`) in two arrays of which nothing but their values is known; without torch."""

from __future__ import annotations

import numpy as np

from glassengine.blocks.arrays import Array, ArrayValues
from glassengine.numerics.limits import HIDDEN, is_floating, sentinel


def without_hidden(x: ArrayValues, y: ArrayValues) -> tuple[ArrayValues, ArrayValues] | None:
    """Return both with 0 where both hide; None where they do nowhere.

    A number hides in a mask, which holds zeros beside, or where it is the least of its own dtype.
    """
    if not (is_floating(x.dtype) and is_floating(y.dtype)) or x.array.shape != y.array.shape:
        return None
    lows = [HIDDEN, HIDDEN] if _is_mask(x.array) and _is_mask(y.array) else [-sentinel(x.dtype), -sentinel(y.dtype)]
    both = (x.array <= lows[0]) & (y.array <= lows[1])
    if not both.any():
        return None
    zero = np.zeros((), np.float16)
    return x._replace(array=np.where(both, zero, x.array)), y._replace(array=np.where(both, zero, y.array))


def both_may_hide(x: ArrayValues, y: ArrayValues) -> bool:
    """Whether `without_hidden` could change something, of tensors of which these are some rows."""
    if not (is_floating(x.dtype) and is_floating(y.dtype)):
        return False
    return bool(((x.array <= HIDDEN) & (y.array <= HIDDEN)).any())


def _is_mask(value: Array) -> bool:
    if value.ndim < 2 or not value.size:
        return False
    is_zero_at_most = bool(value.max() == 0) and bool(value.min() <= HIDDEN)
    return is_zero_at_most and bool(((value == 0) | (value <= HIDDEN)).all())
