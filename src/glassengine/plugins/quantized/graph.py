"""A quantized ONNX file beside the floats that it was made of: judged op by op in its own precision, shown as drift.

The baseline's program runs in float64, node by node, in lockstep with what the file computed:

    pure      from the inputs on: what the signal is
    asked     each node on the file's own numbers of its inputs: what the file loses there, weights and all
    forced    the same on the file's own weights: P, what it should have made of what it has
    noisy     twice, those numbers moved by up to half a step of their own grid, and the result as well: the floor

So an op is charged with no more than what it introduced; rounding to its own grid is not a mistake. Weights are judged
by themselves, as those of a quantized checkpoint are (`numerics.weight_error`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.numerics.drift import LITTLE_LEFT, LOST, decibels
from glassengine.numerics.float64 import double, in_double, retarget, target_of
from glassengine.numerics.judgement import Judgement
from glassengine.numerics.verdict import Reference
from glassengine.numerics.weight_error import MOST_RMS, WeightError, judge_weight
from glassengine.plugins.quantized.file import FileValue, QuantizedFile, QuantizedOp, rank
from glassengine.program.representation.naming import is_tensor_node
from glassengine.program.representation.outputs import last_uses
from glassengine.program.representation.program import Program
from glassengine.results import FLAGGED, Hint
from glassengine.writing import crc32

_NUM_NOISY = 2
_SAME = 0.01
"""Relative difference that what a grid cuts off may make to what reads it."""
_FAR = 1e4
"""What is read times this, an op returns the largest that it may."""
_SUMS = 1e-5
"""Relative error that is left to kernels of floats and to scales that are stored rounded: far below any grid's."""


@dataclass
class QuantizedRun:
    """Judges the steps of a quantized file.

    Attributes:
        program: The baseline's.
        quantized: The file.
        ops: What was found, by node.
        unknown: Nodes that read a weight of which the file's own is not known: they are measured, not judged.
    """

    program: Program
    quantized: QuantizedFile
    ops: dict[str, QuantizedOp] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    _weights: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = self.program.weight_names()
        for node, tensor in self.program.weights().items():
            own = self.quantized.weight(names[node], tensor) if tensor.is_floating_point() else None
            if own is not None:
                self._weights[node] = own[0]
            elif tensor.is_floating_point() and tensor.numel() > 1:
                self.unknown.add(node)

    def judged_weights(self) -> Iterator[tuple[str, WeightError]]:
        """Yield (name, what its difference looks like) of each quantized weight."""
        names = self.program.weight_names()
        floats = {names[node]: tensor for node, tensor in self.program.weights().items() if tensor.dim() >= 2}
        for node, tensor in self.program.weights().items():
            own = self.quantized.weight(names[node], tensor) if tensor.is_floating_point() else None
            numbers, step, grid = own or (None, None, None)
            if numbers is None or not tensor.dim():
                continue
            if step is None:
                error = _unquantized(tensor, numbers)
                if error is not None:
                    yield names[node], error
                continue
            if tensor.dim() == 1:
                yield names[node], _bias(tensor.double(), numbers, step.abs())
                continue
            axis = grid.axis if grid is not None and grid.axis is not None else 0
            alike = {name: one for name, one in floats.items() if one.shape == tensor.shape and name != names[node]}
            rows = {name: _rows(one, axis) for name, one in alike.items()}
            yield names[node], judge_weight(_rows(tensor, axis), _rows(numbers, axis), _rows(step, axis), rows)

    @torch.no_grad()
    def step(self, inputs: Mapping[str, Tensor], values: Mapping[str, Tensor], where: tuple[str, int]) -> None:
        """Judge one step: `values` are the values that the file computed, by name."""
        ports = {port.node: port.name for port in self.program.inputs}
        weights = self.program.weights()
        generator = torch.Generator().manual_seed(crc32(repr(where).encode()))
        lanes: dict[Node, list[Any]] = {}
        last = last_uses(self.program)
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                own = weights.get(node.name, inputs.get(ports.get(node.name, "")))
                pure = double(own) if own is not None else None
                forced = self._weights.get(node.name, pure)
                lanes[node] = [pure, pure, *[forced] * (1 + _NUM_NOISY)]
                if node.name in ports and isinstance(pure, Tensor) and pure.is_floating_point():
                    self._observe_input(node, ports[node.name], lanes, values, generator, where)
            elif node.op == "get_attr":
                lanes[node] = [getattr(self.program.exported.graph_module, str(node.target))] * (3 + _NUM_NOISY)
            elif node.op == "call_function" and "_assert" not in str(node.target):
                lanes[node] = [_call(node, lanes, lane) for lane in range(3 + _NUM_NOISY)]
                self._observe(node, lanes, values, generator, where)
            for dead in last.get(node, ()):
                lanes.pop(dead, None)

    def _observe_input(
        self,
        node: Node,
        name: str,
        lanes: dict[Node, list[Any]],
        values: Mapping[str, Tensor],
        generator: torch.Generator,
        where: tuple[str, int],
    ) -> None:
        """Judge how an input is rounded to its grid, where it has one: what reads it gets those numbers."""
        pure = lanes[node][0]
        value = self.quantized.value(name, values)
        if value is None or value.step is None or value.read.shape != pure.shape:
            return
        op = self.ops.setdefault(node.name, QuantizedOp(node, name, value.site))
        op.see(value)
        op.sums.add(pure, value.read, predicted=pure)
        op.add(_judged(value, pure, [pure] * _NUM_NOISY, generator, is_folded=False), where)
        lanes[node] = [
            pure,
            value.read,
            value.read,
            *(_moved(value.read, value.step, generator) for _ in lanes[node][3:]),
        ]

    def _observe(
        self,
        node: Node,
        lanes: dict[Node, list[Any]],
        values: Mapping[str, Tensor],
        generator: torch.Generator,
        where: tuple[str, int],
    ) -> None:
        """Judge a node of which the file has a value, and let that take the place of the prediction."""
        sites = self.program.sites.by_node.get(node.name)
        if not sites or not is_tensor_node(node) or not node.meta["val"].is_floating_point():
            if any(source.name in self.unknown for source in node.all_input_nodes):
                self.unknown.add(node.name)
            return
        value = self.quantized.value(sites[0].name, values)
        pure, asked, predicted, *noisy = lanes[node]
        reads_unknown = any(source.name in self.unknown for source in node.all_input_nodes)
        if value is None or value.read.shape != predicted.shape:
            if reads_unknown:
                self.unknown.add(node.name)
            return
        op = self.ops.setdefault(node.name, QuantizedOp(node, sites[0].name, value.site))
        op.see(value)
        op.bounded = op.bounded or _is_bounded(node, lanes, value)
        is_folded = _is_folded(node, value, predicted)
        # What the ends of a grid do for a reader is not a loss.
        kept = (_inside(value, pure), _inside(value, asked)) if is_folded else (pure, asked)
        op.sums.add(kept[0], value.read, predicted=kept[1])
        if not reads_unknown:
            op.add(_judged(value, predicted, noisy, generator, is_folded=is_folded), where)
        lanes[node] = [pure, value.read, value.read, *(_moved(value.read, value.step, generator) for _ in noisy)]


