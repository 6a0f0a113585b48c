"""A quantized ONNX file and the floats that it was made of: its values and ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.numerics.judgement import Judgement
from glassengine.numerics.metrics.drift import DriftSums
from glassengine.program.onnx.stored.grids import Grid, grids_of, written_back
from glassengine.program.representation.program import Program
from glassengine.results import VERDICTS


@dataclass(frozen=True)
class Value:
    """One value of the file: as floats where it has some, as the numbers that its readers get, and their grid.

    Attributes:
        site: What the file calls it.
        floats: Before it is rounded to a grid.
        read: What the ops that read it get.
        step: Of each element of `read`; None where it is not on a grid.
        ends: Of the grid.
    """

    site: str
    floats: Tensor | None
    read: Tensor
    step: Tensor | None = None
    ends: tuple[Tensor, Tensor] | None = None


class QuantizedFile:
    """What a quantized file says, by the names of its baseline.

    Args:
        program: The file's.
    """

    def __init__(self, program: Program) -> None:
        assert program.onnx is not None
        self.file = program.onnx.file
        self._grids, self._weights = grids_of(self.file)
        self._written_back = written_back(self.file)
        self._by_name: dict[str, list[str]] = {}
        for name, grid in self._grids.items():
            self._by_name.setdefault(grid.stands_for, []).append(name)

    def weight(self, name: str, baseline: Tensor) -> tuple[Tensor, Tensor | None, Grid | None] | None:
        """Return the file's own weight for one of the baseline: numbers, steps and grid; None where it has none.

        A quantizer may store the weight of a Gemm transposed: of two orders of the axes the nearer one is taken, and
        the op that reads it shows whether that is the right one.
        """
        for own in self._by_name.get(name, ()):
            if own not in self._weights or self._grids[own].scale not in self._weights:
                continue
            grid, integers = self._grids[own], self._weights[own]
            numbers = grid.numbers(integers, self._weights)
            step = grid.step(self._weights, integers).expand(numbers.shape)
            limits = torch.iinfo(integers.dtype)
            # As `judge_weight` wants it: negative where a value may be cut off by an end of the range.
            at_end = (integers <= limits.min + 1) | (integers == limits.max)
            found = [(numbers, torch.where(at_end, -step, step), grid)]
            if numbers.dim() == 2:
                turned = grid if grid.axis is None else dataclasses.replace(grid, axis=1 - grid.axis % 2)
                found.append((numbers.T, found[0][1].T, turned))
            fitting = [one for one in found if one[0].shape == baseline.shape]
            if fitting:
                return min(fitting, key=lambda one: float((one[0] - baseline.double()).norm()))
        same = self._weights.get(name)
        return (same.double(), None, None) if same is not None and same.shape == baseline.shape else None

    def value(self, name: str, found: Mapping[str, Tensor]) -> Value | None:
        """Return the file's value for one of the baseline."""
        floats = found.get(name)
        floats = floats.double() if floats is not None and floats.is_floating_point() else None
        known = {**self._weights, **found}
        back = self._written_back.get(name)
        for own in [*self._by_name.get(name, ()), *([back] if back in self._grids else [])]:
            grid = self._grids[own]
            if own in found and grid.scale in known:
                integers = found[own]
                floats = None if own == back else floats
                step = grid.step(known, integers)
                return Value(own, floats, grid.numbers(integers, known), step, grid.ends(integers, known))
        return None if floats is None else Value(name, floats, floats)


@dataclass
class Op:
    """What was found of one op of the baseline over all cases and steps."""

    node: Node
    site: str
    candidate_site: str
    sums: DriftSums = field(default_factory=DriftSums)
    worst: Judgement | None = None
    where: tuple[str, int] = ("", 0)

    def add(self, judgement: Judgement, where: tuple[str, int]) -> None:
        """Take note of a step."""
        if self.worst is None or rank(judgement) > rank(self.worst):
            self.worst, self.where = judgement, where


def rank(judgement: Judgement) -> tuple[int, float]:
    """Return what a tensor is sorted by: its verdict, then its noise ratio."""
    return VERDICTS.index(judgement.verdict), judgement.noise_ratio or 0.0
