"""The grids of a quantized ONNX file: which integers stand for which numbers.

    QDQ        x -> QuantizeLinear -> DequantizeLinear -> an op on floats
    QOperator  QLinearMatMul(a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero), and the like
    dynamic    DynamicQuantizeLinear(x) -> MatMulInteger -> Cast -> Mul by both scales

An integer tensor has the scale and zero point that stand behind it among the inputs of an op that reads it, that its
producer states for its result, or that its products are multiplied by.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glassengine.program.onnx.file import OnnxFile

if TYPE_CHECKING:
    import onnx

_SUFFIX = "_quantized"
"""What ONNX Runtime's quantizer adds to the name of a value that it keeps as integers only."""

_MOVES = ("Gather", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Expand")
"""Ops whose result has the integers of their first input, and so its grid."""

SMALL = (torch.int8, torch.uint8, torch.int16, torch.uint16)


@dataclass(frozen=True)
class GridNames:
    """Names of scale and zero point of an integer tensor, and the axis along which they change.

    Attributes:
        scale: Value or weight.
        zero: Likewise; None for 0.
        axis: Of the tensor; None where one scale is that of all.
        stands_for: Value or weight of floats that the integers stand for, as far as names tell.
    """

    scale: str
    zero: str | None
    axis: int | None
    stands_for: str

    def step(self, known: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Return the step of each element of `like`, to broadcast against it, float64."""
        return beside(known[self.scale].double(), like, self.axis)

    def numbers(self, integers: Tensor, known: Mapping[str, Tensor]) -> Tensor:
        """Return the numbers that `integers` stand for, float64."""
        wide = integers.double()
        if self.zero is not None and self.zero in known:
            wide = wide - beside(known[self.zero].double(), integers, self.axis)
        return wide * self.step(known, integers)

    def ends(self, integers: Tensor, known: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the least and the largest number of the grid, to broadcast against the tensor."""
        limits = torch.iinfo(integers.dtype)
        lowest, highest = (torch.full_like(integers, end) for end in (limits.min, limits.max))
        return self.numbers(lowest, known), self.numbers(highest, known)


def beside(part: Tensor, like: Tensor, axis: int | None, block: int = 0) -> Tensor:
    """Return a scale or zero point, of all, of each index of an axis or of blocks of it, to broadcast with `like`."""
    if part.numel() == 1:
        return part.reshape(())
    if block and axis is not None:
        return part.repeat_interleave(block, axis).narrow(axis, 0, like.shape[axis])
    at = 0 if axis is None else axis % like.dim()
    return part.reshape([-1 if i == at else 1 for i in range(like.dim())])


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Return the unsigned integers of the rows of bytes, the lowest bits of a byte first, as uint8."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    parts: Tensor = (packed.to(torch.uint8)[..., None] >> shifts) & (2**bits - 1)
    return parts.flatten(-2)


def is_quantized_graph(file: OnnxFile) -> bool:
    """Whether an ONNX file computes with quantized tensors."""
    return any(_quantizes(node) for node in file.model.graph.node)


def _quantizes(node: onnx.NodeProto) -> bool:
    known = ("DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger")
    return node.op_type in known or node.op_type.startswith("QLinear")


def grids_of(file: OnnxFile) -> tuple[dict[str, GridNames], dict[str, Tensor]]:
    """Return the grid of each integer tensor, value or weight, of which one is known, and the weights of the file.

    Among these are scales that the file only implies: that of the bias of a QLinearConv.
    """
    graph = file.model.graph
    weights = dict(file.weights())
    made_by = {name: node for node in graph.node for name in node.output}
    read_by: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            read_by.setdefault(name, []).append(node)
    grids: dict[str, GridNames] = {}

    def add(name: str, scale: str, zero: str | None, axis: int | None) -> None:
        if name not in grids:
            per_axis = axis if scale in weights and weights[scale].numel() > 1 else None
            grids[name] = GridNames(scale, zero, per_axis, _stands_for(name, made_by.get(name)))

    for node in graph.node:
        inputs = list(node.input)
        if node.op_type == "DynamicQuantizeLinear":
            add(node.output[0], node.output[1], node.output[2], None)
        elif node.op_type == "DequantizeLinear":
            add(inputs[0], inputs[1], inputs[2] if len(inputs) > 2 else None, _axis(node))
        elif node.op_type == "QuantizeLinear":
            add(node.output[0], inputs[1], inputs[2] if len(inputs) > 2 else None, _axis(node))
        elif node.op_type.startswith("QLinear"):
            _of_operator(node, weights, add)
            if node.op_type == "QLinearConv" and len(inputs) > 8 and {inputs[1], inputs[4]} <= weights.keys():
                implied = f"{inputs[8]} scale"
                weights[implied] = weights[inputs[1]].reshape(()) * weights[inputs[4]]
                add(inputs[8], implied, None, 0)
        elif node.op_type == "QGemm":
            _of_gemm(node, weights, add)
    for node in graph.node:
        if node.op_type in ("MatMulInteger", "ConvInteger"):
            _of_products(node, weights, made_by, read_by, grids, add)
        elif node.op_type in _MOVES:
            for one, other in itertools.permutations((node.input[0], node.output[0])):
                if one in grids and grids[one].axis is None:
                    add(other, grids[one].scale, grids[one].zero, None)
    return grids, weights


def _stands_for(name: str, producer: onnx.NodeProto | None) -> str:
    if producer is not None and producer.op_type in ("QuantizeLinear", "DynamicQuantizeLinear"):
        return str(producer.input[0])
    return name.removesuffix(_SUFFIX)


def _axis(node: onnx.NodeProto) -> int:
    return next((int(entry.i) for entry in node.attribute if entry.name == "axis"), 1)


def _of_operator(node: onnx.NodeProto, weights: Mapping[str, Tensor], add: object) -> None:
    """Read the triples (tensor, scale, zero point) of an op on integers, and the pair of its result."""
    assert callable(add)
    inputs = list(node.input)
    taken: set[int] = set()
    for at, name in enumerate(inputs[:-2]):
        if at in taken or not _is_pair(inputs[at + 1 : at + 3], weights) or _is_scale(name, weights):
            continue
        axis = (0 if node.op_type == "QLinearConv" else -1) if name in weights else None
        add(name, inputs[at + 1], inputs[at + 2], axis)
        taken |= {at, at + 1, at + 2}
    for at in range(len(inputs) - 1):
        if not {at, at + 1} & taken and _is_pair(inputs[at : at + 2], weights):
            add(node.output[0], inputs[at], inputs[at + 1], None)
            return


def _of_gemm(node: onnx.NodeProto, weights: dict[str, Tensor], add: object) -> None:
    """Read the triples of a QGemm, whose integer bias has the product of both scales."""
    assert callable(add)
    inputs = list(node.input) + [""] * (9 - len(node.input))
    a, a_scale, a_zero, b, b_scale, b_zero, bias = inputs[:7]
    ends = inputs[7:9]
    is_turned = any(entry.name == "transB" and entry.i for entry in node.attribute)
    if _is_pair([a_scale, a_zero], weights) and _is_pair([b_scale, b_zero], weights):
        add(a, a_scale, a_zero, None)
        add(b, b_scale, b_zero, 0 if is_turned else 1)
        if bias:
            weights[f"{bias} scale"] = weights[a_scale].reshape(()) * weights[b_scale]
            add(bias, f"{bias} scale", None, 0)
    if _is_pair(ends, weights):
        add(node.output[0], ends[0], ends[1], None)


def _is_scale(name: str, weights: Mapping[str, Tensor]) -> bool:
    return name in weights and weights[name].is_floating_point()


def _is_pair(names: list[str], weights: Mapping[str, Tensor]) -> bool:
    scale, zero = names
    return _is_scale(scale, weights) and zero in weights and weights[zero].dtype in SMALL


def _of_products(
    node: onnx.NodeProto,
    weights: Mapping[str, Tensor],
    made_by: Mapping[str, onnx.NodeProto],
    read_by: Mapping[str, list[onnx.NodeProto]],
    grids: Mapping[str, GridNames],
    add: object,
) -> None:
    """Find the scale of the weight of a product of integers: what the product is multiplied by, beside the input's."""
    assert callable(add)
    weight = node.input[1]
    ours = grids.get(node.input[0])
    if weight not in weights or ours is None:
        return
    casts = [one for one in read_by.get(node.output[0], ()) if one.op_type == "Cast"]
    for scaled in (one for cast in casts for one in read_by.get(cast.output[0], ()) if one.op_type == "Mul"):
        for name in scaled.input:
            both = made_by.get(name)
            if both is None or both.op_type != "Mul" or ours.scale not in both.input:
                continue
            own = next((one for one in both.input if one != ours.scale), ours.scale)
            zero = node.input[3] if len(node.input) > 3 and node.input[3] else None
            add(weight, own, zero, 0 if node.op_type == "ConvInteger" else -1)
