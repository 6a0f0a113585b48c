"""Routes a check to the handler of its kind of candidate.

The first handler that accepts a request judges it. `candidates.KINDS` says what each kind is, and which options
it refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glassengine.backends.protocol.backend import TakingModels
from glassengine.backends.registry import find_backend, get_backend
from glassengine.candidates import BUILT, ENGINE, MODEL, QUANTIZED, RECORD, SERVED, WRITTEN, CandidateKind, refuse
from glassengine.diagnose.check_ladder import Ladder, check_model, check_record
from glassengine.diagnose.ladder.request import CheckRequest, Model
from glassengine.engine import files
from glassengine.engine.run.engine import read_engine
from glassengine.engine.run.load import load
from glassengine.extensions import plugin
from glassengine.program.loading.adapters import is_adapter
from glassengine.program.loading.quantized import is_quantized
from glassengine.program.onnx.file import is_onnx
from glassengine.recording.source import TensorSource, file_suffixes, open_source
from glassengine.results import Comparison
from glassengine.serving.protocol import Served, ServedInSession, is_served, open_served, served_as
from glassengine.stores.places import place


@dataclass(frozen=True)
class Handler:
    """Judges one kind of candidate.

    Attributes:
        kind: With the options that it refuses.
        accepts: Returns the candidate, opened where that is cheap, or True; None or False if it is of another kind.
        run: Judges it.
    """

    kind: CandidateKind
    accepts: Callable[[CheckRequest], Any]
    run: Callable[[CheckRequest, Any], Comparison]


def _is_engine(candidate: object) -> bool:
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


def _open_record(request: CheckRequest) -> TensorSource | None:
    """Return a candidate that is a record of tensors."""
    return open_source(str(request.candidate)) if _is_record(request.candidate) else None


def is_quantized_candidate(baseline: Any, candidate: Any) -> bool:
    """Whether the candidate is a quantized checkpoint, and the baseline is none."""
    return isinstance(candidate, (str, Path)) and is_quantized(candidate) and not is_quantized(baseline)


def served_spec(request: CheckRequest) -> Model | None:
    """Return the candidate, by kind and place where it is served; an engine directory may hold such a file."""
    candidate = request.candidate
    spec: Any = candidate if is_onnx(request.baseline) else served_as(candidate)
    if not is_served(spec) and _is_engine(candidate):
        engine = read_engine(str(candidate))
        backend = find_backend(engine.manifest.backend)
        return backend.served(engine.directory / files.MAIN) if isinstance(backend, TakingModels) else candidate
    found: Model | None = spec
    return found


def _open_served(request: CheckRequest) -> Served | None:
    """Return a candidate that is a serving engine: by its kind, as an engine directory, or as a record of one."""
    if request.candidate is None:
        return None
    served: Any = open_served(served_spec(request), request.serving)
    if served is None and _is_engine(request.candidate):
        return None
    record = _open_record(request) if served is None and request.map is None else None
    if record is not None and (request.layout or record.metadata.get("layout")):
        served = plugin("serving.recorded_engine").recorded_engine(record, request.layout)
    found: Served | None = served
    return found


def _is_written(request: CheckRequest) -> bool:
    """Whether the engine of a check is one that a back-end writes from a model."""
    if request.candidate is not None or request.backend is None:
        return False
    return isinstance(get_backend(request.backend), TakingModels)


def _by_plugin(module: str, name: str) -> Callable[[CheckRequest, Any], Comparison]:
    """Return a function of a plugin, which is imported when it is called."""

    def run(request: CheckRequest, opened: Any) -> Comparison:
        found: Comparison = getattr(plugin(module), name)(request, opened)
        return found

    return run


HANDLERS = (
    Handler(SERVED, _open_served, _by_plugin("serving.check.check", "check_served")),
    Handler(WRITTEN, _is_written, _by_plugin("serving.check.check", "check_written")),
    Handler(BUILT, lambda request: request.candidate is None, lambda request, _: Ladder(request).check()),
    Handler(
        ENGINE,
        lambda request: _is_engine(request.candidate),
        lambda request, _: Ladder(request, engine=load(str(request.candidate), trust=request.trust_engine)).check(),
    ),
    Handler(RECORD, _open_record, check_record),
    Handler(
        QUANTIZED,
        lambda request: is_quantized_candidate(request.baseline, request.candidate),
        _by_plugin("quantized.check", "check_quantized_checkpoint"),
    ),
    Handler(MODEL, lambda request: True, check_model),
)
"""In this order: an engine directory of a back-end that writes models is served, and so is a record of one."""


def route(request: CheckRequest) -> Comparison:
    """Judge a request by the handler of its kind of candidate.

    Raises:
        UsageError: The kind refuses an option that was given.
    """
    for handler in HANDLERS:
        opened = handler.accepts(request)
        if opened is None or opened is False:
            continue
        honored = ("--session-options",) if isinstance(opened, ServedInSession) else ()
        refuse(handler.kind, request.flags, request.candidate, honored=honored)
        return handler.run(request, opened)
    raise AssertionError("the last handler accepts every candidate")
