"""An ONNX file and its graph of `torch.fx`, the types of its values, and the file without its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from glassengine.errors import logger
from glassengine.extensions import plugin
from glassengine.program.onnx.file import OnnxFile, bare_model, torch_dtype

if TYPE_CHECKING:
    import onnx

UNKNOWN_SIZE = "?"
_SMALL = 1024
"""Bytes of weights that may be shapes, axes and the like, which the types of values depend on."""


@dataclass(frozen=True)
class ValueType:
    """Element type and shape of one value; the shape is None where even its rank is unknown.

    Sizes are numbers, names of dynamic sizes, or `UNKNOWN_SIZE`.
    """

    element_type: int
    shape: tuple[int | str, ...] | None

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype; None where torch has none."""
        return torch_dtype(self.element_type)


def value_types(file: OnnxFile) -> dict[str, ValueType]:
    """Return value -> type, for the values of the outer graph that are tensors of a known type."""
    found = _stated(_inferred(bare_model(file.model, most_bytes=_SMALL)).graph)
    wanted = [name for node in file.model.graph.node for name in node.output if name and name not in found]
    # Operators outside of the standard are known to the runtime that defines them.
    return found | (_asked(file, wanted) if wanted and file.with_data else {})


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    import onnx

    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception as error:
        # What is inconsistent is refused when it is built, by the runtime; the types that are stated will do for names.
        logger.warning("types of the graph cannot be inferred: %s", str(error).splitlines()[0])
        return model


def _stated(graph: onnx.GraphProto) -> dict[str, ValueType]:
    types: dict[str, ValueType] = {}
    for tensor in graph.initializer:
        types[tensor.name] = ValueType(tensor.data_type, tuple(tensor.dims))
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor_type = value.type.tensor_type
        if not value.type.HasField("tensor_type") or not tensor_type.elem_type:
            continue
        shape: tuple[int | str, ...] | None = None
        if tensor_type.HasField("shape"):
            dims = tensor_type.shape.dim
            shape = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or UNKNOWN_SIZE for d in dims)
        types[value.name] = ValueType(tensor_type.elem_type, shape)
    return types


def _asked(file: OnnxFile, names: list[str]) -> dict[str, ValueType]:
    """Ask ONNX Runtime, if it is here, for the types of values of operators that are its own."""
    from glassengine.program.onnx.session import open_session

    try:
        session = open_session(file, names)
    except Exception as error:
        logger.warning("types of %d values are unknown: %s", len(names), str(error).splitlines()[0])
        return {}
    types = {}
    for output in session.get_outputs():
        element_type = _CALLED.get(output.type)
        if element_type is not None:
            sizes = tuple(UNKNOWN_SIZE if size is None else size for size in output.shape or ())
            types[output.name] = ValueType(element_type, sizes)
    return types


ELEMENT_TYPES = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
}
"""dtype -> ONNX element type (`TensorProto.DataType`), of what a program may take or return."""

_CALLED = {
    "tensor(float)": 1,
    "tensor(double)": 11,
    "tensor(uint16)": 4,
    "tensor(uint32)": 12,
    "tensor(uint64)": 13,
    "tensor(bfloat16)": 16,
} | {f"tensor({str(dtype).removeprefix('torch.')})": number for dtype, number in ELEMENT_TYPES.items()}
"""What ONNX Runtime calls a type -> ONNX element type."""


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
