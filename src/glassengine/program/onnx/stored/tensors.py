"""Tensors as an ONNX file stores them: each holds what its shape says, in the file or in one beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from glassengine.errors import CorruptError

if TYPE_CHECKING:
    import onnx

_BITS = {"INT4": 4, "UINT4": 4}
# With an asterisk it is a place in memory, which runtimes read without looking for a file.
_NO_PLACE = frozenset("\\\0*")


def _tensors(message: Any) -> Iterator[onnx.TensorProto]:
    """Yield every tensor of a model: of graphs within graphs and of functions, too."""
    import onnx

    waiting = [message]
    while waiting:
        part = waiting.pop()
        if isinstance(part, onnx.TensorProto):
            yield part
        elif isinstance(part, onnx.SparseTensorProto):
            raise CorruptError("sparse weights are not read", got=part.values.name, expected="dense initializers")
        elif isinstance(part, onnx.ModelProto):
            waiting += [part.graph, *part.functions]
        elif isinstance(part, onnx.GraphProto):
            waiting += [*part.initializer, *part.sparse_initializer, *part.node]
        elif isinstance(part, (onnx.NodeProto, onnx.FunctionProto)):
            waiting += part.attribute if isinstance(part, onnx.NodeProto) else [*part.node, *part.attribute_proto]
        elif isinstance(part, onnx.AttributeProto):
            waiting += [part.t] if part.HasField("t") else []
            waiting += [part.g] if part.HasField("g") else []
            waiting += [*part.tensors, *part.graphs, *part.sparse_tensors]
            waiting += [part.sparse_tensor] if part.HasField("sparse_tensor") else []


def check_tensors(model: onnx.ModelProto, path: Path) -> None:
    """Refuse a model with a tensor whose data is not there, not its own, or not as much as its shape says."""
    for tensor in _tensors(model):
        _check(tensor, path)


def _check(proto: onnx.TensorProto, path: Path) -> None:
    """Refuse a tensor whose data is not there, not its own, or not as much as its shape says."""
    import onnx

    name = proto.name or "a constant"
    if any(size < 0 for size in proto.dims):
        raise CorruptError(f"{path.name}: the weight {name!r} has a negative size", got=str(list(proto.dims)))
    if proto.HasField("segment"):
        raise CorruptError(f"{path.name}: the weight {name!r} is split into segments")
    number = math.prod(proto.dims)
    if proto.data_location == onnx.TensorProto.EXTERNAL:
        _, _, found = place(proto, path)
        expected = _num_bytes(proto, number)
        unit = "bytes"
    elif proto.HasField("raw_data"):
        found, expected, unit = len(proto.raw_data), _num_bytes(proto, number), "bytes"
    else:
        fields = (proto.float_data, proto.int32_data, proto.int64_data, proto.double_data, proto.uint64_data)
        found, expected, unit = max(map(len, (*fields, proto.string_data))), number, "values"
        expected = -(-expected * bits(proto) // 8) if bits(proto) < 8 else expected
        expected *= 2 if proto.data_type in (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128) else 1
    if found != expected:
        raise CorruptError(
            f"{path.name}: the weight {name!r} does not hold what its shape says",
            got=f"{found:,} {unit}",
            expected=f"{expected:,} for {list(proto.dims)}",
        )


def place(proto: onnx.TensorProto, path: Path) -> tuple[Path, int, int]:
    """Return (file, offset, bytes) of external data, which must be a file of the directory of the model at `path`."""
    entries = {entry.key: entry.value for entry in proto.external_data}
    location = entries.get("location", "")
    parts = PurePosixPath(location).parts
    is_inside = location and not PurePosixPath(location).is_absolute() and not PureWindowsPath(location).drive
    if not is_inside or ".." in parts or not _NO_PLACE.isdisjoint(location):
        raise CorruptError(
            f"the weight {proto.name!r} is outside of the model directory",
            got=location[:200] or "no location",
            expected="a file next to the model",
        )
    file = path.parent / location
    if not file.is_file():
        raise CorruptError(
            f"the file with the weight {proto.name!r} is missing",
            got=f"no {location} in {path.parent}",
            hint="copy the data file next to the .onnx file",
        )
    # A hub's cache links every file of a model to one folder of blobs: beside the real graph is inside, too.
    real = file.resolve()
    if not any(real.is_relative_to(folder) for folder in (path.parent.resolve(), path.resolve().parent)):
        raise CorruptError(
            f"the weight {proto.name!r} is outside of the model directory", got=f"{location}, a link to elsewhere"
        )
    try:
        offset = int(entries.get("offset", "0"))
        size = int(entries["length"]) if "length" in entries else _num_bytes(proto, math.prod(proto.dims))
    except ValueError as error:
        raise CorruptError(f"the position of the weight {proto.name!r} is not a number", got=str(error)) from error
    if offset < 0 or size < 0 or offset + size > real.stat().st_size:
        raise CorruptError(
            f"the weight {proto.name!r} goes beyond its file",
            got=f"bytes {offset:,} to {offset + size:,} of {real.stat().st_size:,} in {location}",
        )
    return file, offset, size


def bits(proto: onnx.TensorProto) -> int:
    """Return the bits of an element, 8 where it has whole bytes.

    Raises:
        CorruptError: Its type is unknown.
    """
    import onnx

    try:
        return _BITS.get(onnx.TensorProto.DataType.Name(proto.data_type), 8)
    except ValueError as error:
        raise CorruptError(f"the weight {proto.name!r} has an unknown type", got=str(proto.data_type)) from error


def _num_bytes(proto: onnx.TensorProto, number: int) -> int:
    from onnx import helper

    if bits(proto) < 8:
        return -(-number * bits(proto) // 8)
    try:
        return number * int(helper.tensor_dtype_to_np_dtype(proto.data_type).itemsize)
    except (KeyError, TypeError) as error:
        raise CorruptError(f"the weight {proto.name!r} has an unknown type", got=str(proto.data_type)) from error
