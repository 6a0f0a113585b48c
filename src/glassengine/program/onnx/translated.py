"""An ONNX file and its graph of `torch.fx`, and the file without its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.export import ExportedProgram
from torch.fx import Node

from glassengine.extensions import plugin
from glassengine.program.onnx.file import OnnxFile, bare_model
from glassengine.program.onnx.types import UNKNOWN_SIZE, ValueType, value_types

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class TranslatedFile:
    """An ONNX file and its graph of `torch.fx`.

    Attributes:
        file: The file.
        exported: The graph, with the weights of the file.
        types: Value -> type, as far as it is known.
        values: Value -> node.
        protos: Node that yields a value -> the ONNX node, and its number in the file.
        inputs: Names of the inputs, weights left out, in order.
        results: Name of each result -> node, in order.
    """

    file: OnnxFile
    exported: ExportedProgram
    types: dict[str, ValueType]
    values: dict[str, Node]
    protos: dict[Node, tuple[int, onnx.NodeProto]]
    inputs: tuple[str, ...]
    results: dict[str, Node]


def translate_file(file: OnnxFile) -> TranslatedFile:
    """Translate an ONNX file, by the plugin `onnx`.

    Raises:
        UsageError: The graph is not valid, or takes or returns something that is not a tensor; or the plugin is not
            installed.
    """
    translated: TranslatedFile = plugin("onnx.translate").translated(file)
    return translated


def metadata_of(proto: onnx.NodeProto, key: str) -> str | None:
    """Return what an exporter noted of a node."""
    return next((entry.value for entry in proto.metadata_props if entry.key == key), None)


def without_data(file: OnnxFile, results: Sequence[str]) -> onnx.ModelProto:
    """Return the graph of a file without its weights, with the types of its values and `results` as its outputs."""
    model = bare_model(file.model)
    types = value_types(file)
    del model.graph.output[:]
    model.graph.output.extend(_value_info(name, types[name]) for name in results)
    known = {value.name for value in (*model.graph.input, *model.graph.value_info, *model.graph.output)}
    model.graph.value_info.extend(_value_info(name, kind) for name, kind in types.items() if name not in known)
    return model


def _value_info(name: str, kind: ValueType) -> onnx.ValueInfoProto:
    from onnx import helper

    shape = None if kind.shape is None else [None if size == UNKNOWN_SIZE else size for size in kind.shape]
    return helper.make_tensor_value_info(name, kind.element_type, shape)
