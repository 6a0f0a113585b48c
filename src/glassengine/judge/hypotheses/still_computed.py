"""What the candidate computes all the same, though it would explain its tensor that it does not."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.judge.hypotheses.trials.trial import Trial
from glassengine.program.representation.program import Program

_NEAR = 8
"""Steps above a tensor within which a weight is its own."""


def still_computed(trial: Trial, program: Program, candidate: Program | None) -> frozenset[str]:
    """Return the nodes of a piece, read by it alone, with a weight that the candidate reads as often.

    The candidate's results need that weight. That it is left out explains nothing then: it is added elsewhere, or
    the two tensors do not belong together.

    Args:
        trial: Of the piece.
        program: The baseline's.
        candidate: The candidate's; None where it has none.
    """
    if candidate is None:
        return frozenset()
    inside = {node.name for node in [*trial.inputs, *trial.ops]}
    readers = _readers(candidate)
    weights, theirs = program.weights(), candidate.weights()

    def times_read(weight: Node) -> int:
        own = weights[weight.name]
        return sum(number for name, number in readers.items() if name in theirs and _is_same(own, theirs[name]))

    found = set()
    for node in program.graph.nodes:
        if node.name in inside and all(user.name in inside for user in node.users):
            own = [one for one in _own(node) if one.name in weights]
            if any(times_read(one) >= len(one.users) for one in own):
                found.add(node.name)
    return frozenset(found)


def _own(node: Node) -> Iterator[Node]:
    """Yield what a node is made of and nothing else is, a few steps up, itself included."""
    layer, known = [node], {node}
    for _ in range(_NEAR):
        yield from layer
        layer = [
            one for below in layer for one in below.all_input_nodes if one not in known and known >= set(one.users)
        ]
        known.update(layer)


def _is_same(ours: Tensor, theirs: Tensor) -> bool:
    if ours.dim() != 2 or ours.shape == theirs.shape:
        return ours.shape == theirs.shape and torch.equal(ours, theirs)
    return ours.T.shape == theirs.shape and torch.equal(ours.T, theirs)


def _readers(program: Program) -> dict[str, int]:
    """Return node -> number of ops that read it and that a result needs."""
    found: dict[str, int] = {}
    waiting, known = [program.graph.output_node()], set()
    while waiting:
        node = waiting.pop()
        for source in node.all_input_nodes:
            found[source.name] = found.get(source.name, 0) + 1
            if source not in known:
                known.add(source)
                waiting.append(source)
    return found
