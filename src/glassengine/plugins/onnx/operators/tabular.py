"""Operators of `ai.onnx.ml` in terms of standard ones: what skl2onnx writes of scalers and linear models.

Trees and support vector machines are evaluated by the reference implementations of onnx (see `fallback`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from glassengine.program.onnx.operators.fallback import TABULAR

if TYPE_CHECKING:
    import onnx

_FLOAT = 1
_MOST_OPSET = 21
_TRANSFORMS = {"NONE": "Identity", "LOGISTIC": "Sigmoid", "SOFTMAX": "Softmax"}


def definition_of(proto: onnx.NodeProto) -> onnx.FunctionProto | None:
    """Return what an operator is made of; None where it is none of these, or of a form that has no such definition."""
    from onnx import helper

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
    from onnx import helper

    return helper.make_node(op, inputs.split(), [output], **attributes)


def _held(name: str, value: Any) -> onnx.NodeProto:
    from onnx import helper, numpy_helper

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
