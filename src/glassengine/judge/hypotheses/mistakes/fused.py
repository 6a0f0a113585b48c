"""What one product makes of several tensors at once (queries, keys and values), laid out in another order."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.graphs.between import passes_on
from glassengine.judge.hypotheses.mistakes.layouts import factored, meeting
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Call, Edit
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name

_MOST_PARTS = 4
_BESIDE = 2
"""Keys and values, behind the queries that share them."""


def fused(question: Question) -> Iterator[Hypothesis]:
    """Yield: parts of one axis lie head by head and not one after the other, or the other way round."""
    for (source, axis), readers in _taken_apart(question).items():
        widths, value = _widths(question, source, axis, readers), question.trial.values[source]
        if not 1 < len(widths) <= _MOST_PARTS:
            continue
        for order, text in _part_orders(widths, _heads_of(question, readers, set(widths))):
            edits = {reader: _reordered(order, axis) for reader in readers}
            yield Hypothesis("permuted", f"{question.label(source)} {text}", edits, axis=axis - value.dim())
    for node in question.trial.ops:
        yield from _not_grouped(question, node)


def _taken_apart(question: Question) -> dict[tuple[Node, int], list[Node]]:
    """Return what is split or sliced along an axis, and by which ops."""
    found: dict[tuple[Node, int], list[Node]] = defaultdict(list)
    for node in question.trial.ops:
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or op_name(node) not in ("split", "split_with_sizes", "chunk", "slice"):
            continue
        given = question.trial.values.get(source)
        place = 1 if op_name(node) == "slice" else 2
        dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
        if isinstance(given, torch.Tensor) and isinstance(dim, int):
            found[source, dim % given.dim()].append(node)
    return found


def _widths(question: Question, source: Node, axis: int, readers: Sequence[Node]) -> tuple[int, ...]:
    """Return the widths of the parts in their order; slices are of one width,
    and as many as there is room for.
    """
    values = question.trial.values
    size = values[source].shape[axis]
    for reader in readers:
        made = values[reader]
        if isinstance(made, (tuple, list)):
            return tuple(part.shape[axis] for part in made)
    widths = {values[reader].shape[axis] for reader in readers}
    (width,) = widths if len(widths) == 1 else (0,)
    return (width,) * (size // width) if width and size % width == 0 else ()


def _heads_of(question: Question, readers: Sequence[Node], widths: set[int]) -> dict[int, set[int]]:
    """Return, for each width, in how many heads it is taken apart below."""
    found: dict[int, set[int]] = defaultdict(set)
    open_ones, values = list(readers), question.trial.values
    while open_ones:
        node = open_ones.pop()
        for user in node.users:
            if user not in values:
                continue
            if op_name(user) == "getitem" or (passes_on(user) and traits_of(user).kind != "reshape"):
                open_ones.append(user)
            elif traits_of(user).kind == "reshape" and isinstance(values[node], torch.Tensor):
                given, made = values[node].shape, values[user].shape
                joined = meeting(given, made)
                for place, _, parts in factored(joined, made):
                    if len(parts) == 2 and joined[place] in widths:
                        found[joined[place]].add(parts[0])
    return found


def _part_orders(widths: Sequence[int], heads_of: dict[int, set[int]]) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield the places of what each part takes in the candidate, and in words."""
    every, number = torch.arange(sum(widths)), len(widths)
    if len(set(widths)) == 1:
        for heads in sorted(heads_of[widths[0]]):
            parts = (number, heads, widths[0] // heads)
            for order in itertools.permutations(range(3)):
                if order[0] == 0:  # the order within a part is that of a part alone
                    continue
                there = [parts[i] for i in order]
                taken = every.reshape(there).permute([order.index(i) for i in range(3)]).reshape(-1)
                how = f": each head holds its {number} parts" if order == (1, 0, 2) else ""
                yield taken, f"is taken apart as {_product(there)} in the candidate, as {_product(parts)} here{how}"
        return
    # Queries share keys: as many groups as there are heads of the narrowest part.
    for groups in sorted(heads_of[min(widths)]):
        if groups > 1 and all(width % groups == 0 for width in widths):
            grouped = torch.split(every.reshape(groups, -1), [width // groups for width in widths], dim=1)
            text = (
                f"holds its {number} parts in each of {groups} groups in the candidate, one part after the other here"
            )
            yield torch.cat([part.reshape(-1) for part in grouped]), text


def _not_grouped(question: Question, node: Node) -> Iterator[Hypothesis]:
    """Yield: a group of queries and their key and value lie together here, in the candidate all queries come first."""
    given = question.trial.values.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
    made = question.trial.values[node]
    if traits_of(node).kind != "reshape" or not isinstance(given, torch.Tensor) or not isinstance(made, torch.Tensor):
        return
    joined = meeting(given.shape, made.shape)
    for axis, _, parts in factored(joined, made.shape):
        if len(parts) != 3 or parts[1] <= _BESIDE + 1:
            continue
        groups, members, width = parts
        sizes = [groups * (members - _BESIDE) * width, *[groups * width] * _BESIDE]
        found = [part.reshape(groups, -1) for part in torch.split(torch.arange(sum(sizes)), sizes)]
        order = torch.cat(found, dim=1).reshape(-1)
        text = f"holds one part after the other in the candidate, its {members} parts in each of {groups} groups here"
        source = question.label(node.all_input_nodes[0])
        yield Hypothesis("permuted", f"{source} {text}", {node: _reordered(order, axis, joined)})


def _reordered(order: torch.Tensor, axis: int, joined: Sequence[int] | None = None) -> Edit:
    def edit(call: Call) -> Any:
        given = call.args[0]
        whole = given if joined is None else given.reshape(joined)
        return call.again(whole.index_select(axis, order).reshape(given.shape), *call.args[1:], **call.kwargs)

    return edit


def _product(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))
