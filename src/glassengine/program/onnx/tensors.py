"""Tensors and declarations of an ONNX file: a tensor holds what its shape says; what torch cannot hold is refused.

ZipMap(probabilities) -> list of dicts      becomes  probabilities
SequenceConstruct(a, b) -> sequence         becomes  a, b
text (labels of a classifier)               is left out, where there is another result
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from glassengine import environment
from glassengine.errors import CorruptError, logger
from glassengine.reading.files import printable, shown
from glassengine.reading.tensors import MAX_DIMENSIONS

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


MAX_ELEMENTS = 1 << 34
"""Of a value whose sizes are known; far more than any forward reads or makes."""
MAX_INPUT_ELEMENTS = 1 << 27
"""Of an input of fixed size: inputs are made up where none are given, a few at a time."""

_SETTINGS = "ort_config"
_PROSE = frozenset({"doc_string", "producer_name", "producer_version"})
"""What people wrote, in any encoding; nothing depends on it."""


def check_declared(model: onnx.ModelProto, path: Path) -> None:
    """Refuse values of more dimensions or elements than a tensor has, and settings that would be followed.

    Raises:
        CorruptError: Names the value.
    """
    check_settings(model, path)
    graph = model.graph
    held = {tensor.name for tensor in graph.initializer}
    for value in (*graph.input, *graph.output, *graph.value_info):
        sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim if dim.HasField("dim_value")]
        _check_value(value.name, len(value.type.tensor_type.shape.dim), sizes, path, MAX_ELEMENTS)
    for value in graph.input:
        sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim if dim.HasField("dim_value")]
        if value.name not in held:  # older files list their weights as inputs, too
            _check_value(value.name, 0, sizes, path, MAX_INPUT_ELEMENTS)
    for tensor in graph.initializer:
        _check_value(
            tensor.name, len(tensor.dims), [], path, MAX_ELEMENTS
        )  # how much data it has is checked with the data


def _check_value(name: str, dimensions: int, sizes: list[int], path: Path, most: int) -> None:
    if dimensions > MAX_DIMENSIONS:
        got, expected = f"{dimensions} dimensions", f"at most {MAX_DIMENSIONS}"
        raise CorruptError(f"{path.name}: {shown(name)!r} is not a tensor", got=got, expected=expected)
    elements = 1
    for size in sizes:
        elements *= max(size, 1)
        if elements > most:
            got = f"sizes {', '.join(map(str, sizes))}"
            raise CorruptError(f"{path.name}: {shown(name)!r} is larger than a tensor can be", got=got)


def check_settings(model: onnx.ModelProto, path: Path) -> None:
    """Refuse settings of ONNX Runtime in a model, where the user has told it to follow them: a profile is a file.

    Raises:
        CorruptError: There are any.
    """
    if environment.models_may_set_onnxruntime() and any(entry.key == _SETTINGS for entry in model.metadata_props):
        raise CorruptError(
            f"{path.name} brings settings of ONNX Runtime along, which could write files",
            got=f"metadata {_SETTINGS}",
            hint="unset ORT_LOAD_CONFIG_FROM_MODEL: they are ignored then",
        )


def check_texts(model: onnx.ModelProto, path: Path) -> None:
    """Refuse a model with a name that is not text.

    Raises:
        CorruptError: There is one.
    """
    waiting: list[Any] = [model]
    while waiting:
        for field, values in _fields(waiting.pop()):
            if field.type == field.TYPE_MESSAGE:
                waiting += values
            elif field.type == field.TYPE_STRING and field.name not in _PROSE:
                wrong = next((text for text in values if isinstance(text, bytes)), None)
                if wrong is not None:
                    raise CorruptError("a name in an ONNX file is not text", got=f"{path.name}: {wrong[:80]!r}")


def _fields(message: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (field, values) of what is set; the data of tensors are not copied."""
    known = message.DESCRIPTOR.fields_by_name
    if message.DESCRIPTOR.name == "TensorProto":
        yield known["name"], [message.name]
        yield known["external_data"], message.external_data
        return
    for field, value in message.ListFields():
        is_one = isinstance(value, str | bytes | int | float) or hasattr(value, "ListFields")
        yield field, [value] if is_one else value


_STRING = 8
_MADE_OF = ("ZipMap", "SequenceConstruct", "Optional", "Identity")


def return_tensors(graph: onnx.GraphProto, file: str) -> None:
    """Let a graph return tensors of numbers instead of containers made of them; change nothing else."""
    others = [value for value in graph.output if not _is_tensor(value)]
    if not others:
        return
    makers = {name: node for node in graph.node for name in node.output}
    kept = [value for value in graph.output if _is_tensor(value)]
    names = {value.name for value in kept}
    for value in others:
        found = [name for name in _tensors_of(value.name, makers) if name in makers and name not in names]
        names.update(found)
        kept += [_named(name) for name in found]
        said = f"replaced by {', '.join(map(printable, found))}" if found else "it is not judged"
        logger.warning("%s returns %s, which is not a numeric tensor: %s", file, printable(value.name), said)
    if not kept:
        return
    del graph.output[:]
    graph.output.extend(kept)
    _leave_out(graph, {value.name for value in others} - names)


def _is_tensor(value: onnx.ValueInfoProto) -> bool:
    return value.type.HasField("tensor_type") and value.type.tensor_type.elem_type != _STRING


def _named(name: str) -> onnx.ValueInfoProto:
    from onnx import ValueInfoProto

    return ValueInfoProto(name=name)


def _tensors_of(name: str, makers: dict[str, onnx.NodeProto]) -> Iterator[str]:
    node = makers.get(name)
    if node is None or node.op_type not in _MADE_OF:
        return
    for source in node.input:
        inner = makers.get(source)
        if inner is not None and inner.op_type in _MADE_OF:
            yield from _tensors_of(source, makers)
        elif node.op_type != "Identity":
            yield source


def _leave_out(graph: onnx.GraphProto, unread: set[str]) -> None:
    """Remove the nodes that only make what is left out."""
    returned = {value.name for value in graph.output}
    read = _read(graph)
    waiting = [node for node in graph.node if unread.intersection(node.output)]
    while waiting:
        node = waiting.pop()
        if any(name in returned or name in read for name in node.output) or node not in graph.node:
            continue
        graph.node.remove(node)
        read = _read(graph)
        waiting += [other for other in graph.node if set(other.output) & set(node.input)]


def _read(graph: onnx.GraphProto) -> set[str]:
    read = {name for node in graph.node for name in node.input}
    return read | {value for node in graph.node for entry in node.attribute for value in _inside(entry)}


def _inside(entry: onnx.AttributeProto) -> Iterator[str]:
    for graph in [entry.g] if entry.HasField("g") else entry.graphs:
        for node in graph.node:
            yield from node.input
            for inner in node.attribute:
                yield from _inside(inner)
