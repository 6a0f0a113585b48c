"""Types of the values of an ONNX graph: inferred, without data, from what the file states."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from glassengine.program.onnx.file import OnnxFile, bare_model, torch_dtype

if TYPE_CHECKING:
    import onnx

logger = logging.getLogger("glassengine")

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
