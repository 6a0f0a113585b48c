"""Says in words which elements of a tensor are meant."""

from __future__ import annotations

import itertools

from torch import Tensor

_AXES = {1: ("elements",), 2: ("rows", "columns")}


def described(mask: Tensor) -> str:
    """Return which elements of a bool mask are set: "all", "the last 3 columns", "rows 64 to 99 of axis 1"."""
    if not mask.dim() or bool(mask.all()):
        return "all elements"
    if not bool(mask.any()):
        return "no elements"
    parts = []
    for axis in reversed(range(mask.dim())):
        others = [i for i in range(mask.dim()) if i != axis]
        hit = mask.any(others) if others else mask
        if hit.shape[0] > 1 and not bool(hit.all()):
            parts.append(_along(hit, axis, mask.dim()))
    share = int(mask.sum()) / mask.numel()
    if not parts:
        triangle = _triangle(mask)
        return triangle or f"{_number(share)} of the elements"
    return ", ".join(parts)


def _along(hit: Tensor, axis: int, rank: int) -> str:
    names = _AXES.get(rank)
    called = names[axis] if names else f"indices of axis {axis}" if axis < rank - 1 else "columns"
    size, places = hit.shape[0], hit.nonzero().flatten().tolist()
    first, last, count = places[0], places[-1], len(places)
    if count == last - first + 1:
        one = called.removesuffix("s") if called != "indices of axis" else called
        if last == size - 1:
            return f"the last {count} {called}" if count > 1 else f"the last of {size} {called}"
        if first == 0:
            return f"the first {count} {called}" if count > 1 else f"the first of {size} {called}"
        return f"{called} {first} to {last}" if count > 1 else f"{one} {first} of {size}"
    steps = {b - a for a, b in itertools.pairwise(places)}
    if len(steps) == 1 and count > 2:
        return f"every {_ordinal(steps.pop())} of the {called}, from {first} on"
    few = ", ".join(map(str, places[:6])) + (", ..." if count > 6 else "")
    return f"{count} of {size} {called} ({few})"


def _triangle(mask: Tensor) -> str | None:
    """Return which triangle or diagonal of its last two axes a mask is."""
    if mask.dim() < 2 or mask.shape[-1] < 2 or mask.shape[-2] < 2:
        return None
    flat = mask.reshape(-1, *mask.shape[-2:])
    rows, columns = flat.any(0).nonzero(as_tuple=True)
    offsets = columns - rows
    low, high = int(offsets.min()), int(offsets.max())
    if low == high:
        return "the diagonal" if not low else f"the diagonal {abs(low)} {'above' if low > 0 else 'below'} the main one"
    if low > 0:
        return "the upper triangle"
    return "the lower triangle" if high < 0 else None


def _number(share: float) -> str:
    return f"{100 * share:.2g} %"


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")
