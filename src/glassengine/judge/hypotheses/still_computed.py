"""What the candidate computes all the same, though it would explain its tensor that it does not."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.program.representation.program import Program

_NEAR = 8
"""Steps above a tensor within which a weight is its own."""


def is_still_computed(node: Node, program: Program, candidate: Program | None) -> bool:
    """Whether only one op reads a node, and the candidate reads a weight of it as often.

    The candidate's results need that weight. That it is left out explains nothing then: it is added elsewhere, or
    the two tensors do not belong together.

    Args:
        node: Of the baseline, or a copy of it.
        program: The baseline's.
        candidate: The candidate's; None where it has none.
    """
    own = next((one for one in program.graph.nodes if one.name == node.name), None)
    # What something else reads as well (a residual) is computed for that.
    if candidate is None or own is None or len(own.users) != 1:
        return False
    both = [(_readers(one), one.weights()) for one in (program, candidate)]
    weights = program.weights()
    for source in _own(own):
        if source.name in weights:
            # Weights of the same values (ones) are counted together: which is which is not known.
            value = weights[source.name]
            here, there = (
                sum(number for name, number in readers.items() if name in held and _is_same(value, held[name]))
                for readers, held in both
            )
            if there >= here:
                return True
    return False


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