def _judged(
    value: FileValue, predicted: Tensor, noisy: list[Tensor], generator: torch.Generator, *, is_folded: bool
) -> Judgement:
    """Return the mildest of what explains the value: before it is rounded to a grid, or as its readers get it."""
    size = float(predicted.square().mean().sqrt()) * _SUMS
    runs = [run + size * torch.randn(run.shape, generator=generator, dtype=run.dtype) for run in noisy]
    judged = []
    if value.floats is not None and value.floats.shape == predicted.shape:
        judged.append(_against(predicted, runs, value.floats))
        rounded = _as_rounded(value, value.floats, generator)
        if rounded is not None and rounded.verdict in FLAGGED:
            return replace(rounded, reason="what reads it does not get these numbers, rounded to their grid")
    if value.step is not None and value.ends is not None:
        low, high = value.ends
        inside = _inside(value, predicted)
        moved = [_moved(run, value.step, generator).clamp(min=low, max=high) for run in runs]
        judged.append(_against(inside, moved, value.read))
        coarse = _ratio((value.read - inside).square(), inside.square())
        if coarse > LITTLE_LEFT and judged[-1].verdict not in FLAGGED:
            text = f"its grid is too coarse: rounding to it leaves {decibels(coarse):.0f} dB"
            return Judgement(
                "wrong" if coarse > LOST else "suspicious", judged[-1].noise_ratio, judged[-1].rms_error, text
            )
        if not is_folded and judged[-1].verdict not in FLAGGED:
            cut = _ratio((predicted - inside).square(), predicted.square())
            if cut > LITTLE_LEFT:
                text = f"{cut:.0%} of the power is cut off by the ends of its grid, {_span(value)}"
                found = judged[-1]
                return Judgement("wrong" if cut > LOST else "suspicious", found.noise_ratio, found.rms_error, text)
    return min(judged, key=rank)


