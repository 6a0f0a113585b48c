"""An ONNX file as it lies on disk: read without its weights, checked, and its weights on request.

Reading never leaves the file's own directory and never takes more memory than the files themselves have bytes: every
tensor must hold exactly as much data as its shape says, inside the model or in a file beside it, before it is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from glassengine.errors import BackendError, CorruptError, UsageError, first_line, logger
from glassengine.extensions import require_package
from glassengine.program.onnx.tensors import bits, check_declared, check_tensors, check_texts, place, return_tensors
from glassengine.reading.files import open_regular, read_bytes

if TYPE_CHECKING:
    import onnx

INSTALL = "pip install 'glassengine[onnx]'"
MAX_BYTES = (1 << 31) - 1
"""Most bytes of the graph itself, which the format allows; weights beyond it lie in files beside the graph."""

_TORCH = {
    "FLOAT": torch.float32,
    "UINT8": torch.uint8,
    "INT8": torch.int8,
    "UINT16": torch.uint16,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
    "FLOAT16": torch.float16,
    "DOUBLE": torch.float64,
    "UINT32": torch.uint32,
    "UINT64": torch.uint64,
    "BFLOAT16": torch.bfloat16,
    "FLOAT8E4M3FN": torch.float8_e4m3fn,
    "FLOAT8E5M2": torch.float8_e5m2,
    "INT4": torch.int8,
    "UINT4": torch.uint8,
}
"""Element type -> dtype that holds its values; four-bit integers take a byte each."""


@dataclass
class OnnxFile:
    """An ONNX model on disk.

    Attributes:
        path: The file.
        model: Its content; weights that lie in other files are not read.
        with_data: Whether the file has the values of the weights; those of an engine's stored graph lie elsewhere.
        held: Weights that were read so far, or came from elsewhere.
        is_repaired: Whether sizes that the file states were forgotten: ONNX Runtime takes them at their word.
    """

    path: Path
    model: onnx.ModelProto
    with_data: bool = True
    held: dict[str, torch.Tensor] = field(default_factory=dict)
    is_repaired: bool = False

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights (initializers and constants) by name, read once; on the meta device without data.

        Raises:
            CorruptError: A file was changed since it was checked.
        """
        if not self.held:
            self.held = {name: self._tensor(tensor) for name, tensor in named_weights(self.model)}
        return self.held

    def _tensor(self, proto: onnx.TensorProto) -> torch.Tensor:
        dtype = torch_dtype(proto.data_type)
        assert dtype is not None
        if not self.with_data:
            return torch.empty(tuple(proto.dims), dtype=dtype, device="meta")
        return tensor_of(proto, self.path)


def is_onnx(spec: Any) -> bool:
    """Whether `spec` names an ONNX file."""
    return isinstance(spec, (str, Path)) and Path(spec).suffix.lower() == ".onnx"


def torch_dtype(element_type: int) -> torch.dtype | None:
    """Return the dtype for an ONNX element type (`TensorProto.DataType`); None where torch has none."""
    import onnx

    try:
        return _TORCH.get(onnx.TensorProto.DataType.Name(element_type))
    except ValueError:
        return None


def read_onnx(path: str | Path, *, with_data: bool = True) -> OnnxFile:
    """Read and check an ONNX file.

    Args:
        path: The file; its weights may lie in other files of its directory.
        with_data: False for a graph whose weights were taken out.

    Raises:
        BackendError: The package onnx is not installed.
        UsageError: There is no such file, or it is not an ONNX model.
        CorruptError: A weight lies outside of the directory, is not there, or has another size than it says; or a name
            is not text.
    """
    onnx = require_package("onnx", "an ONNX file cannot be read here", INSTALL, BackendError)
    path = Path(path).expanduser()
    if not path.is_file():
        near = sorted(str(p) for p in path.parent.glob("*.onnx")) if path.parent.is_dir() else []
        raise UsageError(f"no such file: {path}", expected=near or None, hint="MODEL may be an ONNX file: model.onnx")
    raw = read_bytes(path, most=MAX_BYTES)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(raw)
    except Exception as error:  # of protobuf, which has no types and several implementations
        raise UsageError(f"{path} is not an ONNX model", got=str(error)) from error
    if not model.ir_version or not model.graph.output or not model.opset_import:
        raise UsageError(
            f"{path} is not an ONNX model", got="no graph with outputs and an opset", hint="a file of onnx.save"
        )
    check_texts(model, path)
    check_declared(model, path)
    is_repaired = _free_sizes(model.graph)
    if with_data:
        model = _without_functions(model, path)
        return_tensors(model.graph, path.name)
        check_tensors(model, path)
    return OnnxFile(path, model, with_data, is_repaired=is_repaired)


