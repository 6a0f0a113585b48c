"""Which rank is behind a sum that all ranks have wrong alike: each had its part of what is added up, and of the weight.

What the ranks add up is not recorded, but follows from what each was given and its rows of the weight. One rank with
the rows of another, without its term, or with its term twice, makes another sum, which is tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.compare.ranks.assembly import EXPLAINED, error_of
from glassengine.results import Hint

_LINEAR = (torch.ops.aten.linear.default,)


def wrong_term(
    node: Node, weights: Mapping[str, Tensor], parts: Mapping[int, Tensor], made: Tensor, expected: Tensor
) -> tuple[int, Hint] | None:
    """Return the one rank whose term explains a wrong sum, and what it did; None where there is none.

    Args:
        node: A linear op of the baseline's program.
        weights: Of the program, by node.
        parts: Rank -> its columns of what the op reads, in the order of the weight's.
        made: What all ranks have.
        expected: What it should be.
    """
    weight = weights.get(node.args[1].name) if node.target in _LINEAR and isinstance(node.args[1], Node) else None
    if weight is None or len(parts) < 2 or sum(part.shape[-1] for part in parts.values()) != weight.shape[1]:
        return None
    wide = expected.double()
    error = error_of(made, wide)
    for rank, text, added in _changes(weight.double(), {rank: part.double() for rank, part in parts.items()}):
        if error_of(made, wide + added) <= EXPLAINED * error:
            return rank, Hint("other", f"rank {rank} {text}: that makes this sum, in all ranks", 0.95, evidence="rank")
    return None


def _changes(weight: Tensor, parts: Mapping[int, Tensor]) -> Iterator[tuple[int, str, Tensor]]:
    """Yield rank, what it does, and by how much the sum is another one then."""
    columns = dict(zip(parts, torch.split(weight, [part.shape[-1] for part in parts.values()], 1), strict=True))
    for rank, part in parts.items():
        term = part @ columns[rank].T
        for other, theirs in columns.items():
            if other != rank and theirs.shape == columns[rank].shape:
                yield rank, f"has the shard of rank {other} of the weight", part @ theirs.T - term
        yield rank, "adds nothing", -term
        yield rank, "adds its term twice", term
