"""Compares the weights of two programs: by name, by content, and by the ops that read them.

Through pairs, only ops that read the same otherwise are compared: where a port folds a norm into a product, or permutes
rows and what reads them, neither weight is wrong.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.fx import Node

from glassengine.judge.hypotheses.mistakes.weights_read import relation
from glassengine.judge.site_pairs import operands_of, origin_of, passed_on, ports, readers_of
from glassengine.numerics.arrangements import arrangements
from glassengine.numerics.float64 import is_real
from glassengine.numerics.judgement import unit_roundoff
from glassengine.program.representation.outputs import weight_only_nodes
from glassengine.program.representation.program import Program
from glassengine.results import WeightsComparison

_USER = "user."
_MOST_TOLD = 16
_ROUNDINGS = 8
"""Of the coarser dtype, up to which weights are the same: an `inv_freq` computed in another order, say.

And of all of a tensor, what the steps before may have left in what they keep.
"""
_SAMPLE = 64
"""Numbers in the middle of two weights that are compared before all are."""
_MOST_ALIKE = 6
"""Number of equal weights from which they are not evidence: untrained norms are all ones."""


@dataclass(frozen=True)
class _Read:
    """One weight of the baseline, and the candidate's in its place; whether one op reads both, in one layout."""

    name: str
    own: str
    is_alike: bool


def compare_paired_weights(baseline: Program, candidate: Program, pairs: Mapping[str, str]) -> WeightsComparison:
    """Compare the weights that counterparts read.

    Args:
        baseline: With weights.
        candidate: With weights.
        pairs: Node of `baseline` -> node of `candidate`.
    """
    ours, theirs = weights_of(baseline), weights_of(candidate)
    reads = list(_reads(baseline, candidate, pairs))
    compared = dict.fromkeys(read.name for read in reads)
    different: dict[str, str] = {}
    for read in reads:
        if _is_unchanged(ours, theirs, read):
            continue
        alike = [other for other in reads if other.name == read.name and other.own != read.own]
        known = next((other for other in alike if _is_unchanged(ours, theirs, other)), None)
        if known is not None:
            text = f"{read.own}: tied to {known.own} in the baseline only, and not its values"
        else:
            text = _words(read, ours, theirs[read.own]) if len(different) < _MOST_TOLD else read.name
        different.setdefault(read.name, text)
    return WeightsComparison(len(compared), tuple(different), (), (), how=tuple(different.values()))


def states_alike(baseline: Program, candidate: Program) -> dict[str, torch.Tensor]:
    """Return what earlier steps left in the candidate, where the baseline keeps the same but for rounding.

    Each side keeps what it computed itself. What reads it is judged on the candidate's, as an op is on its inputs.

    Args:
        baseline: With what its module remembered before the step, as buffers.
        candidate: Likewise.

    Returns:
        The candidate's tensors by placeholder of `baseline`.
    """
    ours, theirs = _buffers(baseline), _buffers(candidate)
    states = {}
    for node, own in ours.items():
        alike = [(_distance(own, other), name) for name, other in theirs.items()]
        distance, name = min(alike, default=(math.inf, ""))
        if 0 < distance <= _ROUNDINGS * unit_roundoff(own.dtype):
            states[node] = theirs[name]
    return states


def _buffers(program: Program) -> dict[str, torch.Tensor]:
    specs = program.exported.graph_signature.input_specs
    nodes = {spec.arg.name for spec in specs if spec.kind is InputKind.BUFFER}
    return {node: one for node, one in program.weights().items() if node in nodes and one.is_floating_point()}


def _distance(own: torch.Tensor, other: torch.Tensor) -> float:
    """Return how far two tensors differ, as a part of the first; of other shapes or dtypes infinity."""
    if own.shape != other.shape or own.dtype is not other.dtype:
        return math.inf
    size, apart = own.double().norm(), (own.double() - other.double()).norm()
    return 0.0 if apart == 0 else float(apart / size)


def _words(read: _Read, ours: Mapping[str, torch.Tensor], theirs: torch.Tensor) -> str:
    own = ours[read.name].detach().double()
    held = theirs.detach().double()
    if held.shape != own.shape and held.dim() == 2 and held.T.shape == own.shape:
        held = held.T
    alike = {name: tensor for name, tensor in ours.items() if tensor.shape == own.shape}
    return relation(read.name, read.own, own, held, alike)[1]


