"""Values that hide: what a mask holds where nothing is to be seen. All of Glass Engine takes them from here.

Implementations write minus infinity, the least number of a dtype (of float16, perhaps in a register of float32), or
-1e4, -1e9, -1e30; a score added to one of them, or two of them added, hide as well. A softmax makes the same of all. So
a value that hides is compared as that, not by its size, wherever a softmax is all that becomes of it (see
`judge.exclusions.hidden_values`); elsewhere only what is too large for a number (`sentinel`) is compared by its
kind. Whether a place is hidden is always compared.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

HIDDEN = -9e3
"""Numbers from here down hide a slot: -1e4, as bfloat16 rounds it, is the least that anybody writes."""


_BEYOND_NUMBERS = 9e29
"""No activation is as large: -1e30, as bfloat16 rounds it, is written to hide."""
_SHARE_OF_LARGEST = 0.9
"""Of the largest number of a dtype of fewer: float16 holds activations of half of it, whose errors must be seen."""


@functools.cache
def sentinel(*dtypes: torch.dtype) -> float:
    """Return from which size on values are mask sentinels (finfo.min plus a score) in one of `dtypes`, not numbers."""
    real = [dtype.to_real() if dtype.is_complex else dtype for dtype in dtypes]
    largest = [torch.finfo(dtype).max for dtype in real if dtype.is_floating_point]
    return min((min(_SHARE_OF_LARGEST * one, _BEYOND_NUMBERS) for one in largest), default=math.inf)


def kind_of(value: Tensor, limit: float) -> Tensor:
    """0 = NaN, 1 and -1 = infinite or sentinel with that sign."""
    return torch.where(value.isnan(), 0, torch.sign(torch.where(value.abs() >= limit, value, 0.0)))


def is_below(value: Tensor, limit: float) -> bool:
    """Whether every element is a number smaller than `limit`, in one pass."""
    low, high = torch.aminmax(value) if value.numel() else (0.0, 0.0)
    return bool(low > -limit) and bool(high < limit)


def is_mask(value: Tensor) -> bool:
    """Whether a tensor is a mask: of bools, or one to add to scores (0, and numbers that no score makes up for)."""
    if not value.is_floating_point():
        return value.dtype is torch.bool
    if value.dim() < 2 or not value.numel():
        return False
    low, high = torch.aminmax(value)
    return bool(high == 0) and bool(low <= HIDDEN) and bool(((value == 0) | (value <= HIDDEN)).all())


def seen_by(added: Tensor, seen: Tensor) -> Tensor:
    """Return where a mask that is added to scores lets something be seen; what is no such mask as it is.

    Without a number that hides, zeros are such a mask where the other side lets everything be seen, and numbers else.

    Args:
        added: Of any dtype.
        seen: Its counterpart, a mask of bools: what may be seen is True.
    """
    if not added.is_floating_point() or added.dim() < 2 or not added.numel():
        return added
    wide = added.float() if added.element_size() == 1 else added
    visible, hidden = wide == 0, wide <= HIDDEN
    is_added = bool((visible | hidden).all()) and bool(hidden.any() or seen.all())
    return visible if is_added else added


def without_hidden(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return two tensors of which nothing but their values is known with 0 where both hide; None where they do nowhere.

    A number hides in a mask, which holds zeros beside, or where it is the least of its own dtype.
    """
    if not x.is_floating_point() or not y.is_floating_point() or x.shape != y.shape:
        return None
    lows = [-sentinel(one.dtype) for one in (x, y)]
    # Kernels do not compare numbers of one byte.
    x, y = (one.float() if one.element_size() == 1 else one for one in (x, y))
    if is_mask(x) and is_mask(y):
        lows = [HIDDEN, HIDDEN]
    both = (x <= lows[0]) & (y <= lows[1])
    return (x.masked_fill(both, 0.0), y.masked_fill(both, 0.0)) if bool(both.any()) else None


def both_may_hide(x: Tensor, y: Tensor) -> bool:
    """Whether `without_hidden` could change something, of tensors of which these are some rows."""
    if not x.is_floating_point() or not y.is_floating_point():
        return False
    x, y = (one.float() if one.element_size() == 1 else one for one in (x, y))
    return bool(((x <= HIDDEN) & (y <= HIDDEN)).any())


def size_but_hidden(value: Tensor) -> Tensor:
    """|value|, where -inf hides what must not be chosen."""
    return torch.where(value.isinf(), value, value.abs())
