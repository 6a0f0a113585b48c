"""Several weights of the baseline that the candidate keeps as one: their rows in another order.

A checkpoint is converted by hand: queries, keys and values are put together head by head, where the port takes them
apart one after the other. Each of the products is wrong then, and none of them alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch.fx import Node

from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis
from glassengine.judge.hypotheses.mistakes.weights_read import _SAME
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Edit, giving
from glassengine.numerics.metrics.orders import called, order_between
from glassengine.results import Kind

_PASSES_OF_ROWS = 24
"""How often a weight is read where its rows are looked for in another one."""


def packed(question: Question) -> Iterator[Hypothesis]:
    """Yield: what the candidate keeps as one weight has the rows of several of the baseline's in another order."""
    trial = question.trial
    edits: dict[Node, Edit] = {}
    told: list[tuple[Kind, str]] = []
    products: set[Node] = set()
    # Matrices first: the biases are those of their products.
    for name, tensor in sorted(question.their_weights.items(), key=lambda item: -item[1].dim()):
        held = [] if not tensor.is_floating_point() else _held_apart(question, tensor, products)
        if not held or any(node in edits for node in held):
            continue
        theirs = tensor.detach().double()
        ours = torch.cat([trial.values[node] for node in held])
        trial.budget.spend_passes(_PASSES_OF_ROWS, ours)
        order = order_between(ours, theirs, 0, _SAME)
        if order is None:
            continue
        products.update(user for node in held for user in node.users if user in trial.values)
        sizes = [trial.values[node].shape[0] for node in held]
        kind, how = called(order)
        labels = ", ".join(question.label(node) for node in held)
        told.append(("swapped" if _are_exchanged(order, sizes) else kind, f"{name} holds the rows of {labels} {how}"))
        edits |= {node: giving(part) for node, part in zip(held, torch.split(theirs, sizes), strict=True)}
    if told:
        yield Hypothesis(told[0][0], told[0][1], edits)


def _held_apart(question: Question, theirs: torch.Tensor, products: Collection[Node]) -> list[Node]:
    """Return the weights of the piece that have the rows of one of the candidate's, in the order in which they run.

    Args:
        question: With the piece.
        theirs: The candidate's.
        products: That read the matrices of this kind, which have been found; a bias is that of one of them.
    """
    values = question.trial.values
    order = {op: place for place, op in enumerate(question.trial.ops)}
    found = [
        node
        for node in question.trial.inputs
        if node.name in question.weights and isinstance(values[node], torch.Tensor) and values[node].is_floating_point()
        if values[node].dim() == theirs.dim() > 0 and values[node].shape[1:] == theirs.shape[1:]
        if theirs.dim() > 1 or any(user in products for user in node.users)
    ]
    found.sort(key=lambda node: min((order[user] for user in node.users if user in order), default=0))
    rows = sum(values[node].shape[0] for node in found)
    return found if len(found) > 1 and rows == theirs.shape[0] else []


def _are_exchanged(order: torch.Tensor, sizes: Sequence[int]) -> bool:
    """Whether whole weights have changed places: keys stand where queries should."""
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    blocks = torch.split(order, list(sizes))
    return all(int(block[0]) in starts and bool((block.diff() == 1).all()) for block in blocks)
