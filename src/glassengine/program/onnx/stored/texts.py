"""Names in an ONNX file are text: what is none, protobuf hands over as bytes, which nothing here expects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassengine.errors import CorruptError

if TYPE_CHECKING:
    import onnx

_PROSE = frozenset({"doc_string", "producer_name", "producer_version"})
"""What people wrote, in any encoding; nothing depends on it."""


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
