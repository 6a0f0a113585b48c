"""The ONNX file in an engine, checked before a runtime opens it: the runtime follows what the file says of its data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from glassengine.errors import CorruptError
from glassengine.program.onnx.file import MAX_BYTES, check_tensors
from glassengine.reading.documents import damaged
from glassengine.reading.files import read_bytes

if TYPE_CHECKING:
    import onnx


def read_stored(path: Path) -> onnx.ModelProto:
    """Return the graph of an engine; weights that lie in other files are checked, and not read.

    Raises:
        CorruptError: It is damaged, or a weight lies outside of the engine.
    """
    import onnx

    model = onnx.ModelProto()
    raw = read_bytes(path, most=MAX_BYTES, inside=path.parent)
    try:
        model.ParseFromString(raw)
    except Exception as error:  # of protobuf, which has no types and several implementations
        raise damaged(path.name, path, error) from error
    if not model.ir_version or not model.graph.output:
        raise CorruptError(f"{path.name} is damaged", got=f"{path}: no graph with outputs")
    check_tensors(model, path)
    return model
