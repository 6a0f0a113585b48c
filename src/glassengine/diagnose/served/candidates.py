"""Candidates of a check that are serving engines: named, recorded, or built by a back-end that writes models."""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path
from typing import Any

from glassengine.backends.protocol.backend import TakingModels
from glassengine.backends.registry import find_backend, get_backend
from glassengine.diagnose.ladder.request import CheckRequest
from glassengine.engine.build.checks import check_dtype, check_written
from glassengine.engine.run.engine import read_engine
from glassengine.engine.store import files
from glassengine.program import load_model
from glassengine.program.loading.adapters import is_adapter
from glassengine.program.onnx.stored.file import is_onnx
from glassengine.progress import Work
from glassengine.recording.read.source import TensorSource, file_suffixes, open_source
from glassengine.serving.protocol import Served, open_served, served_as
from glassengine.serving.target import recorded_engine
from glassengine.stores.places import place
from glassengine.writing.files import remove_tree


def is_engine(candidate: object) -> bool:
    """Whether a candidate is an engine directory."""
    return isinstance(candidate, (str, Path)) and (place(candidate) / "engine.json").is_file()


def _is_record(candidate: object) -> bool:
    """Whether a candidate is a record of tensors."""
    if not isinstance(candidate, (str, Path)) or not place(candidate).exists():
        return False
    path = place(candidate)
    if path.is_dir():
        return not is_adapter(path) and not any((path / name).is_file() for name in ("config.json", "engine.json"))
    return path.suffix.lower() in file_suffixes()


def open_record(request: CheckRequest) -> TensorSource | None:
    """Return a candidate that is a record of tensors."""
    return open_source(str(request.candidate)) if _is_record(request.candidate) else None


def open_candidate(request: CheckRequest) -> Served | None:
    """Return a candidate that is a serving engine: by its kind, as an engine directory, or as a record of one."""
    candidate = request.candidate
    if candidate is None:
        return None
    served: Any = open_served(candidate if is_onnx(request.baseline) else served_as(candidate), request.serving)
    if served is None and is_engine(candidate):
        engine = read_engine(str(candidate))
        backend = find_backend(engine.manifest.backend)
        if isinstance(backend, TakingModels):
            return open_served(backend.served(engine.directory / files.MAIN), request.serving)
        return None
    record = open_record(request) if served is None and request.map is None else None
    if record is not None and (request.layout or record.metadata.get("layout")):
        served = recorded_engine(record, request.layout)
    found: Served | None = served
    return found


def is_written(request: CheckRequest) -> bool:
    """Whether the engine of a check is one that a back-end writes from a model."""
    if request.candidate is not None or request.backend is None:
        return False
    return isinstance(get_backend(request.backend), TakingModels)


def write_candidate(request: CheckRequest) -> Served:
    """Return what a back-end writes from the baseline, as a serving engine; its files live as long as it.

    Raises:
        UsageError: It cannot be written.
    """
    backend: Any = get_backend(str(request.backend))
    request.progress(Work.LOADING.says("loading the model"))
    model = load_model(request.baseline, dtype=request.dtype, adapter=request.adapter, **request.loading)
    check_dtype(backend, model.dtype)
    check_written(backend, model, request.quantize, None, {})
    request.progress(Work.COMPILING.says(f"writing {model.spec} with {backend.name}"))
    folder = Path(tempfile.mkdtemp(prefix="glassengine-"))
    try:
        backend.build_model(model.module, folder, request.quantize, None)
        served = open_served(backend.served(folder), request.serving)
        assert served is not None
    except BaseException:
        remove_tree(folder)
        raise
    weakref.finalize(served, remove_tree, folder)
    return served
