"""The table of translations: ONNX operator -> how to call torch for a node of it.

A translation gets the node and returns what to call with which arguments. Most operators need no more than a function
that takes the node's inputs in order and its attributes by name.

An operator of ONNX Runtime's own domain as a function of standard operators: its inputs by name, and its text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import parser
from torch.fx import Node

from glassengine.program.onnx.function import OnnxFunction


@dataclass
class OnnxNode:
    """One node that is being translated.

    Attributes:
        proto: As it is in the file.
        inputs: Values in order; None where an optional one is left out.
        attributes: By name: numbers, strings, lists, graphs.
        opset: Version of the operator set.
        shapes: Shape of each input, as far as it is known: sizes or names; None where it is unknown.
        element_types: ONNX element type of each input; 0 where it is unknown, or the input is left out.
        helper: Adds a call to the graph that is a part of this node and no tensor of the file.
    """

    proto: onnx.NodeProto
    inputs: list[Node | None]
    attributes: Mapping[str, Any]
    opset: int
    shapes: list[tuple[int | str, ...] | None]
    element_types: list[int]
    helper: Callable[..., Node]

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        return self.attributes.get(name, default)

    def input(self, index: int) -> Node | None:
        """Return an input; None where it is left out."""
        return self.inputs[index] if index < len(self.inputs) else None

    def element_type(self, index: int) -> int:
        """Return the element type of an input; 0 where it is unknown, or left out."""
        return self.element_types[index] if index < len(self.element_types) else 0


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""What to call, positional and keyword arguments."""
Translation = Callable[[OnnxNode], Call]

TRANSLATIONS: dict[str, Translation] = {}


def translation(*op_types: str) -> Callable[[Translation], Translation]:
    """Register what a function makes of nodes of `op_types`."""

    def register(function: Translation) -> Translation:
        TRANSLATIONS.update(dict.fromkeys(op_types, function))
        return function

    return register


def computes(name: str, *op_types: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of a node's inputs, in order, and its attributes, by name.

    Args:
        name: ATen op whose rounding the function has.
        op_types: Operators.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        called = OnnxFunction(function, name)
        TRANSLATIONS.update(dict.fromkeys(op_types, lambda node: (called, tuple(node.inputs), dict(node.attributes))))
        return function

    return register


def same(overloads: Mapping[str, Callable[..., Any]]) -> None:
    """Register operators that an op of ATen computes from the same inputs."""

    def register(op_type: str, overload: Callable[..., Any]) -> None:
        TRANSLATIONS[op_type] = lambda node: (overload, tuple(node.inputs), {})

    for op_type, overload in overloads.items():
        register(op_type, overload)


def given_inputs(proto: onnx.NodeProto, names: Sequence[str]) -> dict[str, str] | None:
    """Return name -> value of the inputs that a node has; None where it has more than are known."""
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
    text = f"""
        <opset_import: ["" : 18], domain: "{domain}">
        {proto.op_type} ({", ".join(names[: len(proto.input)])}) => ({", ".join(results)}) {{
        {chr(10).join(lines)}
        }}"""
    function: onnx.FunctionProto = parser.parse_function(text)
    return function