def _is_unchanged(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], read: _Read) -> bool:
    own, held = ours[read.name], theirs[read.own]
    if read.is_alike and own.shape == held.shape:
        return is_equal(own, held)
    return _is_same_or_transposed(own, held)


def _reads(baseline: Program, candidate: Program, pairs: Mapping[str, str]) -> Iterator[_Read]:
    """Yield what the two ops of each pair read in the same place, where they read the same otherwise."""
    ours, theirs = _Side(baseline), _Side(candidate)
    for node in baseline.graph.nodes:
        other = candidate.nodes.get(pairs.get(node.name, ""))
        if other is None:
            continue
        (own, given), (held, taken) = ours.read(node), theirs.read(other)
        if not own or not held or len(given) != len(taken):
            continue
        if not all(_is_counterpart(a, b, pairs, ours, theirs) for a, b in zip(given, taken, strict=True)):
            continue
        if node.target == other.target and len(own) == len(held):
            both = list(zip(own, held, strict=True))
        else:
            both = [(a, b) for a in own for b in held if _have_one_shape(ours.weights[a], theirs.weights[b])]
            both = both if len(both) == len(own) == len(held) else []
        for a, b in both:
            if _have_one_shape(ours.weights[a], theirs.weights[b]):
                yield _Read(ours.names[a], theirs.names[b], node.target == other.target)


class _Side:
    """What of a program says which weights an op reads."""

    def __init__(self, program: Program) -> None:
        self.weights = program.weights()
        self.names = {node: name.removeprefix(_USER) for node, name in program.weight_names().items()}
        self.ports = ports(program)
        self._constant = {node.name for node in weight_only_nodes(program)}

    def read(self, node: Node) -> tuple[list[str], list[Node]]:
        """Return the weights that an op reads, and the other tensors."""
        weights, others = [], []
        for leaf in operands_of(node):
            if not isinstance(leaf.meta.get("val"), torch.Tensor):
                continue
            source = origin_of(leaf) if leaf.name in self._constant else leaf
            if source.name in self.weights:
                weights.append(source.name)
            else:
                others.append(leaf)
        return weights, others


def _is_counterpart(a: Node, b: Node, pairs: Mapping[str, str], ours: _Side, theirs: _Side) -> bool:
    """Whether two nodes, or what they pass on, are each other's counterparts."""
    of_b = [b, *passed_on(b)]
    for node in (a, *passed_on(a)):
        if pairs.get(node.name) in {other.name for other in of_b}:
            return True
        if node.op == "placeholder" and node.name in ours.ports:
            return any(theirs.ports.get(other.name) == ours.ports[node.name] for other in of_b)
    return False


def _have_one_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape or (a.dim() == 2 and a.shape == b.shape[::-1])


class SameWeights:
    """Weights of a baseline and of a candidate by content.

    Args:
        baseline: With weights.
        candidate: With weights.
    """

    def __init__(self, baseline: Program, candidate: Program) -> None:
        self._ours, self._theirs = baseline.weights(), candidate.weights()
        self._nodes = candidate.nodes
        self._known: dict[str, list[str]] = {}
        self._order = {name: place for place, name in enumerate(self._theirs)}
        self._by_number: dict[int, list[str]] = {}
        for name, tensor in self._theirs.items():
            self._by_number.setdefault(tensor.numel(), []).append(name)
        self._by_size: dict[int, list[tuple[float, str]]] = {}
        units = [unit_roundoff(one.dtype) for one in [*self._ours.values(), *self._theirs.values()] if is_real(one)]
        self._apart = _ROUNDINGS * max(units, default=0.0)

    def of(self, name: str) -> list[str]:
        """Return the candidate's weights (placeholders) that hold the same numbers as one of the baseline."""
        if name not in self._known:
            self._known[name] = self._like(name, _is_same_in_any_arrangement)
        return self._known[name]

    def as_stored(self, name: str) -> list[str]:
        """Return the candidate's weights (placeholders) that one of the baseline is without any change."""
        return self._like(name, _is_same)

    def _like(self, name: str, is_like: Callable[[torch.Tensor, torch.Tensor], bool]) -> list[str]:
        own = self._ours[name]
        some = self._by_number.get(own.numel(), [])
        if len(some) > 1:
            if own.numel() not in self._by_size:
                self._by_size[own.numel()] = sorted((_size(self._theirs[other]), other) for other in some)
            sizes = self._by_size[own.numel()]
            size, room = _size(own), 1 + 2 * self._apart
            first = bisect_left(sizes, size / room, key=lambda one: one[0])
            last = bisect_right(sizes, size * room, key=lambda one: one[0])
            some = [other for _, other in sizes[first:last]]
        return sorted((other for other in some if is_like(own, self._theirs[other])), key=self._order.__getitem__)

    def readers(self, node: Node) -> Iterator[Node]:
        """Yield the ops of the candidate that read a weight of the same content as one that `node` reads."""
        for name in _weights_of(node, self._ours):
            same = self.of(name)
            if len(same) <= _MOST_ALIKE:
                for other in same:
                    yield from readers_of(self._nodes[other])

    def agree(self, ours: Node, theirs: Node) -> bool:
        """Whether two ops read the same weights, as far as the weights of the baseline's are anywhere else."""
        own, other = _weights_of(ours, self._ours), set(_weights_of(theirs, self._theirs))
        known = [same for name in own if (same := self.of(name))]
        return bool(own) == bool(other) and not any(other.isdisjoint(same) for same in known)


