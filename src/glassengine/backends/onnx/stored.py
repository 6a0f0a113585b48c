"""The ONNX file in an engine, checked before a runtime opens it: the runtime follows what the file says of its data."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from glassengine.errors import CorruptError
from glassengine.program.onnx.stored.declared import check_settings
from glassengine.program.onnx.stored.file import MAX_BYTES
from glassengine.program.onnx.stored.tensors import check_tensors
from glassengine.program.onnx.stored.texts import check_texts
from glassengine.reading.documents import damaged
from glassengine.reading.files import open_regular, read_bytes

if TYPE_CHECKING:
    import onnx


def check_graph(directory: Path, name: str) -> None:
    """Check the graph of an engine before a runtime opens it.

    Running needs no onnx. Without it every file beside the graph has to be a plain one, and that weights
    lie in the same directory is what ONNX Runtime checks by itself.

    Raises:
        CorruptError: It is damaged, or something in the directory is not a plain file.
    """
    if importlib.util.find_spec("onnx") is not None:
        read_graph(directory / name)
        return
    for path in sorted(directory.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            open_regular(path, inside=directory).close()


def read_graph(path: Path) -> onnx.ModelProto:
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
    check_texts(model, path)
    check_settings(model, path)
    check_tensors(model, path)
    return model
