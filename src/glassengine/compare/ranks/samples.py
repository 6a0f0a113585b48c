"""Whether an arrangement of parts agrees with the whole, by a sample of its elements."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


Index = tuple["Tensor | None", ...]
"""For each dimension the positions in the whole; None for all of them."""


_NUM_SAMPLES = 256


_AGREES = 0.05
"""A part agrees with a place where, but for a factor, at most this fraction of it is not what is there."""


def sample_of(tensor: Tensor) -> Tensor:
    """Return some elements of a tensor, the same ones of every tensor of its shape."""
    return taken_at(tensor, sampled(tuple(tensor.shape), tuple(tensor.shape)))


def share_of_sample(part: Tensor, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a sample of `part` beside each place of `whole` where it may lie, if the shapes allow it."""
    shape = tuple(part.shape)
    if part.dim() != whole.dim() or any(p == 0 or w % p for p, w in zip(shape, whole.shape, strict=True)):
        return
    sample = sampled(shape, shape)
    own = taken_at(part, sample)
    counts = [w // p for p, w in zip(shape, whole.shape, strict=True)]
    for place in itertools.islice(itertools.product(*map(range, counts)), _NUM_SAMPLES):
        moved = tuple(x + at * p for x, at, p in zip(sample, place, shape, strict=True))
        yield own, taken_at(whole, moved)


def agreement(x: Tensor, y: Tensor) -> bool:
    """Return whether two samples agree but for a factor."""
    power = float(y.dot(y))
    if not math.isfinite(power) or not bool(x.isfinite().all()):
        return bool((x.nan_to_num() == y.nan_to_num()).all())
    factor = float(x.dot(y)) / power if power else 0.0
    return float((x - factor * y).norm()) <= _AGREES * float(x.norm()) and (factor > 0 or not power)


def factor_of(part: Tensor, reference: Tensor) -> float | None:
    """Return what number of times `reference` a part is, at a sample; None where it is no multiple of it."""
    sample = sampled(tuple(part.shape), tuple(reference.shape))
    x, y = taken_at(part, sample), taken_at(reference, sample)
    power = float(y.dot(y))
    if not power or not math.isfinite(power) or not agreement(x, y):
        return None
    return float(x.dot(y)) / power


@functools.lru_cache(maxsize=1024)
def sampled(shape: Shape, whole: Shape) -> tuple[Tensor, ...]:
    """Return the positions of some elements of a part; of a cache that is longer than the whole, of the first ones."""
    import torch

    sizes = [min(p, w) for p, w in zip(shape, whole, strict=True)]
    numel = math.prod(sizes)
    if numel <= _NUM_SAMPLES:
        at = torch.arange(numel)
    else:
        at = torch.randint(numel, (_NUM_SAMPLES,), generator=torch.Generator().manual_seed(0))
    found: list[Tensor] = []
    # torch.unravel_index imports sympy, which takes seconds.
    for size in reversed(sizes):
        found.insert(0, at % size)
        at = at // size
    return tuple(found)


def taken_at(tensor: Tensor, where: tuple[Tensor, ...]) -> Tensor:
    """Return the elements of `tensor` at some positions."""
    return tensor[where].double().reshape(-1)


def moved_by(sample: tuple[Tensor, ...], index: Index) -> tuple[Tensor, ...]:
    """Return positions of a part as positions of the whole."""
    return tuple(x if at is None else at[x] for x, at in zip(sample, index, strict=True))