def _without_functions(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Return the model with the nodes of its functions instead of calls: their values have a name, and a site."""
    import onnx
    from onnx import inliner

    if not model.functions:
        return model
    bare = onnx.ModelProto()
    _copy_without(model, bare, "graph")
    _copy_without(model.graph, bare.graph, "initializer")
    # Names of weights are taken; their data need not be copied.
    bare.graph.initializer.extend(
        onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        for tensor in model.graph.initializer
    )
    try:
        inlined = inliner.inline_local_functions(bare)
    except Exception as error:  # of a library that raises what it likes, for what it does not take
        logger.warning("%s: its functions are judged as wholes: %s", path.name, first_line(error))
        return model
    del inlined.graph.initializer[:]
    inlined.graph.initializer.extend(model.graph.initializer)
    return inlined


def _free_sizes(graph: onnx.GraphProto) -> bool:
    """Forget invalid sizes, and return whether there were any: some exporters write a dynamic size as -1 or 0."""
    found = False
    for value in (*graph.input, *graph.output, *graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.HasField("dim_value") and size.dim_value <= 0:
                size.ClearField("dim_value")
                found = True
    return found


def named_weights(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Yield (name, tensor) of every initializer and `Constant` of the graph that torch has a dtype for."""
    for tensor in model.graph.initializer:
        if torch_dtype(tensor.data_type) is not None:
            yield tensor.name, tensor
    for node in model.graph.node:
        tensor = constant_of(node)
        if tensor is not None and torch_dtype(tensor.data_type) is not None:
            yield node.output[0], tensor


def bare_model(model: onnx.ModelProto, *, most_bytes: int = 0) -> onnx.ModelProto:
    """Return a copy of a model whose weights of more than `most_bytes` have a type, but no data; these are not copied.

    Graphs within graphs and functions are kept as they are.
    """
    import onnx

    bare = onnx.ModelProto()
    _copy_without(model, bare, "graph")
    _copy_without(model.graph, bare.graph, "initializer")
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) <= most_bytes and tensor.ByteSize() <= 2 * most_bytes and not tensor.external_data:
            bare.graph.initializer.append(tensor)
        else:
            bare.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    return bare


def _copy_without(source: Any, target: Any, left_out: str) -> None:
    for descriptor, value in source.ListFields():
        if descriptor.name == left_out:
            continue
        if hasattr(value, "extend"):
            getattr(target, descriptor.name).extend(value)
        elif hasattr(value, "CopyFrom"):
            getattr(target, descriptor.name).CopyFrom(value)
        else:
            setattr(target, descriptor.name, value)


def constant_of(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """Return the tensor that a node holds, if it is a `Constant` of numbers."""
    from onnx import helper

    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx") or len(node.attribute) != 1:
        return None
    attribute = node.attribute[0]
    if attribute.name == "value":
        tensor: onnx.TensorProto = attribute.t
        return tensor
    kinds = {"value_float": (1, False), "value_floats": (1, True), "value_int": (7, False), "value_ints": (7, True)}
    if attribute.name not in kinds:
        return None
    element_type, is_list = kinds[attribute.name]
    value = helper.get_attribute_value(attribute)
    values = list(value) if is_list else [value]
    return helper.make_tensor(node.output[0], element_type, [len(values)] if is_list else [], values)


def tensor_of(proto: onnx.TensorProto, path: Path) -> torch.Tensor:
    """Return a tensor of the checked model at `path`, as memory of its own."""
    import onnx
    from onnx import numpy_helper

    dtype = torch_dtype(proto.data_type)
    assert dtype is not None
    if proto.data_location == onnx.TensorProto.EXTERNAL:
        file, offset, size = place(proto, path)
        with open_regular(file) as stream:
            stream.seek(offset)
            raw = bytearray(stream.read(size))
        if len(raw) != size:
            raise CorruptError(f"{file} is shorter than the weight {proto.name!r}", got=f"{len(raw):,} bytes")
    elif proto.HasField("raw_data"):
        raw = bytearray(proto.raw_data)
    else:
        array = numpy_helper.to_array(proto)
        whole = array.astype("int8" if dtype is torch.int8 else "uint8") if bits(proto) < 8 else array
        raw = bytearray(whole.tobytes())
        return (torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)).reshape(tuple(proto.dims))
    if bits(proto) < 8:
        return _unpacked(raw, math.prod(proto.dims), dtype).reshape(tuple(proto.dims))
    return (torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)).reshape(tuple(proto.dims))


def fill(model: onnx.ModelProto, weights: Mapping[str, torch.Tensor]) -> None:
    """Give the initializers of a graph without data their values."""
    for proto in model.graph.initializer:
        if proto.name in weights and not proto.HasField("raw_data"):
            raw = weights[proto.name].detach().contiguous().flatten()
            raw = _packed(raw) if bits(proto) < 8 else raw
            proto.raw_data = raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b""


def _packed(values: torch.Tensor) -> torch.Tensor:
    """Two four-bit integers a byte, the lower half first."""
    halves = torch.nn.functional.pad(values.view(torch.uint8) & 15, (0, values.numel() % 2))
    return halves[::2] | halves[1::2] << 4


def _unpacked(raw: bytearray, number: int, dtype: torch.dtype) -> torch.Tensor:
    """Two four-bit integers a byte, the lower half first."""
    pairs = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    values = torch.stack([pairs & 15, pairs >> 4], -1).flatten()[:number].to(torch.int8)
    return torch.where(values > 7, values - 16, values) if dtype is torch.int8 else values.to(dtype)


def free_names(graph: onnx.GraphProto) -> list[str]:
    """Return the values that a graph, or a graph within it, reads from outside."""
    own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    free: dict[str, None] = {}
    for node in graph.node:
        read = list(node.input)
        for entry in node.attribute:
            for inner in [entry.g] if entry.HasField("g") else entry.graphs:
                read += free_names(inner)
        free |= dict.fromkeys(name for name in read if name and name not in own)
        own.update(node.output)
    return [*free, *(value.name for value in graph.output if value.name not in own and value.name not in free)]
