"""Keeps the tensors that a reproduction of a divergence needs, while the tensors of the step are available.

A divergence is described by two pieces: the baseline's op on the values that the candidate fed to its own (in float64:
what should have come out), and what the candidate computes from these values, as far as its graph is known. A module
that was only looked at from outside has neither, there the result alone is kept.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.pieces import Piece, clone, cut
from glassengine.judge.sides.protocol import Observed, Side
from glassengine.judge.site_pairs import ancestors
from glassengine.numerics.judgement import INTRODUCED_WRONG, SUSPICIOUS, unit_roundoff
from glassengine.numerics.mask_values import is_finite
from glassengine.numerics.verdict import Reference
from glassengine.program.representation.program import Program

NUM_KEPT = 8
"""Divergences of one side whose tensors are kept, the earliest ones; a model with a wrong input has hundreds."""


@dataclass(frozen=True)
class Evidence:
    """Tensors of one divergence; everything that a later step could change is copied.

    Attributes:
        node: Of the baseline program.
        step: In which it diverged.
        exact: The baseline's op on the candidate's inputs, None where these were not observed.
        actual: What the candidate made.
        expected: What float64 makes of it.
        allowed: How far from `expected` rounding may lead, element by element.
        program: The candidate's own program, None where it has none.
        target: The candidate's counterpart of `node` in it.
        values: Values around `target`, by node of `program`.
        backend: What runs `program`: None for torch in eager mode.
    """

    node: str
    step: int
    exact: Piece | None
    actual: torch.Tensor
    expected: torch.Tensor
    allowed: torch.Tensor
    program: Program | None = None
    target: Node | None = None
    values: Mapping[str, Any] | None = None
    backend: str | None = None

    def candidate(self, depth: int = 1) -> Piece | None:
        """Return what the candidate computes: from values observed `depth` ops before the guilty one or earlier."""
        if self.target is None or self.values is None or self.program is None:
            return None
        near = {node.name for node in ancestors(self.target, depth - 1)}
        return cut([self.target], self.values, self.values.keys() - near)


class EvidenceBox:
    """Keeps evidence for the earliest divergences of one side."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._order = {node.name: index for index, node in enumerate(program.graph.nodes)}
        self._kept: dict[str, Evidence] = {}

    def get(self, node: str, step: int) -> Evidence | None:
        """Return what was kept of a divergence."""
        found = self._kept.get(node)
        return found if found is not None and found.step == step else None

    @torch.no_grad()
    def keep(self, side: Side, node: Node, observed: Observed, reference: Reference, step: int) -> None:
        """Keep what a reproduction of this divergence needs, unless there are enough earlier ones."""
        place = (step, self._order[node.name])
        later = sorted((e.step, self._order[e.node]) for e in self._kept.values())[NUM_KEPT - 1 :]
        if later and place > later[0]:
            return
        self._kept[node.name] = _gather(self._program, side, node, observed, reference, step)
        for name in sorted(self._kept, key=lambda n: (self._kept[n].step, self._order[n]))[NUM_KEPT:]:
            del self._kept[name]


def _gather(program: Program, side: Side, node: Node, observed: Observed, reference: Reference, step: int) -> Evidence:
    actual, weights = clone(observed.tensor), program.weights()
    exact = None
    if side.program is not None and side.replay is not None:
        values = {**weights, **side.replay.values}
        exact = cut([node], values, values.keys() - {node.name})
    expected = None
    # What the candidate feeds to its op may not fit the baseline's.
    with contextlib.suppress(RuntimeError, IndexError, ValueError):
        expected = None if exact is None else exact.exact()[0]
    if exact is None or expected is None or side.replay is None or expected.shape != actual.shape:
        return _of_result_alone(node, actual, reference, step)
    exact = replace(exact, inputs={n: one if n in weights else clone(one) for n, one in exact.inputs.items()})
    allowed = _allowed(exact, expected, actual, side.replay.allowed(node, observed.tensor))
    if reference.valid is not None:
        allowed = torch.where(reference.valid, allowed, math.inf)
    target, theirs = side.around(program, node)
    return Evidence(node.name, step, exact, actual, expected, allowed, side.program, target, theirs, side.backend)


def _of_result_alone(node: Node, actual: torch.Tensor, reference: Reference, step: int) -> Evidence:
    """Evidence without a graph: the result, and the accumulated floor it was judged by."""
    expected = reference.exact
    if actual.shape != expected.shape:
        allowed = torch.zeros(expected.shape, dtype=torch.float64)
    else:
        size = SUSPICIOUS * reference.relative_floor * rms(expected)
        allowed = torch.full(expected.shape, size if expected.is_floating_point() else 0.0, dtype=torch.float64)
    if reference.valid is not None and allowed.shape == reference.valid.shape:
        allowed = torch.where(reference.valid, allowed, math.inf)
    return Evidence(node.name, step, None, actual, expected.clone(), allowed)


def _allowed(exact: Piece, expected: torch.Tensor, actual: torch.Tensor, bound: torch.Tensor | None) -> torch.Tensor:
    """Return the rounding bound that the candidate was judged by; the floor where there is none or it is kept."""
    if not (expected.is_floating_point() and actual.is_floating_point()):
        return torch.zeros(expected.shape, dtype=torch.float64)
    error = (actual.double() - expected).abs()
    if bound is not None and not bool((error <= bound).all()):
        return bound.expand(expected.shape).clone()
    u = unit_roundoff(actual.dtype)
    # Of weights that the candidate holds in a coarser dtype.
    finest = min((unit_roundoff(t.dtype) for t in exact.inputs.values() if t.is_floating_point()), default=u)
    u_w = u if finest < u else 0.0
    floor = (u + u_w) * rms(expected) / math.sqrt(3)
    with contextlib.suppress(RuntimeError):  # the dtypes of its inputs do not mix
        floor = max(floor, rms(exact.run()[0].double() - expected))
    return torch.full(expected.shape, INTRODUCED_WRONG * floor, dtype=torch.float64)


def rms(tensor: torch.Tensor) -> float:
    """Return the root mean square in float64; what is not finite counts as 0."""
    square = tensor.double().square()
    if not is_finite(square):
        square.nan_to_num_(0.0, 0.0, 0.0)
    return float(square.mean().sqrt()) if square.numel() else 0.0
