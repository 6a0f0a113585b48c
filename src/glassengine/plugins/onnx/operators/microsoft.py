"""Operators of ONNX Runtime's own domain, as models of the GenAI builder have them, in terms of others.

    MatMulNBits                       a product with the weight that its blocks stand for
    GatherBlockQuantized              rows of integers times rows of scales
    SkipSimplifiedLayerNormalization  a sum, then a normalization; SkipLayerNormalization likewise
    RotaryEmbedding                   the operator of the standard, with its inputs in another order
    GroupQueryAttention               products, masks and rotations (`group_query`)
    QMoE                              the chosen experts' products with dequantized weights (`experts`)

A product at accuracy level 4 may read rounded activations, which a program does not know: it stays ONNX Runtime's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from glassengine.plugins.onnx.operators.experts import experts
from glassengine.plugins.onnx.operators.group_query import group_query
from glassengine.plugins.onnx.operators.table import Call, OnnxNode, translation
from glassengine.program.onnx.operators.function import OnnxFunction
from glassengine.program.onnx.stored.types import ValueType

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx

DOMAIN = "com.microsoft"
_INT8 = 4
_BITS = (2, 4, 8)
_PARTS = 4
"""Results of a normalization that is fused with a sum: the last is the sum."""


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    parts: Tensor = (packed.to(torch.uint8)[..., None] >> shifts) & (2**bits - 1)
    return parts.flatten(-2)


def _points(zero: Tensor | None, rows: int, blocks: int, bits: int) -> Tensor:
    if zero is None:
        return torch.full((rows, blocks), 2 ** (bits - 1))
    if zero.is_floating_point():
        return zero.reshape(rows, blocks)
    return _unpacked(zero.reshape(rows, -1), bits)[:, :blocks]


def _weight(b: Tensor, scale: Tensor, zero: Tensor | None, *, bits: int, block: int, rows: int, columns: int) -> Tensor:
    blocks = -(-columns // block)
    at = torch.arange(columns) // block
    integers = _unpacked(b.reshape(rows, -1), bits)[:, :columns].to(scale.dtype)
    points = _points(zero, rows, blocks, bits).to(scale.dtype)
    return ((integers - points[:, at]) * scale.reshape(rows, blocks)[:, at]).T


@translation("com.microsoft.MatMulNBits")
def _matmul_nbits(node: OnnxNode) -> Call:
    bits = node.attribute("bits", 4)
    if node.attribute("accuracy_level", 0) == _INT8 or node.input(4) is not None or bits not in _BITS:
        raise NotImplementedError("a product that may round its activations, or reorders them")
    options = {"bits": bits, "block": node.attribute("block_size")}
    options |= {"rows": node.attribute("N"), "columns": node.attribute("K")}

    def dequantized(b: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        return _weight(b, scale, zero, **options)

    weight = node.helper(OnnxFunction(dequantized, "dequantize"), node.inputs[1], node.inputs[2], node.input(3))
    if node.input(5) is not None:
        return OnnxFunction(_with_bias, "addmm"), (node.input(5), node.inputs[0], weight), {}
    return torch.ops.aten.matmul.default, (node.inputs[0], weight), {}


def _with_bias(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return bias + x @ weight


@translation("com.microsoft.GatherBlockQuantized")
def _gather_blocks(node: OnnxNode) -> Call:
    bits, block = node.attribute("bits", 4), node.attribute("block_size", 128)
    axes = (node.attribute("gather_axis", 0), node.attribute("quantize_axis", 1))
    rank = len(node.shapes[0] or ())
    is_packed = node.element_type(0) == 2
    if axes[0] != 0 or axes[1] not in (1, -1) or rank != 2 or bits not in _BITS:
        raise NotImplementedError("blocks along another axis")

    def integers(data: Tensor, index: Tensor, zero: Tensor | None, like: Tensor) -> Tensor:
        rows = data[index.long()]
        whole = (_unpacked(rows, bits) if is_packed else rows).to(like.dtype)
        at = torch.arange(whole.shape[-1]) // block
        number = len(data)
        blocks = int(at[-1]) + 1
        empty = torch.zeros(number, blocks)
        points = empty if zero is None and not is_packed else _points(zero, number, blocks, bits)
        return whole - points.to(like.dtype)[index.long()][..., at]

    def scales(scale: Tensor, index: Tensor, whole: Tensor) -> Tensor:
        return scale.reshape(scale.shape[0], -1)[index.long()][..., torch.arange(whole.shape[-1]) // block]

    data, index, scale, zero = node.inputs[0], node.inputs[1], node.inputs[2], node.input(3)
    whole = node.helper(OnnxFunction(integers, "dequantize"), data, index, zero, scale)
    steps = node.helper(OnnxFunction(scales, "index"), scale, index, whole)
    return torch.ops.aten.mul.Tensor, (whole, steps), {}


def definition_of_runtime(proto: onnx.NodeProto, types: Mapping[str, ValueType]) -> onnx.FunctionProto | None:
    """Return what an operator of ONNX Runtime is, in terms of others; None where that is not known."""
    if proto.domain != DOMAIN:
        return None
    attributes = {entry.name: entry for entry in proto.attribute}
    if proto.op_type in ("SkipSimplifiedLayerNormalization", "SkipLayerNormalization"):
        return _sum_and_norm(proto, attributes)
    if proto.op_type == "RotaryEmbedding":
        return _rotation(proto, attributes, types)
    if proto.op_type == "GroupQueryAttention":
        return group_query(proto, attributes, types, DOMAIN)
    if proto.op_type == "QMoE":
        return experts(proto, attributes, types, DOMAIN)
    return None


def _sum_and_norm(proto: onnx.NodeProto, attributes: Mapping[str, Any]) -> onnx.FunctionProto | None:
    from onnx import helper

    is_simple = proto.op_type.startswith("SkipSimplified")
    names = ["x", "skip", "gamma", *(["bias"] if is_simple else ["beta", "bias"])][: len(proto.input)]
    given = {own for own, name in zip(names, proto.input, strict=True) if name}
    if any(proto.output[1:_PARTS][:2]) or not {"x", "skip", "gamma"} <= given:
        return None
    nodes = [helper.make_node("Add", ["x", "skip"], ["plain"])]
    if "bias" in given:
        nodes.append(helper.make_node("Add", ["plain", "bias"], ["total"]))
    total = "total" if "bias" in given else "plain"
    kind = "SimplifiedLayerNormalization" if is_simple else "LayerNormalization"
    read = [total, "gamma", *(["beta"] if "beta" in given else [])]
    norm = helper.make_node(
        kind, read, ["y"], axis=-1, epsilon=attributes["epsilon"].f if "epsilon" in attributes else 1e-12
    )
    results = ["y", total, total, total][: len(proto.output)]
    return helper.make_function(DOMAIN, proto.op_type, names, results, [*nodes, norm], [helper.make_opsetid("", 17)])


def _rotation(
    proto: onnx.NodeProto, attributes: Mapping[str, Any], types: Mapping[str, ValueType]
) -> onnx.FunctionProto | None:
    from onnx import helper

    ranks = [types[name].shape if name in types else None for name in proto.input[:2]]
    known = {"interleaved", "num_heads", "rotary_embedding_dim"}
    kept = {name: entry.i for name, entry in attributes.items() if name in known}
    rank = len(ranks[0] or ())
    if len(ranks[1] or ()) != 2 or (rank == 3 and not kept.get("num_heads")) or rank not in (3, 4):
        return None
    node = helper.make_node("RotaryEmbedding", ["x", "cos", "sin", "positions"], ["y"], **kept)
    names = ["x", "positions", "cos", "sin"]
    return helper.make_function(DOMAIN, proto.op_type, names, ["y"], [node], [helper.make_opsetid("", 23)])
