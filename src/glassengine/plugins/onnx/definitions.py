"""Definitions of ONNX operators by others, and the bodies of functions put in place of their calls."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from glassengine.plugins.onnx.operators.microsoft import definition_of_runtime
from glassengine.plugins.onnx.operators.tabular import definition_of
from glassengine.program.onnx.stored.types import UNKNOWN_SIZE, ValueType

if TYPE_CHECKING:
    import onnx

logger = logging.getLogger("glassengine")

STANDARD = ("", "ai.onnx")
_NOT_BY_DEFINITION = frozenset({"Bernoulli", "SequenceMap"})
"""Operators that are random, or have no tensors."""


def definition(proto: onnx.NodeProto, opset: int, types: Mapping[str, ValueType]) -> onnx.FunctionProto | None:
    """Return what the standard defines an operator by, in terms of others; None where it is no such operator."""
    import onnx

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
    from onnx import TypeProto, helper

    if kind is None:
        return bytes(TypeProto().SerializeToString())
    shape = None if kind.shape is None else [None if size == UNKNOWN_SIZE else size for size in kind.shape]
    return bytes(helper.make_tensor_type_proto(kind.element_type, shape).SerializeToString())


def with_attributes(node: onnx.NodeProto, given: Mapping[str, onnx.AttributeProto]) -> onnx.NodeProto:
    """Return a node of a function with the attributes of a call in place of the references to them."""
    import onnx

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
