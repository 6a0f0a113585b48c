"""Refuses what an ONNX graph declares and no tensor of torch can be, and names that are not text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassengine import environment
from glassengine.errors import CorruptError
from glassengine.reading.files import shown
from glassengine.reading.tensors import MAX_DIMENSIONS

if TYPE_CHECKING:
    import onnx

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
        _check(value.name, len(value.type.tensor_type.shape.dim), sizes, path, MAX_ELEMENTS)
    for value in graph.input:
        sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim if dim.HasField("dim_value")]
        if value.name not in held:  # older files list their weights as inputs, too
            _check(value.name, 0, sizes, path, MAX_INPUT_ELEMENTS)
    for tensor in graph.initializer:
        _check(tensor.name, len(tensor.dims), [], path, MAX_ELEMENTS)  # how much data it has is checked with the data


def _check(name: str, dimensions: int, sizes: list[int], path: Path, most: int) -> None:
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
