"""Weights through pairs: what the ops of two programs read that are each other's counterparts, under any name.

Only ops that read the same otherwise are compared: where a port folds a norm into a product, or permutes rows and what
reads them, neither weight is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.graphs.between import passes_on
from glassengine.judge.hypotheses.mistakes.weights_read import relation
from glassengine.judge.pairing.stored_weights import compare_weights, is_equal, weights_of
from glassengine.program.representation.outputs import weight_only_nodes
from glassengine.program.representation.program import Program
from glassengine.results import WeightsComparison

_USER = "user."
_MOST_TOLD = 16


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
        if _is_same(ours, theirs, read):
            continue
        alike = [other for other in reads if other.name == read.name and other.own != read.own]
        known = next((other for other in alike if _is_same(ours, theirs, other)), None)
        if known is not None:
            text = f"{read.own}: tied to {known.own} in the baseline only, and not its values"
        else:
            text = _told(read, ours, theirs[read.own]) if len(different) < _MOST_TOLD else read.name
        different.setdefault(read.name, text)
    found = WeightsComparison(len(compared), tuple(different), (), ())
    return replace(found, how=tuple(different.values()))


def _told(read: _Read, ours: Mapping[str, torch.Tensor], theirs: torch.Tensor) -> str:
    own = ours[read.name].detach().double()
    held = theirs.detach().double()
    if held.shape != own.shape and held.dim() == 2 and held.T.shape == own.shape:
        held = held.T
    alike = {name: tensor for name, tensor in ours.items() if tensor.shape == own.shape}
    return relation(read.name, read.own, own, held, alike)[1]


def _is_same(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], read: _Read) -> bool:
    own, held = ours[read.name], theirs[read.own]
    if read.is_alike and own.shape == held.shape:
        return is_equal(own, held)
    return not compare_weights({"": own}, {"": held}).different


def _reads(baseline: Program, candidate: Program, pairs: Mapping[str, str]) -> Iterator[_Read]:
    """Yield what the two ops of each pair read in the same place, where they read the same otherwise."""
    ours, theirs = _Side(baseline), _Side(candidate)
    nodes = {node.name: node for node in candidate.graph.nodes}
    for node in baseline.graph.nodes:
        other = nodes.get(pairs.get(node.name, ""))
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
        self.ports = {port.node: port.name for port in program.inputs}
        self._constant = {node.name for node in weight_only_nodes(program)}

    def read(self, node: Node) -> tuple[list[str], list[Node]]:
        """Return the weights that an op reads, and the other tensors."""
        weights, others = [], []
        for leaf in pytree.tree_leaves((node.args, dict(node.kwargs))):
            if not isinstance(leaf, Node) or not isinstance(leaf.meta.get("val"), torch.Tensor):
                continue
            source = leaf
            while source.name in self._constant and passes_on(source) and isinstance(source.args[0], Node):
                source = source.args[0]
            if source.name in self.weights:
                weights.append(source.name)
            else:
                others.append(leaf)
        return weights, others


def _is_counterpart(a: Node, b: Node, pairs: Mapping[str, str], ours: _Side, theirs: _Side) -> bool:
    """Whether two nodes, or what they pass on, are each other's counterparts."""
    of_b = [b, *_passed_on(b)]
    for node in (a, *_passed_on(a)):
        if pairs.get(node.name) in {other.name for other in of_b}:
            return True
        if node.op == "placeholder" and node.name in ours.ports:
            return any(theirs.ports.get(other.name) == ours.ports[node.name] for other in of_b)
    return False


def _passed_on(node: Node) -> Iterator[Node]:
    while passes_on(node) and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
        yield node


def _have_one_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape or (a.dim() == 2 and a.shape == b.shape[::-1])
