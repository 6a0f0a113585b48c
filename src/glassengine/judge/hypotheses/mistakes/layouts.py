"""Axes in another order: heads and their parts, halves against neighbors, queries beside keys and values."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.hypotheses.mistakes.tensor_roles import heads_or_parts, is_of_places, turned_by
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, called
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Edit, TrialCall
from glassengine.judge.site_pairs import ancestors, argument_names, down, passes_on, walk
from glassengine.numerics.float64 import is_real
from glassengine.numerics.orders import orders_of
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind

_MOST_FACTORS = 4
_PARTS = (3, 2)
"""What one product makes at once for each head: queries, keys and values, keys and values, a value and its gate."""
_MOST_PARTS = 4
_BESIDE = 2
"""Keys and values, behind the queries that share them."""


def reshaped(question: Question) -> Iterator[Hypothesis]:
    """Yield: what one axis is made of is taken, or put together, in another order (heads by their width), or both."""
    end = question.trial.end
    for node, given, made in _views(question):
        for is_split, whole, parted in ((True, given, made.shape), (False, made.shape, given)):
            joined = meeting(whole, parted)
            done = "an axis is taken apart" if is_split else "axes are put together"
            for axis, first, parts in factored(joined, parted):
                kind, how = _of_axes(question, node, first, parts)
                orders = [(parts, order, how) for order in itertools.permutations(range(len(parts)))][1:]
                for number in _PARTS if is_split and len(parts) == 2 and kind == "permuted" else ():
                    # Each head holds a part of queries, keys and values, or each of those holds its heads.
                    orders += [(finer, (1, 0, 2), "parts of heads are mixed") for finer in _finer(parts, number)]
                for sizes, order, words in orders:
                    text, moved = f"{done} as {_in_words(sizes, order, words)}", (axis, sizes, order)
                    edit = _rearranged(joined, moved, is_back=not is_split)
                    yield Hypothesis(kind, text, {node: edit})
                    if not is_split and end is not node and question.right.numel() == made.numel():
                        text += ", and what is made is taken apart so again"
                        yield Hypothesis(kind, text, {node: edit, end: _rearranged(joined, moved)})
            pairs = [found for found in factored(joined, parted) if len(found[2]) == 2]
            if len(pairs) > 1:  # rows and columns of windows
                kind, how = _of_axes(question, node, *pairs[0][1:])
                turned = [(axis, sizes, (1, 0)) for axis, _, sizes in pairs]
                text = f"{done} as {_in_words(pairs[0][2], (1, 0), how)}, in {len(pairs)} places"
                yield Hypothesis(kind, text, {node: _rearranged(joined, *turned, is_back=not is_split)})


def _views(question: Question) -> Iterator[tuple[Node, torch.Size, torch.Tensor]]:
    """Yield the ops that give a tensor another shape, the shape before and what they make; last ops first."""
    for node in reversed(question.trial.ops):
        given = question.trial.tensor(node.args[0]) if node.args else None
        made = question.trial.tensor(node)
        if traits_of(node).kind == "reshape" and given is not None and made is not None:
            yield node, given.shape, made


def merges(question: Question, node: Node, value: torch.Tensor, a: int, b: int) -> bool:
    """Whether two neighboring axes of a tensor are put together by what reads it: heads and groups of them."""
    users = list(question.in_baseline(node).users)
    users += [reader for user in users if passes_on(user) for reader in user.users]  # a copy is made first
    for user in users:
        made = user.meta.get("val")
        if abs(a - b) == 1 and traits_of(user).kind == "reshape" and isinstance(made, torch.Tensor):
            shape = meeting(made.shape, value.shape)
            if any(first <= min(a, b) and max(a, b) < first + len(p) for _, first, p in factored(shape, value.shape)):
                return True
    return False


def _of_axes(question: Question, node: Node, first: int, parts: Sequence[int]) -> tuple[Kind, str]:
    """Return what it is to take axes in another order, and in words: of positions, or of heads and their width."""
    if is_of_places(question, node, tuple(range(first, first + len(parts)))):
        return "transposed", "rows and columns are exchanged"
    what = heads_or_parts(question, node) if first else "parts"  # the first axis is that of the batch
    return "permuted", f"{what} are interleaved"


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


def _finer(parts: Sequence[int], number: int) -> Iterator[tuple[int, ...]]:
    """Yield two parts with one of them in `number` of its own, which come before the heads elsewhere."""
    first, second = parts
    if second % number == 0 and second > number and first > 1:
        yield first, number, second // number
    if first % number == 0 and first > number and second > 1:
        yield number, first // number, second


def _places(parts: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """Return the places, along an axis that holds parts in another order, of what is there where they are in turn."""
    back = [list(order).index(i) for i in range(len(order))]
    return torch.arange(math.prod(parts)).reshape([parts[i] for i in order]).permute(back).reshape(-1)


def _rearranged(joined: Sequence[int], *moved: tuple[int, Sequence[int], Sequence[int]], is_back: bool = False) -> Edit:
    """Return the edit by which axes of `joined` hold (axis, parts, order), or hold them in turn where they did not."""

    def edit(call: TrialCall) -> Any:
        value = call.value.reshape(joined)
        for axis, parts, order in moved:
            places = _places(parts, order)
            value = value.index_select(axis, places.argsort() if is_back else places)
        return value.reshape(call.value.shape)

    return edit


def _in_words(parts: Sequence[int], order: Sequence[int], how: str) -> str:
    here, there = map(_product, (parts, [parts[i] for i in order]))
    if here == there:
        return f"{here} in another order: {how}"
    return f"{there} in the candidate, as {here} in the baseline: {how}"


def neighbors(question: Question) -> Iterator[Hypothesis]:
    """Yield: an op over halves of an axis (a rotation) takes neighbors, or the other way round."""
    trial = question.trial
    for node, made in trial.real_ops():
        size = made.shape[-1] if made.dim() else 0
        if size < 4 or size % 2:
            continue
        words = ("pairs of neighbors", "halves")
        for source in [*trial.inputs, *trial.ops[: trial.ops.index(node)]]:
            given = trial.values[source]
            if not is_real(given) or given.shape != made.shape or not _is_parted(question, source, node):
                continue
            for (one, other), parts in ((words, (2, size // 2)), (words[::-1], (size // 2, 2))):
                order = _places(parts, (1, 0))
                changed = trial.changed({source: given[..., order]}, node)
                if changed is not None and changed.shape == made.shape:
                    text = f"{one} are rotated in the candidate, {other} in the baseline (interleaved)"
                    yield Hypothesis("position", text, {node: changed[..., order.argsort()]})


def _is_parted(question: Question, source: Node, node: Node) -> bool:
    """Whether a node is made of parts of the last axis of a source: what is only added to it is not rotated."""
    values, above = question.trial.values, {*ancestors(node)}
    size = values[node].shape[-1]
    return any(values[op].shape[-1:] != (size,) for op in down([source], above) if isinstance(values[op], torch.Tensor))


def along_parts(question: Question) -> Iterator[Hypothesis]:
    """Yield: an op along an axis that a reshape has put together runs along one of those that it is made of."""
    for node, made in question.trial.real_ops():
        source = node.args[0] if argument_names(node.target)[1:2] == ["dim"] and len(node.args) > 1 else None
        parted = question.trial.tensor(source.args[0]) if isinstance(source, Node) and passes_on(source) else None
        if parted is None or made.numel() != parted.numel() or parted.dim() <= made.dim():
            continue
        here, there = map(_product, (made.shape, parted.shape))
        for axis in range(parted.dim()):
            text = f"{called(op_name(node))} is along axis {axis} of {there}, not along axis {node.args[1]} of {here}"
            yield Hypothesis("other", text, {node: _along(parted, axis)}, axis=axis)


def _along(parted: torch.Tensor, axis: int) -> Edit:
    return lambda call: call.target(parted, axis, *call.args[2:], **call.kwargs).reshape(call.value.shape)


def missing_rotation(question: Question) -> Iterator[Hypothesis]:
    """Yield: what a rotation turns goes on as it is; of the same words for all, as they are left out together."""
    trial = question.trial
    held = {node.name: trial.tensor(node) for node in [*trial.inputs, *trial.ops]}
    turned = {node: source for node in trial.ops if (source := turned_by(question.in_baseline(node))) is not None}
    for node, source in turned.items():
        value, made = held.get(source.name), held[node.name]
        text = "a rotation by positions is left out"
        text += f": that of {question.maker(source)}" if len(turned) == 1 else ""
        if value is not None and made is not None and value.shape == made.shape:
            yield Hypothesis("position", text, {node: value})


def permuted_operands(question: Question) -> Iterator[Hypothesis]:
    """Yield: halves of an operand, or of each of its heads, are exchanged with neighbors or each other."""
    for node in question.trial.inputs:
        value = question.trial.tensor(node)
        for axis, size in enumerate(() if value is None else value.shape):
            for text, order in orders_of(size) if size >= 4 and (size % 2 == 0 or size % 3 == 0) else ():
                moved = value.index_select(axis, order)  # type: ignore[union-attr]
                yield Hypothesis("permuted", f"{question.label(node)}: {text} (axis {axis})", {node: moved}, axis=axis)


def fused(question: Question) -> Iterator[Hypothesis]:
    """Yield: parts of one axis lie head by head and not one after the other, or the other way round."""
    for (source, axis), readers in _taken_apart(question).items():
        widths, value = _widths(question, source, axis, readers), question.trial.values[source]
        if 1 < len(widths) <= _MOST_PARTS:
            for order, text in _part_orders(widths, _heads_of(question, readers, set(widths))):
                edits = {reader: _reordered(order, axis) for reader in readers}
                yield Hypothesis("permuted", f"{question.label(source)} {text}", edits, axis=axis - value.dim())
    for node, given, made in reversed([*_views(question)]):
        yield from _not_grouped(question, node, given, made)


def _taken_apart(question: Question) -> dict[tuple[Node, int], list[Node]]:
    """Return what is split or sliced along an axis, and by which ops."""
    parts: dict[tuple[Node, int], list[Node]] = defaultdict(list)
    for node in question.trial.ops:
        if op_name(node) in ("split", "split_with_sizes", "chunk", "slice") and isinstance(node.args[0], Node):
            given, place = question.trial.tensor(node.args[0]), 1 if op_name(node) == "slice" else 2
            dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
            if given is not None and isinstance(dim, int):
                parts[node.args[0], dim % given.dim()].append(node)
    return parts


def _widths(question: Question, source: Node, axis: int, readers: Sequence[Node]) -> tuple[int, ...]:
    """Return the widths of the parts in their order; slices are of one width, and as many as there is room for."""
    values = question.trial.values
    for reader in readers:
        if isinstance(made := values[reader], (tuple, list)):
            return tuple(part.shape[axis] for part in made)
    size, widths = values[source].shape[axis], {values[reader].shape[axis] for reader in readers}
    width = widths.pop() if len(widths) == 1 else 0
    return (width,) * (size // width) if width and size % width == 0 else ()


def _heads_of(question: Question, readers: Sequence[Node], widths: set[int]) -> dict[int, set[int]]:
    """Return, for each width, in how many heads it is taken apart below."""
    heads: dict[int, set[int]] = defaultdict(set)
    values = question.trial.values

    def is_open(node: Node) -> bool:
        return op_name(node) == "getitem" or (passes_on(node) and traits_of(node).kind != "reshape")

    below = walk(readers, lambda one: one.users if one in readers or is_open(one) else ())
    for node in (one for one in below if one in values and traits_of(one).kind == "reshape"):
        given, made = values[node.all_input_nodes[0]], values[node]
        joined = meeting(given.shape, made.shape) if isinstance(given, torch.Tensor) else ()
        for place, _, parts in factored(joined, made.shape):
            if len(parts) == 2 and joined[place] in widths:
                heads[joined[place]].add(parts[0])
    return heads


def _part_orders(widths: Sequence[int], heads_of: dict[int, set[int]]) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield the places of what each part takes in the candidate, and in words."""
    number = len(widths)
    if len(set(widths)) == 1:
        for heads in sorted(heads_of[widths[0]]):
            parts = (number, heads, widths[0] // heads)
            for order in itertools.permutations(range(3)):
                if order[0] == 0:  # the order within a part is that of a part alone
                    continue
                there = [parts[i] for i in order]
                how = f": each head holds its {number} parts" if order == (1, 0, 2) else ""
                text = f"is taken apart as {_product(there)} in the candidate, as {_product(parts)} in the baseline"
                yield _places(parts, order), f"{text}{how}"
        return
    # Queries share keys: as many groups as there are heads of the narrowest part.
    for groups in sorted(heads_of[min(widths)]):
        if groups > 1 and all(width % groups == 0 for width in widths):
            every = torch.arange(sum(widths)).reshape(groups, -1)
            grouped = torch.split(every, [width // groups for width in widths], dim=1)
            text = f"holds its {number} parts in each of {groups} groups in the candidate"
            yield torch.cat([part.reshape(-1) for part in grouped]), f"{text}, one part after the other in the baseline"


def _not_grouped(question: Question, node: Node, given: Sequence[int], made: torch.Tensor) -> Iterator[Hypothesis]:
    """Yield: a group of queries, key and value lie together in the baseline, all queries first in the candidate."""
    joined = meeting(given, made.shape)
    for axis, _, parts in factored(joined, made.shape):
        if len(parts) != 3 or parts[1] <= _BESIDE + 1:
            continue
        groups, members, width = parts
        sizes = [groups * (members - _BESIDE) * width, *[groups * width] * _BESIDE]
        found = [part.reshape(groups, -1) for part in torch.split(torch.arange(sum(sizes)), sizes)]
        text = f"{question.label(node.all_input_nodes[0])} holds one part after the other in the candidate"
        text += f", its {members} parts in each of {groups} groups in the baseline"
        yield Hypothesis("permuted", text, {node: _reordered(torch.cat(found, dim=1).reshape(-1), axis, joined)})


def _reordered(order: torch.Tensor, axis: int, joined: Sequence[int] | None = None) -> Edit:
    def edit(call: TrialCall) -> Any:
        given = call.args[0]
        whole = given if joined is None else given.reshape(joined)
        return call.target(whole.index_select(axis, order).reshape(given.shape), *call.args[1:], **call.kwargs)

    return edit


def _product(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))
