"""The tensors of a candidate's program on the steps of a probe, found by shape, size and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from glassengine.compare.verdict import unit_roundoff
from glassengine.diagnose.probe import ProbeStep
from glassengine.program.naming import is_tensor_node
from glassengine.program.program import Program

Values = list[Any]
"""What one node made in each step."""


class CandidateTensors:
    """What a candidate's program made.

    Args:
        program: Its program.
        steps: What it was given and made.

    Attributes:
        nodes: Name -> node that makes a tensor in every step.
        order: Name -> place in the graph, of every node.
        ancestors: Name -> the node itself and what it is made of, as the bits of their places.
        by_shape: Shapes in the steps -> names.
        taken: Names that are somebody's counterpart; `alike` leaves them out.
    """

    def __init__(self, program: Program, steps: Sequence[ProbeStep]) -> None:
        self._steps = steps
        self._num_unpadded = sum(step.real is None for step in steps)
        everywhere = [node for node in program.graph.nodes if all(node.name in step.values for step in steps)]
        self.nodes: dict[str, Node] = {node.name: node for node in everywhere if is_tensor_node(node)}
        self.order = {node.name: place for place, node in enumerate(program.graph.nodes)}
        self.ancestors = _ancestors(program)
        self.by_shape: dict[tuple[Any, ...], list[str]] = {}
        for name in self.nodes:
            self.by_shape.setdefault(shapes_of(self.values(name)), []).append(name)
        self.taken: set[str] = set()
        self._sizes: dict[str, list[float]] = {}

    def values(self, name: str) -> Values:
        """Return what a node made in each step."""
        return [step.values[name] for step in self._steps]

    def unit(self, name: str) -> float:
        """Return the unit roundoff of a tensor."""
        return unit_roundoff(self.nodes[name].meta["val"].dtype)

    def alike(self, predicted: Values, besides: int) -> Iterator[str]:
        """Yield the floating tensors of the same shape and, roughly, size, but those at the places `besides`."""
        sizes = [_size(value) for value in predicted]
        for name in self.by_shape.get(shapes_of(predicted), ()):
            if name in self.taken or not self.nodes[name].meta["val"].is_floating_point():
                continue
            if besides >> self.order[name] & 1:
                continue
            if name not in self._sizes:
                self._sizes[name] = [_size(value) for value in self.values(name)]
            both = list(zip(sizes, self._sizes[name], strict=True))[: self._num_unpadded]
            if all(abs(a - b) <= 0.2 * max(a, b) for a, b in both):
                yield name

    def distance(self, name: str, predicted: Values, *, beside_padding: bool = True) -> float:
        """Return the largest distance of any step: rms(tensor - predicted) / rms(predicted), infinite across masks.

        What stands in padding counts for nothing; without `beside_padding` steps that have some do not count at all.
        """
        each = list(zip(self.values(name), predicted, (step.real for step in self._steps), strict=True))
        each = each if beside_padding else each[: self._num_unpadded]
        return max(_distance(*_real(theirs, ours, real)) for theirs, ours, real in each)


def shapes_of(values: Values) -> tuple[Any, ...]:
    """Return the shape in each step, None for what is no tensor."""
    return tuple(tuple(value.shape) if isinstance(value, torch.Tensor) else None for value in values)


def _ancestors(program: Program) -> dict[str, int]:
    """Return for each node itself and what it is made of, as the bits of their places in the graph."""
    made_of: dict[str, int] = {}
    for place, node in enumerate(program.graph.nodes):
        made_of[node.name] = 1 << place
        for source in node.all_input_nodes:
            made_of[node.name] |= made_of[source.name]
    return made_of


def _special(value: torch.Tensor) -> torch.Tensor:
    """Where a value is no number but a mask."""
    return ~(value.abs() < 1e4) if value.dtype is torch.float16 else ~(value.abs() < 1e30)


def _size(value: torch.Tensor) -> float:
    """Root mean square of the numbers in a tensor."""
    wide = value.double()
    wide = torch.where(_special(wide), 0.0, wide)
    return float(wide.square().mean().sqrt()) if wide.numel() else 0.0


def _real(theirs: torch.Tensor, ours: torch.Tensor, real: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors of one shape with zeros in padding, along every axis as long as the text."""
    if real is None or theirs.shape != ours.shape or not theirs.dim() or theirs.shape[0] != real.shape[0]:
        return theirs, ours
    for axis in range(1, theirs.dim()):
        if theirs.shape[axis] == real.shape[1]:
            kept = real.reshape(real.shape[0], *(real.shape[1] if i == axis else 1 for i in range(1, theirs.dim())))
            zero = theirs.new_zeros(()), ours.new_zeros(())
            theirs, ours = torch.where(kept, theirs, zero[0]), torch.where(kept, ours, zero[1])
    return theirs, ours


def _distance(candidate: torch.Tensor, predicted: torch.Tensor) -> float:
    """Return rms(candidate - predicted) / rms(predicted); infinite where masks differ."""
    if not predicted.is_floating_point() or not candidate.is_floating_point():
        same = candidate.shape == predicted.shape and bool((candidate == predicted).all())
        return 0.0 if same else float("inf")
    theirs, ours = candidate.double(), predicted.double()
    masked = _special(ours)
    if not torch.equal(masked, _special(theirs)):
        return float("inf")
    error = _size(torch.where(masked, 0.0, theirs - ours))
    size = _size(ours)
    return error / size if size else (0.0 if error == 0 else float("inf"))