def _size(weight: torch.Tensor) -> float:
    """Return the sum of all magnitudes, which no arrangement changes; of NaN infinity, of whole numbers 0."""
    if not is_real(weight):
        return 0.0
    wide = weight.detach().float() if weight.element_size() == 1 else weight.detach()  # of 8 bits few ops are known
    size = float(torch.linalg.vector_norm(wide, 1, dtype=torch.float64))
    return math.inf if math.isnan(size) else size


def _weights_of(node: Node, weights: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the weights (placeholders) that an op reads, through views and casts."""
    origins = [origin_of(source) for source in node.all_input_nodes]
    return [source.name for source in origins if source.op == "placeholder" and source.name in weights]


def _is_same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    is_of_one_kind = ours.is_floating_point() == theirs.is_floating_point() and ours.is_complex() == theirs.is_complex()
    return is_of_one_kind and ours.shape == theirs.shape and is_equal(ours, theirs)


def _is_same_in_any_arrangement(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two weights of one number of elements hold the same, in any arrangement."""
    if _is_same(ours, theirs):
        return True
    if not ours.numel():
        return False
    found = arrangements([(size,) for size in theirs.shape], [(size,) for size in ours.shape])
    return any(is_equal(ours, how.apply(theirs, ours.shape)) for how in found)


def weights_of(program: Program) -> dict[str, torch.Tensor]:
    """Return the weights of a program by the user's own names."""
    names = program.weight_names()
    return {names[node].removeprefix(_USER): tensor for node, tensor in program.weights().items()}


def compare_weights(baseline: Mapping[str, torch.Tensor], candidate: Mapping[str, Any]) -> WeightsComparison:
    """Compare weights by name. A transposed matrix (another layer class) is the same weight.

    Args:
        baseline: Name -> tensor.
        candidate: Name -> tensor; another floating dtype is fine.
    """
    both = [name for name in baseline if name in candidate]
    different = tuple(name for name in both if not _is_same_or_transposed(baseline[name], candidate[name]))
    return WeightsComparison(
        compared=len(both),
        different=different,
        only_baseline=tuple(name for name in baseline if name not in candidate),
        only_candidate=tuple(name for name in candidate if name not in baseline),
    )


def _is_same_or_transposed(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    views = [theirs, theirs.T] if theirs.dim() == 2 else [theirs]
    return any(ours.shape == view.shape and is_equal(ours, view) for view in views)


def is_equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors of one shape are the same up to a few roundings of the coarser dtype."""
    if not (ours.is_floating_point() and theirs.is_floating_point()):
        return torch.equal(ours, theirs)
    coarser = max((ours.dtype, theirs.dtype), key=unit_roundoff)
    most = _ROUNDINGS * unit_roundoff(coarser)
    left, right = ours.detach().flatten(), theirs.detach().flatten()
    half = len(left) // 2
    for some in (slice(half, half + _SAMPLE), slice(None)):
        a, b = left[some].to(coarser), right[some].to(coarser)
        if not torch.equal(a, b) and not torch.allclose(b.double(), a.double(), most, 0.0, equal_nan=True):
            return False
    return True
