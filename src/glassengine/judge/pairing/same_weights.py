"""Which weights of two programs hold the same numbers, under any names and in any arrangement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from torch.fx import Node

from glassengine.judge.graphs.between import origin_of, passes_on
from glassengine.numerics.arrangements import arrangements
from glassengine.numerics.judgement import unit_roundoff
from glassengine.program.representation.program import Program

_ROUNDINGS = 8
_SAMPLE = 64
"""Numbers in the middle of two weights that are compared before all are."""
_MOST_ALIKE = 6
"""Number of equal weights from which they are not evidence: untrained norms are all ones."""


class SameWeights:
    """Weights of a baseline and of a candidate by content.

    Args:
        baseline: With weights.
        candidate: With weights.
    """

    def __init__(self, baseline: Program, candidate: Program) -> None:
        self._ours, self._theirs = baseline.weights(), candidate.weights()
        self._nodes = {node.name: node for node in candidate.graph.nodes}
        self._known: dict[str, list[str]] = {}

    def of(self, name: str) -> list[str]:
        """Return the candidate's weights (placeholders) that hold the same numbers as one of the baseline."""
        if name not in self._known:
            own = self._ours[name]
            kept = self._by_number.get(own.numel(), [])
            self._known[name] = [other for other in kept if _is_same(own, self._theirs[other])]
        return self._known[name]

    def read_by(self, node: Node) -> list[str]:
        """Return the weights (placeholders) of the baseline that an op reads, through views and casts."""
        return [source.name for source in _weights_of(node, self._ours)]

    def readers(self, node: Node) -> Iterator[Node]:
        """Yield the ops of the candidate that read a weight of the same content as one that `node` reads."""
        for name in self.read_by(node):
            same = self.of(name)
            if len(same) > _MOST_ALIKE:
                continue
            for other in same:
                yield from _users(self._nodes[other])

    def agree(self, ours: Node, theirs: Node) -> bool:
        """Whether two ops read the same weights, as far as the weights of the baseline's are anywhere else."""
        own, other = self.read_by(ours), {source.name for source in _weights_of(theirs, self._theirs)}
        for name in own:
            same = self.of(name)
            if same and not other & set(same):
                return False
        return bool(own) == bool(other)

    @cached_property
    def _by_number(self) -> Mapping[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name, tensor in self._theirs.items():
            found.setdefault(tensor.numel(), []).append(name)
        return found


def _weights_of(node: Node, weights: Mapping[str, torch.Tensor]) -> list[Node]:
    origins = [origin_of(source) for source in node.all_input_nodes]
    return [source for source in origins if source.op == "placeholder" and source.name in weights]


def _users(node: Node) -> Iterator[Node]:
    for user in node.users:
        if user.op == "call_function":
            if passes_on(user):
                yield from _users(user)
            else:
                yield user


def _is_same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two weights of one number of elements hold the same, in any arrangement."""
    if ours.is_floating_point() != theirs.is_floating_point() or ours.is_complex() != theirs.is_complex():
        return False
    if ours.shape == theirs.shape and _is_equal(ours, theirs):
        return True
    if not ours.numel() or not _is_equal(*(_sorted(tensor) for tensor in (ours, theirs))):
        return False
    found = arrangements([(size,) for size in theirs.shape], [(size,) for size in ours.shape])
    return any(_is_equal(ours, how.apply(theirs, ours.shape)) for how in found)


def _sorted(tensor: torch.Tensor) -> torch.Tensor:
    """Return what no arrangement changes of a tensor: means, in the dtype that they are made of."""
    wide = tensor.detach().double().flatten()
    return torch.stack([wide.mean(), wide.abs().mean(), wide.square().mean().sqrt()]).to(tensor.dtype)


def _is_equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if not ours.is_floating_point():
        return torch.equal(ours, theirs)
    unit = max(unit_roundoff(ours.dtype), unit_roundoff(theirs.dtype))
    a, b = ours.detach().flatten(), theirs.detach().flatten()
    half = len(a) // 2
    for some in (slice(half, half + _SAMPLE), slice(None)):
        x, y = a[some].double(), b[some].double()
        if not bool(((x - y).abs() <= _ROUNDINGS * unit * x.abs()).all()):
            return False
    return True