def _as_rounded(value: FileValue, floats: Tensor, generator: torch.Generator) -> Judgement | None:
    """Judge what readers get against the floats that were rounded to the grid; None without a grid."""
    if value.step is None or value.ends is None:
        return None
    low, high = value.ends
    kept = _inside(value, floats)
    runs = [_moved(kept, value.step, generator).clamp(min=low, max=high) for _ in range(_NUM_NOISY)]
    return _against(kept, runs, value.read)


def _ratio(noise: Tensor, signal: Tensor) -> float:
    return float(noise.sum()) / float(signal.sum()) if float(signal.sum()) else 0.0


def _inside(value: FileValue, predicted: Tensor) -> Tensor:
    assert value.ends is not None
    return torch.minimum(torch.maximum(predicted, value.ends[0]), value.ends[1])


def _is_folded(node: Node, value: FileValue, predicted: Tensor) -> bool:
    """Whether the ends of a grid do what all readers of the value do to it: a relu is folded into a grid from 0 on."""
    if value.ends is None or not node.users:
        return False
    inside = _inside(value, predicted)
    if torch.equal(inside, predicted):
        return False
    for user in node.users:
        if user.op != "call_function" or user.all_input_nodes != [node]:
            return False
        whole, cut = (_call(user, {node: [one]}, 0) for one in (predicted, inside))
        if not isinstance(whole, Tensor):
            return False
        whole, cut = whole.double(), cut.double()  # a shape, say, or a comparison
        if float((whole - cut).norm()) > _SAME * float(whole.norm()):
            return False
    return True


def _is_bounded(node: Node, lanes: Mapping[Node, list[Any]], value: FileValue) -> bool:
    """Whether a grid ends about where an op does, however large what it reads: that of a softmax goes to 1."""
    if value.ends is None or value.fixed is None:
        return False
    given = {source: lanes[source][0] for source in node.all_input_nodes}
    made = _call(node, {one: [value * _FAR if _is_made(one, value) else value] for one, value in given.items()}, 0)
    end, farthest = float(value.ends[1].max()), float(made.max()) if made.numel() else math.inf
    return end / 2 <= farthest <= end * 2


def _is_made(node: Node, value: Any) -> bool:
    return node.op == "call_function" and isinstance(value, Tensor) and value.is_floating_point()


def _bias(baseline: Tensor, own: Tensor, step: Tensor) -> WeightError:
    """Judge a weight of one dimension: too few numbers to tell more than whether they are within their steps."""
    steps = (own - baseline) / step
    rms = float(steps.square().mean().sqrt())
    hint = Hint("other", f"it is {rms:.3g} steps (rms) from the baseline's", 0.7, evidence="not its values")
    snr = decibels(_ratio((own - baseline).square(), baseline.square()))
    return WeightError(snr, rms, float(steps.abs().max()), 1, (hint,) if rms > MOST_RMS else ())


def _unquantized(baseline: Tensor, own: Tensor) -> WeightError | None:
    """Return what is wrong with a weight that the file keeps as floats; None where it is the baseline's."""
    if torch.allclose(own.float(), baseline.float(), 1e-3, 1e-5):
        return None
    hint = Hint("swapped", "it is not quantized, and is not the baseline's", 1.0, evidence="another weight")
    return WeightError(0.0, math.inf, None, 1, (hint,))


def _span(value: FileValue) -> str:
    assert value.ends is not None
    return f"{float(value.ends[0].amin()):.3g}..{float(value.ends[1].amax()):.3g}"


def _against(predicted: Tensor, runs: list[Tensor], value: Tensor) -> Judgement:
    reference = Reference(predicted, predicted.float(), runs, dtype=torch.float32, valid=None)
    return reference.judge(value)


def _moved(value: Tensor, step: Tensor | None, generator: torch.Generator) -> Tensor:
    """Return a value moved by up to half a step of its grid, at random."""
    if step is None:
        return value
    return value + (torch.rand(value.shape, generator=generator, dtype=value.dtype) - 0.5) * step


def _rows(tensor: Tensor, axis: int) -> Tensor:
    """Return a weight as rows of one step each."""
    moved = tensor.movedim(axis, 0)
    return moved.reshape(moved.shape[0], -1)


def _call(node: Node, lanes: Mapping[Node, list[Any]], lane: int) -> Any:
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: lanes[source][lane])
    args, kwargs = pytree.tree_map(retarget, (args, kwargs))
    return in_double(node, target_of(node))(*args, **kwargs)
