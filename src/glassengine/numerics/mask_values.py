"""Values that hide: what a mask holds where nothing is to be seen. All of Glass Engine takes them from here.

Implementations write minus infinity, the least number of a dtype (of float16, perhaps in a register of float32), or
-1e4, -1e9, -1e30; a score added to one of them, or two of them added, hide as well. A softmax makes the same of all. So
a value that hides is compared as that, not by its size, wherever a softmax is all that becomes of it (see
`judge.exclusions.masked`); elsewhere only what is too large for a number (`sentinel`) is compared by its
kind. Whether a place is hidden is always compared.

Sums over the elements of a tensor that count: a mask says which, None means all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glassengine.blocks import agree
from glassengine.numerics.limits import HIDDEN as HIDDEN
from glassengine.numerics.limits import sentinel as sentinel


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


def size_but_hidden(value: Tensor) -> Tensor:
    """|value|, where -inf hides what must not be chosen."""
    return torch.where(value.isinf(), value, value.abs())


def is_finite(value: torch.Tensor) -> bool:
    """Whether a floating or complex tensor holds numbers only; one pass and no mask for what does."""
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


def same_where(candidate: torch.Tensor, native: torch.Tensor, valid: torch.Tensor | None) -> bool:
    """Whether two tensors are the same, NaN for NaN."""
    if torch.equal(candidate, native):
        return True
    if valid is None and is_finite(candidate):
        return False
    same = agree(candidate, native)
    return bool(same.all() if valid is None else (same | ~valid).all())


def mean_where(square: torch.Tensor, counted: torch.Tensor | None) -> float:
    """Return the mean."""
    if counted is None:
        return float(square.mean()) if square.numel() else 0.0
    number = int(counted.sum())
    return float(torch.where(counted, square, 0.0).sum()) / number if number else 0.0
