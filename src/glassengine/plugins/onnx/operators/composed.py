"""An operator of ONNX Runtime's own domain as a function of standard operators: its inputs by name, and its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx


def given_inputs(proto: onnx.NodeProto, names: Sequence[str]) -> dict[str, str] | None:
    """Return name -> value of the inputs that a node has; None where it has more than are known.

    Args:
        proto: The node.
        names: Of all inputs, in order.
    """
    if len(proto.input) > len(names):
        return None
    return {name: value for name, value in zip(names, proto.input, strict=False) if value}


def composed(
    proto: onnx.NodeProto, domain: str, names: Sequence[str], results: Sequence[str], lines: Sequence[str]
) -> onnx.FunctionProto:
    """Return the function of a node.

    Args:
        proto: The node.
        domain: Of the operator.
        names: Of all inputs, in order; the function has as many as the node.
        results: Names of the node's results.
        lines: Of ONNX's text format.
    """
    from onnx import parser

    text = f"""
        <opset_import: ["" : 18], domain: "{domain}">
        {proto.op_type} ({", ".join(names[: len(proto.input)])}) => ({", ".join(results)}) {{
        {chr(10).join(lines)}
        }}"""
    function: onnx.FunctionProto = parser.parse_function(text)
    return function
