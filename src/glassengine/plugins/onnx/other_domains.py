"""Operators of other domains in terms of standard ones: of ONNX Runtime, of `ai.onnx.ml`; and bodies of functions.

    MatMulNBits                       a product with the weight that its blocks stand for
    GatherBlockQuantized              rows of integers times rows of scales
    SkipSimplifiedLayerNormalization  a sum, then a normalization; SkipLayerNormalization likewise
    RotaryEmbedding                   the operator of the standard, with its inputs in another order
    GroupQueryAttention               products, masks and rotations (`group_query`)
    QMoE                              the chosen experts' products with dequantized weights (`experts`)

A product at accuracy level 4 may read rounded activations, which a program does not know: it stays ONNX Runtime's own.

Trees and support vector machines are evaluated by the reference implementations of onnx (see `fallback`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TypeProto, helper, numpy_helper
from torch import Tensor

from glassengine.errors import logger
from glassengine.plugins.onnx.experts import experts
from glassengine.plugins.onnx.group_query import group_query
from glassengine.plugins.onnx.table import Call, OnnxNode, translation
from glassengine.program.onnx.function import TABULAR, OnnxFunction
from glassengine.program.onnx.grids import unpacked
from glassengine.program.onnx.translated import UNKNOWN_SIZE, ValueType

DOMAIN = "com.microsoft"
_INT8 = 4
_BITS = (2, 4, 8)
_PARTS = 4
"""Results of a normalization that is fused with a sum: the last is the sum."""


def _points(zero: Tensor | None, rows: int, blocks: int, bits: int) -> Tensor:
    if zero is None:
        return torch.full((rows, blocks), 2 ** (bits - 1))
    if zero.is_floating_point():
        return zero.reshape(rows, blocks)
    return unpacked(zero.reshape(rows, -1), bits)[:, :blocks]


def _weight(b: Tensor, scale: Tensor, zero: Tensor | None, *, bits: int, block: int, rows: int, columns: int) -> Tensor:
    blocks = -(-columns // block)
    at = torch.arange(columns) // block
    integers = unpacked(b.reshape(rows, -1), bits)[:, :columns].to(scale.dtype)
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
        whole = (unpacked(rows, bits) if is_packed else rows).to(like.dtype)
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
    ranks = [types[name].shape if name in types else None for name in proto.input[:2]]
    known = {"interleaved", "num_heads", "rotary_embedding_dim"}
    kept = {name: entry.i for name, entry in attributes.items() if name in known}
    rank = len(ranks[0] or ())
    if len(ranks[1] or ()) != 2 or (rank == 3 and not kept.get("num_heads")) or rank not in (3, 4):
        return None
    node = helper.make_node("RotaryEmbedding", ["x", "cos", "sin", "positions"], ["y"], **kept)
    names = ["x", "positions", "cos", "sin"]
    return helper.make_function(DOMAIN, proto.op_type, names, ["y"], [node], [helper.make_opsetid("", 23)])


_FLOAT = 1
_MOST_OPSET = 21
_TRANSFORMS = {"NONE": "Identity", "LOGISTIC": "Sigmoid", "SOFTMAX": "Softmax"}


def definition_of(proto: onnx.NodeProto) -> onnx.FunctionProto | None:
    """Return what an operator is made of; None where it is none of these, or of a form that has no such definition."""
    known = _DEFINITIONS.get(proto.op_type) if proto.domain == TABULAR else None
    if known is None:
        return None
    attributes = {entry.name: helper.get_attribute_value(entry) for entry in proto.attribute}
    nodes = known(attributes)
    if nodes is None:
        return None
    outputs = ["label", "y"] if proto.op_type == "LinearClassifier" else ["y"]
    opsets = [helper.make_opsetid("", _MOST_OPSET)]
    return helper.make_function(TABULAR, proto.op_type, ["x"], outputs, nodes, opsets)


def _node(op: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), [output], **attributes)


def _held(name: str, value: Any) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(value), name))


def _floats(values: Sequence[float]) -> Any:
    return np.asarray(values, np.float32)


_CAST = ("Cast", "x", "f")


def _scaler(attributes: Mapping[str, Any]) -> list[onnx.NodeProto] | None:
    return [
        _node(*_CAST, to=_FLOAT),
        _held("offset", _floats(attributes.get("offset", [0.0]))),
        _held("scale", _floats(attributes.get("scale", [1.0]))),
        _node("Sub", "f offset", "moved"),
        _node("Mul", "moved scale", "y"),
    ]


def _normalizer(attributes: Mapping[str, Any]) -> list[onnx.NodeProto] | None:
    kind = attributes.get("norm", b"MAX").decode()
    how = {"MAX": "ReduceMax", "L1": "ReduceL1", "L2": "ReduceL2"}.get(kind)
    if how is None:
        return None
    return [
        _node(*_CAST, to=_FLOAT),
        _held("axes", np.array([-1])),
        _held("zero", np.float32(0)),
        _held("one", np.float32(1)),
        _node(how, "f axes", "norm", keepdims=1),
        _node("Equal", "norm zero", "empty"),
        _node("Where", "empty one norm", "divisor"),
        _node("Div", "f divisor", "y"),
    ]


def _scores(attributes: Mapping[str, Any], rows: int) -> list[onnx.NodeProto] | None:
    matrix = _floats(attributes["coefficients"])
    if not rows or matrix.size % rows:
        return None
    shifts = _floats(attributes.get("intercepts") or [0.0] * rows)
    return [
        _node(*_CAST, to=_FLOAT),
        _held("matrix", np.ascontiguousarray(matrix.reshape(rows, -1).T)),
        _held("shift", shifts),
        _node("MatMul", "f matrix", "product"),
        _node("Add", "product shift", "scores"),
    ]


def _regressor(attributes: Mapping[str, Any]) -> list[onnx.NodeProto] | None:
    if attributes.get("post_transform", b"NONE") != b"NONE":
        return None
    nodes = _scores(attributes, attributes.get("targets", 1))
    return None if nodes is None else [*nodes, _node("Identity", "scores", "y")]


def _classifier(attributes: Mapping[str, Any]) -> list[onnx.NodeProto] | None:
    labels = attributes.get("classlabels_ints") or list(range(len(attributes.get("classlabels_strings") or [])))
    shifts = attributes.get("intercepts") or []
    transform = _TRANSFORMS.get(attributes.get("post_transform", b"NONE").decode())
    if len(labels) != len(shifts) or transform is None:
        return None  # one score for two classes, say
    nodes = _scores(attributes, len(labels))
    if nodes is None:
        return None
    # A label that is text is no tensor here; its number stands for it.
    return [
        *nodes,
        _held("labels", np.asarray(labels, np.int64)),
        _node("ArgMax", "scores", "best", axis=1, keepdims=0),
        _node("Gather", "labels best", "label"),
        _node(transform, "scores", "y"),
    ]


_DEFINITIONS: dict[str, Callable[[Mapping[str, Any]], list[onnx.NodeProto] | None]] = {
    "Scaler": _scaler,
    "Normalizer": _normalizer,
    "LinearRegressor": _regressor,
    "LinearClassifier": _classifier,
}

STANDARD = ("", "ai.onnx")
_NOT_BY_DEFINITION = frozenset({"Bernoulli", "SequenceMap"})
"""Operators that are random, or have no tensors."""


def definition(proto: onnx.NodeProto, opset: int, types: Mapping[str, ValueType]) -> onnx.FunctionProto | None:
    """Return what the standard defines an operator by, in terms of others; None where it is no such operator."""
    if proto.domain not in STANDARD or proto.op_type in _NOT_BY_DEFINITION:
        return definition_of(proto) or definition_of_runtime(proto, types)
    try:
        schema: Any = onnx.defs.get_schema(proto.op_type, opset)
        if schema.has_context_dependent_function:
            read = [_type_proto(types.get(name)) for name in proto.input]
            found = schema.get_context_dependent_function(proto.SerializeToString(), read)
        elif schema.has_function:
            found = schema.function_body.SerializeToString()
        else:
            return None
    except Exception as error:  # of a checker that has no types, for a node that it does not take
        logger.debug("%s is not expanded: %s", proto.op_type, error)
        return None
    function = onnx.FunctionProto()
    function.ParseFromString(found)
    named = {entry.name for entry in (*function.attribute_proto, *proto.attribute)}
    defaults = (attribute.default_value for attribute in schema.attributes.values())
    function.attribute_proto.extend(value for value in defaults if value.name and value.name not in named)
    return function if function.node else None


def _type_proto(kind: ValueType | None) -> bytes:
    if kind is None:
        return bytes(TypeProto().SerializeToString())
    shape = None if kind.shape is None else [None if size == UNKNOWN_SIZE else size for size in kind.shape]
    return bytes(helper.make_tensor_type_proto(kind.element_type, shape).SerializeToString())


def with_attributes(node: onnx.NodeProto, given: Mapping[str, onnx.AttributeProto]) -> onnx.NodeProto:
    """Return a node of a function with the attributes of a call in place of the references to them."""
    copied = onnx.NodeProto()
    copied.CopyFrom(node)
    del copied.attribute[:]
    for entry in node.attribute:
        if not entry.ref_attr_name:
            copied.attribute.append(entry)
        elif entry.ref_attr_name in given:
            filled = copied.attribute.add()
            filled.CopyFrom(given[entry.ref_attr_name])
            filled.name = entry.name
    return copied
