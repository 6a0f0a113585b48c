"""Candidates of a check that are serving engines: named, recorded, or built by a back-end that writes models."""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path
from typing import Any

from torch import nn

from glassengine.backends.protocol.backend import TakingModels
from glassengine.backends.registry import find_backend, get_backend
from glassengine.engine.build.limits import check_dtype, check_written
from glassengine.engine.run.engine import read_engine
from glassengine.engine.store import files
from glassengine.errors import UsageError
from glassengine.program import load_model
from glassengine.program.loading.adapters import is_adapter
from glassengine.program.onnx.stored.file import is_onnx
from glassengine.progress import Progress, Work
from glassengine.recording.read.source import TensorSource, file_suffixes, open_source
from glassengine.serving.protocol import Options, Served, open_served, served_as
from glassengine.serving.target import recorded_engine
from glassengine.stores.places import place
from glassengine.writing.files import remove_tree


def is_engine(candidate: object) -> bool:
    """Whether a candidate is an engine directory."""
    return isinstance(candidate, (str, Path)) and (place(candidate) / "engine.json").is_file()


def is_record(candidate: object) -> bool:
    """Whether a candidate is a record of tensors."""
    if not isinstance(candidate, (str, Path)) or not place(candidate).exists():
        return False
    path = place(candidate)
    if path.is_dir():
        return not is_adapter(path) and not any((path / name).is_file() for name in ("config.json", "engine.json"))
    return path.suffix.lower() in file_suffixes()


def named_candidate(
    baseline: object, candidate: object, options: Options, *, layout: str | None, has_map: bool
) -> tuple[Served | None, TensorSource | None]:
    """Return a candidate as a serving engine, or as a record of something else; nothing where it is neither.

    Args:
        baseline: Of the check.
        candidate: `gguf:FILE`, an engine of a back-end that writes models, a record, an ONNX file, or something else.
        options: Of the run.
        layout: Of a record that names none.
        has_map: Whether the user names the tensors of a record.
    """
    served: Any = open_served(candidate if is_onnx(baseline) else served_as(candidate), options)
    if served is None and is_engine(candidate):
        found = read_engine(str(candidate))
        backend = find_backend(found.manifest.backend)
        if isinstance(backend, TakingModels):
            return open_served(backend.served(found.directory / files.MAIN), options), None
    record = open_source(str(candidate)) if served is None and is_record(candidate) else None
    if record is not None and (layout or record.metadata.get("layout")) and not has_map:
        served = recorded_engine(record, layout)
    return served, record


def built_candidate(
    baseline: str | Path | nn.Module,
    backend: str | None,
    quantize: str | None,
    options: Options,
    progress: Progress,
    *,
    dtype: str,
    **loading: Any,
) -> Served | None:
    """Return what a back-end makes of the baseline, as a serving engine; None where it compiles its graph.

    Args:
        baseline: Of the check.
        backend: Its name.
        quantize: Type of matrices.
        options: Of the run.
        progress: Called with an event when a stage begins.
        dtype: As for `check`.
        loading: As for `load_model`.

    Raises:
        UsageError: It cannot be written, or types are asked for where none are.
    """
    if backend is None and quantize is None:
        return None
    chosen = get_backend(backend) if backend is not None else None
    if not isinstance(chosen, TakingModels):
        if quantize is not None:
            raise UsageError(
                "matrices are rounded by back-ends that write models",
                got=f"--quantize {quantize}",
                hint="--backend gguf",
            )
        return None
    progress(Work.LOADING.says("loading the model"))
    model = load_model(baseline, dtype=dtype, **loading)
    check_dtype(chosen, model.dtype)
    check_written(chosen, model, quantize, None, {})
    progress(Work.COMPILING.says(f"writing {model.spec} with {chosen.name}"))
    folder = Path(tempfile.mkdtemp(prefix="glassengine-"))
    try:
        chosen.build_model(model.module, folder, quantize, None)
        served = open_served(chosen.served(folder), options)
        assert served is not None
    except BaseException:
        remove_tree(folder)
        raise
    weakref.finalize(served, remove_tree, folder)
    return served
