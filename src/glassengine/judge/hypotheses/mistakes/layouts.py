"""Axes in another order: heads and their parts, halves against neighbors, parts of what was taken apart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Call, Edit
from glassengine.ops.traits import traits_of
from glassengine.results import Kind

_MOST_FACTORS = 4
_MOST_PERMUTED = 512
_ROUNDS = 64


def reshaped(question: Question) -> Iterator[Hypothesis]:
    """Yield: what one axis is made of is taken, or put together, in another order (heads by their width)."""
    for node in reversed(question.trial.ops):
        given = question.trial.values.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        made = question.trial.values[node]
        if (
            traits_of(node).kind != "reshape"
            or not isinstance(given, torch.Tensor)
            or not isinstance(made, torch.Tensor)
        ):
            continue
        split, merged = meeting(given.shape, made.shape), meeting(made.shape, given.shape)
        for axis, _, parts in factored(split, made.shape):
            for order in _orders(parts):
                yield Hypothesis(
                    "permuted", _apart(parts, order), {node: _split_as(split, axis, parts, order, made.shape)}
                )
        for _, first, parts in factored(merged, given.shape):
            for order in _orders(parts):
                yield Hypothesis("permuted", _together(parts, order), {node: _merged_as(first, order, made.shape)})


def meeting(joined: Sequence[int], parted: Sequence[int]) -> tuple[int, ...]:
    """Return the shape `joined` with axes put together that are one in `parted`: of [2, 3, 8] for [6, 2, 4], [6, 8]."""
    found: list[int] = []
    i = j = 0
    while i < len(joined) and j < len(parted):
        first, (here, there) = i, (joined[i], parted[j])
        i, start, j = i + 1, j, j + 1
        while here != there:
            if here < there and i < len(joined):
                here, i = here * joined[i], i + 1
            elif there < here and j < len(parted):
                there, j = there * parted[j], j + 1
            else:
                return tuple(joined)
        found += [here] if j - start == 1 else joined[first:i]
    return (*found, *joined[i:])


def factored(joined: Sequence[int], parted: Sequence[int]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield (axis of `joined`, first axis of `parted`, sizes there) for each axis that is several in `parted`."""
    place = 0
    for axis, size in enumerate(joined):
        start = place
        while place < len(parted) and (place == start or math.prod(parted[start:place]) < size):
            place += 1
        parts = tuple(parted[start:place])
        if math.prod(parts) != size:
            return
        if sum(part > 1 for part in parts) > 1 and len(parts) <= _MOST_FACTORS:
            yield axis, start, parts


def _orders(parts: Sequence[int]) -> list[tuple[int, ...]]:
    return [order for order in itertools.permutations(range(len(parts))) if list(order) != sorted(order)]


def _split_as(
    joined: Sequence[int], axis: int, parts: Sequence[int], order: Sequence[int], shape: Sequence[int]
) -> Edit:
    def edit(call: Call) -> Any:
        given = call.args[0].reshape(joined)
        apart = given.reshape(*given.shape[:axis], *(parts[i] for i in order), *given.shape[axis + 1 :])
        back = [axis + list(order).index(i) for i in range(len(parts))]
        axes = [*range(axis), *back, *range(axis + len(parts), apart.dim())]
        return apart.permute(axes).reshape(shape)

    return edit


def _merged_as(first: int, order: Sequence[int], shape: Sequence[int]) -> Edit:
    def edit(call: Call) -> Any:
        value = call.args[0]
        axes = [*range(first), *(first + i for i in order), *range(first + len(order), value.dim())]
        return value.permute(axes).reshape(shape)

    return edit


def _apart(parts: Sequence[int], order: Sequence[int]) -> str:
    return f"an axis is taken apart as {_in_words(parts, order)}"


def _together(parts: Sequence[int], order: Sequence[int]) -> str:
    return f"axes are put together as {_in_words(parts, order)}"


def _in_words(parts: Sequence[int], order: Sequence[int]) -> str:
    here, there = (" x ".join(map(str, sizes)) for sizes in (parts, [parts[i] for i in order]))
    if here == there:
        return f"{here} in another order: rows and columns are exchanged, or heads are interleaved"
    return f"{there} in the candidate, as {here} here: heads are interleaved"


def neighbors(question: Question) -> Iterator[Hypothesis]:
    """Yield: an op over halves of an axis (a rotation) takes neighbors, or the other way round."""
    trial = question.trial
    for node in reversed(trial.ops):
        made = trial.values[node]
        if not isinstance(made, torch.Tensor) or not made.is_floating_point() or not made.dim() or made.shape[-1] % 2:
            continue
        if made.shape[-1] < 4:
            continue
        size = made.shape[-1]
        for source in [*trial.inputs, *trial.ops]:
            if source is node:
                break
            given = trial.values[source]
            if not isinstance(given, torch.Tensor) or given.shape != made.shape or not given.is_floating_point():
                continue
            for text, order in _interleavings(size):
                changed = trial.changed_between(source, given[..., order], node)
                if changed is not None and changed.shape == made.shape:
                    yield Hypothesis("position", text, {node: _value(changed[..., torch.argsort(order)])})


def _interleavings(size: int) -> list[tuple[str, torch.Tensor]]:
    half = torch.arange(size).reshape(2, size // 2)
    apart = torch.arange(size).reshape(size // 2, 2).T.reshape(-1)
    return [
        ("pairs of neighbors are rotated in the candidate, halves here (interleaved)", apart),
        ("halves are rotated in the candidate, pairs of neighbors here (interleaved)", half.T.reshape(-1)),
    ]


def permuted_operands(question: Question) -> Iterator[Hypothesis]:
    """Yield: halves of an operand, or of each of its heads, are exchanged with neighbors or each other."""
    trial = question.trial
    for node in trial.inputs:
        value = trial.values[node]
        if not isinstance(value, torch.Tensor):
            continue
        for axis in range(value.dim()):
            size = value.shape[axis]
            if size < 4 or (size % 2 and size % 3):
                continue
            for text, order in orders_of(size):
                edit = _value(value.index_select(axis, order))
                yield Hypothesis("permuted", f"{question.label(node)}: {text} (axis {axis})", {node: edit}, axis=axis)


def orders_of(size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (what it is called, order) of the orders in which people lay out an axis of even size, by heads too.

    An axis that three divides may hold queries, keys and values.
    """
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
    size = ours.shape[axis]
    if ours.shape != theirs.shape or size < 2 or size > _MOST_PERMUTED * 16:
        return None
    a, b = (t.movedim(axis, 0).reshape(size, -1) for t in (ours, theirs))
    if not bool(a.isfinite().all() and b.isfinite().all()):
        return None
    generator = torch.Generator().manual_seed(0)
    ray = torch.randn(a.shape[1], generator=generator, dtype=torch.float64)
    one, other = (a @ ray).sort(), (b @ ray).sort()
    order = torch.empty(size, dtype=torch.long)
    order[other.indices] = one.indices
    scale = float(a.square().mean().sqrt())
    error = float((a[order] - b).square().mean().sqrt())
    is_moved = not torch.equal(order, torch.arange(size))
    return order if is_moved and error <= tolerance * max(scale, 1e-300) else None


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


def _value(value: Any) -> Edit:
    return lambda call: value
