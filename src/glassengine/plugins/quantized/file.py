"""A quantized ONNX file and the floats that it was made of: its values and ops."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.numerics.drift import DriftSums
from glassengine.numerics.judgement import Judgement
from glassengine.program.onnx.grids import GridNames, grids_of
from glassengine.program.representation.program import Program
from glassengine.results import VERDICTS, Verdict

_TOO_WIDE = 3.0
"""A grid is too wide from so many times its values on, measured in what is usual in its file."""
_FARTHEST = 3.0
"""Deviations that a grid reaches at least."""
_FITS = 1.5
"""Grids that are so much wider than their values were made for inputs like these."""


@dataclass(frozen=True)
class FileValue:
    """One value of the file: as floats where it has some, as the numbers that its readers get, and their grid.

    Attributes:
        site: What the file calls it.
        floats: Before it is rounded to a grid.
        read: What the ops that read it get.
        step: Of each element of `read`; None where it is not on a grid.
        ends: Of the grid.
        fixed: Scale and zero point, where the file has them and they are those of the whole tensor.
    """

    site: str
    floats: Tensor | None
    read: Tensor
    step: Tensor | None = None
    ends: tuple[Tensor, Tensor] | None = None
    fixed: tuple[float, float] | None = None


class QuantizedFile:
    """What a quantized file says, by the names of its baseline."""

    def __init__(self, program: Program) -> None:
        assert program.onnx is not None
        self.file = program.onnx.file
        self._grids, self._weights = grids_of(self.file)
        # Floats -> the integers that they are made of, and of nothing else.
        nodes = (node for node in self.file.model.graph.node if node.op_type == "DequantizeLinear")
        self._written_back = {node.output[0]: node.input[0] for node in nodes}
        self._by_name: dict[str, list[str]] = {}
        for name, grid in self._grids.items():
            self._by_name.setdefault(grid.stands_for, []).append(name)

    def weight(self, name: str, baseline: Tensor) -> tuple[Tensor, Tensor | None, GridNames | None] | None:
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
            wide = integers.long()  # torch compares no uint16
            at_end = (wide <= limits.min + 1) | (wide == limits.max)
            found = [(numbers, torch.where(at_end, -step, step), grid)]
            if numbers.dim() == 2:
                turned = grid if grid.axis is None else replace(grid, axis=1 - grid.axis % 2)
                found.append((numbers.T, found[0][1].T, turned))
            fitting = [one for one in found if one[0].shape == baseline.shape]
            if fitting:
                return min(fitting, key=lambda one: float((one[0] - baseline.double()).norm()))
        same = self._weights.get(name)
        return (same.double(), None, None) if same is not None and same.shape == baseline.shape else None

    def value(self, name: str, values: Mapping[str, Tensor]) -> FileValue | None:
        """Return the file's value for one of the baseline."""
        floats = values.get(name)
        floats = floats.double() if floats is not None and floats.is_floating_point() else None
        known = {**self._weights, **values}
        back = self._written_back.get(name)
        for own in [*self._by_name.get(name, ()), *([back] if back in self._grids else [])]:
            grid = self._grids[own]
            if own in values and grid.scale in known:
                integers = values[own]
                floats = None if own == back else floats
                step = grid.step(known, integers)
                ends, fixed = grid.ends(integers, known), None
                if grid.scale in self._weights and self._weights[grid.scale].numel() == 1:
                    fixed = float(self._weights[grid.scale]), float(ends[0].min())
                return FileValue(own, floats, grid.numbers(integers, known), step, ends, fixed)
        return None if floats is None else FileValue(name, floats, floats)


@dataclass
class QuantizedOp:
    """What was found of one op of the baseline over all cases and steps.

    Attributes:
        fixed: Its grid, where the file has one.
        excess: How many times as far as its values the grid reaches.
        number: Of these values.
        bounded: Whether the grid is that of what the op may ever return.
    """

    node: Node
    site: str
    candidate_site: str
    sums: DriftSums = field(default_factory=DriftSums)
    worst: Judgement | None = None
    where: tuple[str, int] = ("", 0)
    fixed: tuple[float, float] | None = None
    excess: float = math.inf
    number: int = 0
    bounded: bool = False

    def add(self, judgement: Judgement, where: tuple[str, int]) -> None:
        """Take note of a step."""
        if self.worst is None or rank(judgement) > rank(self.worst):
            self.worst, self.where = judgement, where

    def see(self, value: FileValue) -> None:
        """Take note of how much of its grid a value uses."""
        if value.fixed is None or value.ends is None or not value.read.numel():
            return
        low, high = float(value.read.min()), float(value.read.max())
        sides = (float(value.ends[0].min()), low), (float(value.ends[1].max()), high)
        used = [end / reached for end, reached in sides if reached * end > 0]
        self.fixed, self.number = value.fixed, self.number + value.read.numel()
        self.excess = min(self.excess, *used) if used else self.excess


def judge_widths(ops: Collection[QuantizedOp]) -> None:
    """Flag ops whose grid is far wider than their values, while the others of the file fit: their scale is another.

    A grid that several values share fits if it fits one of them. One that is as wide as all that an op may return (a
    softmax, say) is so on purpose. Where the others do not fit either, the file was made for other inputs.
    """
    seen = [op for op in ops if op.fixed is not None and math.isfinite(op.excess)]
    fits = {op.fixed: math.inf for op in seen}
    for op in seen:
        fits[op.fixed] = min(fits[op.fixed], 1.0 if op.bounded else op.excess)
    for op in seen:
        others = [excess for fixed, excess in fits.items() if fixed != op.fixed]
        usual = max(1.0, statistics.median(others)) if others else math.inf
        # So many normal values reach about so far; a grid is made for the largest of very many.
        reached = math.sqrt(2 * math.log(max(op.number, 2)))
        least = _TOO_WIDE * usual * max(1.0, _FARTHEST / reached)
        if op.fixed is not None and op.worst is not None and fits[op.fixed] >= least:
            text = f"its grid reaches {op.excess:.3g} times as far as its values, others {usual:.2g} times"
            text += f": its scale is {op.fixed[0]:.3g}"
            verdict: Verdict = "wrong" if usual <= _FITS else "suspicious"
            op.add(replace(op.worst, verdict=verdict, reason=text), op.where)


def rank(judgement: Judgement) -> tuple[int, float]:
    """Return what a tensor is sorted by: its verdict, then its noise ratio."""
    return VERDICTS.index(judgement.verdict), judgement.noise_ratio or 0.0
