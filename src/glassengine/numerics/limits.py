"""The limits of floating dtypes by name, and values at these limits, which hide others; without torch."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from glassengine.blocks.arrays import Array, ArrayValues

if TYPE_CHECKING:
    import torch


class Limits(NamedTuple):
    """Of a floating dtype; of a complex one those of its parts.

    Attributes:
        eps: From 1 to the next number.
        tiny: The smallest normal number.
        largest: The largest number; infinity where it is larger than any number that is met.
    """

    eps: float
    tiny: float
    largest: float = math.inf


_FLOAT32, _FLOAT64 = Limits(2.0**-23, 2.0**-126), Limits(2.0**-52, 2.0**-1022)
_FLOAT16 = Limits(2.0**-10, 2.0**-14, 65504.0)
_LIMITS = {
    "float8_e4m3fn": Limits(2.0**-3, 2.0**-6, 448.0),
    "float8_e4m3fnuz": Limits(2.0**-3, 2.0**-7, 240.0),
    "float8_e5m2": Limits(2.0**-2, 2.0**-14, 57344.0),
    "float8_e5m2fnuz": Limits(2.0**-3, 2.0**-15, 57344.0),
    "float8_e8m0fnu": Limits(1.0, 2.0**-127),
    "bfloat16": Limits(2.0**-7, 2.0**-126),
    "float16": _FLOAT16,
    "float32": _FLOAT32,
    "float64": _FLOAT64,
    "complex32": _FLOAT16,
    "complex64": _FLOAT32,
    "complex128": _FLOAT64,
}


@functools.cache
def limits(dtype: torch.dtype | str) -> Limits:
    """Return the limits of a floating or complex dtype, or of the one of this name.

    Raises:
        TypeError: It is neither.
    """
    found = _LIMITS.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise TypeError(f"{dtype} has no limits: it is not floating")
    return found


def is_floating(dtype: str) -> bool:
    """Return whether the dtype of this name is a real floating one."""
    return dtype in _LIMITS and not dtype.startswith("complex")


HIDDEN = -9e3
"""Numbers from here down hide a slot: -1e4, as bfloat16 rounds it, is the least that anybody writes."""


_BEYOND_NUMBERS = 9e29
"""No activation is as large: -1e30, as bfloat16 rounds it, is written to hide."""
_SHARE_OF_LARGEST = 0.9
"""Of the largest number of a dtype of fewer: float16 holds activations of half of it, whose errors must be seen."""


@functools.cache
def sentinel(*dtypes: torch.dtype | str) -> float:
    """Return from which size on values are mask sentinels (finfo.min plus a score) in one of `dtypes`, not numbers."""
    known = (_LIMITS.get(str(dtype).removeprefix("torch.")) for dtype in dtypes)
    return min((min(_SHARE_OF_LARGEST * one.largest, _BEYOND_NUMBERS) for one in known if one), default=math.inf)


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
    if not x.array.size or x.array.min() > HIDDEN or y.array.min() > HIDDEN:  # neither is NaN
        return False
    return bool(((x.array <= HIDDEN) & (y.array <= HIDDEN)).any())


def _is_mask(value: Array) -> bool:
    if value.ndim < 2 or not value.size:
        return False
    is_zero_at_most = bool(value.max() == 0) and bool(value.min() <= HIDDEN)
    return is_zero_at_most and bool(((value == 0) | (value <= HIDDEN)).all())
