"""Arrangements: the same numbers with other dimensions, as programs of other layouts have them.

[B, C, H, W] and [B, H, W, C], tokens before rows, heads apart, beside each other or among the rows, a dimension of one
more: each is the other one split into parts, put into another order and merged. Sizes may change from step to step, so
an arrangement names parts, and takes their sizes from the two shapes when it is applied.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

Size = tuple[int, ...]
"""Of one dimension, in each step."""

_MOST = 24
"""Arrangements that are offered for two tensors."""
_MOST_SPLITS = 3


@dataclass(frozen=True)
class Arrangement:
    """How a tensor becomes one of other dimensions.

    Attributes:
        theirs: For each dimension of the tensor the parts that it consists of, outermost first; none for a size of one.
        ours: The same for each dimension of the result.
        sizes: Of the parts, where the shapes do not say: as they were when the arrangement was found.
    """

    theirs: tuple[tuple[int, ...], ...]
    ours: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]

    def apply(self, tensor: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """Return the tensor with the dimensions of the result.

        Args:
            tensor: Any tensor of such dimensions.
            shape: Of the result, where it is known.
        """
        sizes = self._sizes(tensor.shape, shape)
        if sizes is None:
            return tensor
        order = [part for parts in self.ours for part in parts]
        place = {part: i for i, part in enumerate(part for parts in self.theirs for part in parts)}
        apart = tensor.reshape([sizes[part] for parts in self.theirs for part in parts])
        moved = apart.permute([place[part] for part in order])
        return moved.reshape([math.prod(sizes[part] for part in parts) for parts in self.ours])

    def fits(self, theirs: Sequence[int], ours: Sequence[int]) -> bool:
        """Whether it makes a tensor of the shape `ours` of one of the shape `theirs`."""
        sizes = self._sizes(theirs, ours)
        return sizes is not None and [math.prod(sizes[part] for part in parts) for parts in self.ours] == list(ours)

    @property
    def inverse(self) -> Arrangement:
        """What undoes it."""
        return Arrangement(self.ours, self.theirs, self.sizes)

    @property
    def is_trivial(self) -> bool:
        """Whether the result is the tensor itself."""
        return self.theirs == self.ours

    def _sizes(self, theirs: Sequence[int], ours: Sequence[int] | None) -> list[int] | None:
        """Return the size of every part; None where the shapes are of another kind."""
        return _solved(self, tuple(theirs), None if ours is None else tuple(ours))


@functools.lru_cache(maxsize=65536)  # asked for again with every tensor of a shape
def _solved(how: Arrangement, theirs: tuple[int, ...], ours: tuple[int, ...] | None) -> list[int] | None:
    """Return the size of every part of an arrangement; None where the shapes are of another kind."""
    if len(theirs) != len(how.theirs) or (ours is not None and len(ours) != len(how.ours)):
        return None
    known: dict[int, int] = {}
    dims = [*zip(how.theirs, theirs, strict=True), *(zip(how.ours, ours, strict=True) if ours is not None else ())]
    waiting = sorted(dims, key=lambda dim: len(dim[0]))
    for fixed in (False, True):
        for _ in range(len(waiting)):
            for parts, size in waiting:
                unknown = [part for part in parts if part not in known]
                # Inner parts (of heads) are as they were sooner than outer ones (rows, tokens).
                while fixed and len(unknown) > 1:
                    part = unknown.pop()
                    known[part] = how.sizes[part]
                if len(unknown) == 1:
                    rest = math.prod(known[part] for part in parts if part in known)
                    known[unknown[0]] = size // rest if rest else 0
    if any(math.prod(known[part] for part in parts) != size for parts, size in dims):
        return None
    return [known[part] for part in range(len(how.sizes))]


def arrangements(theirs: Sequence[Size], ours: Sequence[Size]) -> Iterator[Arrangement]:
    """Yield how a tensor of the dimensions `theirs` may become one of `ours`, the likely ones first.

    Args:
        theirs: Size of each dimension in each step.
        ours: The same of the result.
    """
    left = [[(i, size)] if any(s != 1 for s in size) else [] for i, size in enumerate(theirs)]
    right = [[(i, size)] if any(s != 1 for s in size) else [] for i, size in enumerate(ours)]
    seen: set[Arrangement] = set()
    for split in _split([[s for _, s in dim] for dim in left], [[s for _, s in dim] for dim in right], _MOST_SPLITS):
        for found in _ordered(*split):
            if found not in seen:
                seen.add(found)
                yield found
            if len(seen) >= _MOST:
                return


_Dims = list[list[Size]]


def _split(left: _Dims, right: _Dims, most: int) -> Iterator[tuple[_Dims, _Dims]]:
    """Yield both with their dimensions split until they consist of the same parts."""
    apart = [_surplus(left, right), _surplus(right, left)]
    if not apart[0] and not apart[1]:
        yield left, right
        return
    if not most or not apart[0] or not apart[1]:
        return
    larger = max((size for side in apart for size in side), key=math.prod)
    which = 0 if larger in apart[0] else 1
    for smaller in dict.fromkeys(apart[1 - which]):
        rest = _divided(larger, smaller)
        if rest is None:
            continue
        for parts in ([smaller, rest], [rest, smaller]):
            sides = [left, right]
            sides[which] = _with_parts(sides[which], larger, parts)
            yield from _split(sides[0], sides[1], most - 1)


def _surplus(left: _Dims, right: _Dims) -> list[Size]:
    """Return the parts that `left` has more of than `right`."""
    others = [size for dim in right for size in dim]
    found = []
    for size in (size for dim in left for size in dim):
        if size in others:
            others.remove(size)
        else:
            found.append(size)
    return found


def _divided(larger: Size, smaller: Size) -> Size | None:
    if any(not b or a % b for a, b in zip(larger, smaller, strict=True)):
        return None
    rest = tuple(a // b for a, b in zip(larger, smaller, strict=True))
    return None if all(size == 1 for size in rest) else rest


def _with_parts(dims: _Dims, size: Size, parts: list[Size]) -> _Dims:
    """Return `dims` with the last part of this size split."""
    found = [list(dim) for dim in dims]
    for dim in reversed(found):
        if size in dim:
            place = dim.index(size)
            dim[place : place + 1] = parts
            return found
    return found


def _ordered(left: _Dims, right: _Dims) -> Iterator[Arrangement]:
    """Yield the ways in which the parts of `left` can be those of `right`: parts of one size go in either order."""
    ours = [size for dim in right for size in dim]
    theirs = [size for dim in left for size in dim]
    places: dict[Size, list[int]] = {}
    for place, size in enumerate(theirs):
        places.setdefault(size, []).append(place)
    sizes = tuple(size[0] for size in theirs)
    for orders in itertools.islice(itertools.product(*(itertools.permutations(p) for p in places.values())), _MOST):
        waiting = {size: list(order) for size, order in zip(places, orders, strict=True)}
        of = [waiting[size].pop(0) for size in ours]
        yield Arrangement(_grouped(left, range(len(theirs))), _grouped(right, of), sizes)


def _grouped(dims: _Dims, parts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    waiting = iter(parts)
    return tuple(tuple(next(waiting) for _ in dim) for dim in dims)
