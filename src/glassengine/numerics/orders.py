"""Slices of a tensor in another order: which order it is, and what people call it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from glassengine.blocks.arrays import Array
from glassengine.results import Kind

if TYPE_CHECKING:
    import torch

_MOST_SLICES = 8192


def orders_of(size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (what it is called, order) of the orders in which people lay out an axis of even size, by heads too.

    An axis that three divides may hold queries, keys and values.
    """
    import torch

    every = torch.arange(size)
    for a, b in ((0, 1), (1, 2), (0, 2)) if size % 3 == 0 and size > 3 else ():
        thirds = [0, 1, 2]
        thirds[a], thirds[b] = b, a
        yield f"thirds {a} and {b} are exchanged", every.reshape(3, -1)[thirds].reshape(-1)
    if size % 2:
        return
    yield "halves are exchanged", every.roll(size // 2)
    blocks = [width for width in (2**i for i in range(2, 11)) if size % width == 0 and width < size]
    for width in [size, *reversed(blocks)]:
        heads = every.reshape(-1, width)
        of = "" if width == size else f" of heads of {width}"
        yield f"interleaved halves{of}", heads.reshape(-1, 2, width // 2).transpose(1, 2).reshape(-1)
        yield f"halves that were interleaved{of}", heads.reshape(-1, width // 2, 2).transpose(1, 2).reshape(-1)
        if width < size:
            yield f"halves of heads of {width} are exchanged", heads.roll(width // 2, 1).reshape(-1)
            many = size // width
            yield f"{many} x {width} transposed (heads of {width}, or patches, interleaved)", heads.T.reshape(-1)
            if many != width:
                other = every.reshape(width, many).T.reshape(-1)
                yield f"{width} x {many} transposed ({width} heads, or patches, interleaved)", other


def order_between(ours: torch.Tensor, theirs: torch.Tensor, axis: int, tolerance: float) -> torch.Tensor | None:
    """Return the order in which `theirs` has the slices of `ours` along an axis; None where it has others.

    Args:
        ours: float64.
        theirs: float64, of the same shape.
        axis: Along which slices are looked for.
        tolerance: By how much two equal slices may differ, relative to the size of all.
    """
    import torch

    order = order_of_slices(ours.numpy(force=True), theirs.numpy(force=True), axis, tolerance)
    return None if order is None else torch.from_numpy(order)


def order_of_slices(ours: Array, theirs: Array, axis: int, tolerance: float) -> Array | None:
    """Do what `order_between` does, without torch."""
    size = ours.shape[axis]
    if ours.shape != theirs.shape or size < 2 or size > _MOST_SLICES:
        return None
    a, b = (np.moveaxis(side, axis, 0).reshape(size, -1) for side in (ours, theirs))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    ray = np.random.default_rng(0).standard_normal(a.shape[1])
    order = np.empty(size, np.int64)
    order[np.argsort(b @ ray, kind="stable")] = np.argsort(a @ ray, kind="stable")
    if np.array_equal(order, np.arange(size)):
        return None
    scale, error = (math.sqrt(float(np.square(one).mean())) for one in (a, a[order] - b))
    return order if error <= tolerance * max(scale, 1e-300) else None


def kind_of_shift(rank: int, axis: int, *, is_weight: bool) -> Kind:
    """Return the kind of mistake that it is to move a tensor along an axis: of positions, or of heads and rows.

    Args:
        rank: Number of dimensions: [rows, heads, positions, width], [rows, positions, width], [rows, positions].
        axis: Along which it is moved.
        is_weight: A table of positions, or a kernel.
    """
    is_of_rows = not is_weight and ((rank >= 3 and axis == 0) or (rank == 4 and axis == 1))
    return "permuted" if is_of_rows else "position"


def called(order: torch.Tensor) -> tuple[Kind, str]:
    """Return (kind, what an order of slices is called)."""
    import torch

    size = len(order)
    every = torch.arange(size)
    if torch.equal(order, every.flip(0)):
        return "permuted", "in reverse order"
    moved = int(order[0])
    if torch.equal(order, every.roll(-moved)):
        by = moved if moved <= size // 2 else moved - size
        if size % 2 == 0 and abs(by) == size // 2:
            return "permuted", "with its halves exchanged"
        return ("position" if abs(by) == 1 else "permuted"), f"moved by {-by}"
    if size % 2 == 0:
        for text, known in orders_of(size):
            if torch.equal(order, known):
                return "permuted", f"in another order: {text}"
    starts = (order[1:] != order[:-1] + 1).nonzero().flatten() + 1
    # Two blocks that stay together are two all the same.
    width = math.gcd(*torch.diff(torch.tensor([0, *starts.tolist(), size])).tolist())
    if 1 < width < size:
        blocks = [int(order[i]) // width for i in range(0, size, width)]
        shown = str(blocks) if len(blocks) <= 8 else "another order"
        return "permuted", f"in another order: blocks of {width} as {shown}"
    moved_places = (order != every).nonzero().flatten().tolist()
    if len(moved_places) == 2:
        return "permuted", f"with {moved_places[0]} and {moved_places[1]} exchanged"
    return "permuted", "in another order"
