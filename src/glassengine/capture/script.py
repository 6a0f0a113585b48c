"""Record whatever an unmodified script runs: PyTorch modules, compiled ones included, and ONNX Runtime sessions.

Each model gets a recording of its own, named after its class, in one directory. A model is a module that is called
while no other is: its submodules are part of it. What is recorded of it is what `glass.record` records. Processes that
this one forks are not recorded; of those it spawns see `spawned`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import inspect
import logging
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from glassengine.capture.calls import ModuleNames
from glassengine.capture.record import Recorder, own_directory, record
from glassengine.capture.sessions import SessionRecording
from glassengine.errors import GlassError, UsageError

MAX_MODELS = 8

_log = logging.getLogger(__name__)


class ScriptRecorder:
    """Recordings of the models that this process calls from now on; a context manager.

    Args:
        directory: Holds one directory per model; new or empty.
        sites: As for `record`.
        values: As for `record`.
        steps: As for `record`; counted for each model.
        byte_budget: As for `record`; for each model.
        overwrite: Replace recordings that exist.

    Attributes:
        directory: Where the recordings are.
        options: Of each of them.

    Raises:
        UsageError: (On entering) the directory exists and is not empty, and `overwrite` is false.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        sites: Sequence[str] | None = None,
        values: bool | Sequence[str] = True,
        steps: Collection[int] | None = None,
        byte_budget: int | None = None,
        overwrite: bool = False,
    ) -> None:
        # Scripts change the working directory.
        self.directory = Path(directory).absolute()
        self.options: dict[str, Any] = {
            "sites": sites,
            "values": values,
            "steps": steps,
            "byte_budget": byte_budget,
            "overwrite": overwrite,
        }
        self._overwrite = overwrite
        self._lock = threading.RLock()
        self._process = os.getpid()
        # Of what is recorded, and of what is not: whether that lives on is the script's business.
        self._known: set[nn.Module] = set()
        self._ignored: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._recorders: list[Recorder] = []
        self._sessions: dict[Any, SessionRecording | None] = {}
        self._names: dict[str, int] = {}
        self._num_ignored = self._num_bound = 0
        self._failures: list[GlassError] = []
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> ScriptRecorder:
        # Other ranks of one run write beside this one, and may have begun.
        own = own_directory(self.directory)
        there = self.directory.glob("*" if own == self.directory else f"*/{own.name}")
        if any(there) and not self._overwrite:
            raise UsageError(
                "the output directory is not empty", got=str(self.directory), hint="replace recordings with --overwrite"
            )
        self.directory.mkdir(parents=True, exist_ok=True)
        self._undo.enter_context(_module_calls(self._before_call))
        self._undo.enter_context(_when_imported("onnxruntime", self._patch_onnxruntime))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._undo.close()
        if isinstance(error, SystemExit) and not error.code:
            kind = error = None
        failures = self._failures
        for recording in self._all():
            try:
                recording.__exit__(kind, error, trace)
            except GlassError as failure:
                failures.append(failure)
        if self._num_ignored:
            _log.warning("%d more models were not recorded: at most %d are", self._num_ignored, MAX_MODELS)
        if self._num_bound:
            _log.warning("%d runs of ONNX Runtime with bound tensors were not recorded", self._num_bound)
        if failures and error is None:
            raise failures[0]

    @property
    def recordings(self) -> list[Path]:
        """The directories of the recordings, in the order in which their models were first called."""
        return [recording.path for recording in self._all()]

    def _all(self) -> list[Recorder | SessionRecording]:
        return [*self._recorders, *filter(None, self._sessions.values())]

    def _before_call(self, module: nn.Module) -> None:
        if module in self._known or torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
            return
        if module in self._ignored or os.getpid() != self._process:
            return
        with self._lock:
            if module in self._known or module in self._ignored:
                return  # since another thread called it first
            if any(recorder.is_open for recorder in self._recorders):
                return  # made while its model runs
            inside = ModuleNames(module).known
            recorder = None if isinstance(module, torch.jit.ScriptModule) else self._begin(module)
            if recorder is None:
                self._ignored.update(inside)
            else:
                self._known.update(inside)
                self._recorders.append(recorder)

    def _begin(self, module: nn.Module) -> Recorder | None:
        if not self._has_room():
            return None
        path = self._path(type(getattr(module, "_orig_mod", module)).__name__)
        try:
            return record(module, path, **self.options).__enter__()
        except GlassError as error:
            self._cannot_record(path, error)
            return None

    def _cannot_record(self, path: Path, error: GlassError) -> None:
        # The script would run without us.
        self._failures.append(error)
        _log.warning("%s is not recorded: %s", path.name, error)

    def _patch_onnxruntime(self, onnxruntime: ModuleType) -> None:
        session = onnxruntime.InferenceSession
        for name in ("run", "run_with_ort_values"):
            self._patch(session, name, self._observed_run)
        self._patch(session, "run_async", self._observed_later)
        for name in ("run_with_iobinding", "run_with_ortvaluevector"):
            self._patch(session, name, self._counted_run)

    def _patch(self, session: Any, name: str, observed: Callable[..., Any]) -> None:
        original = getattr(session, name, None)
        if original is None:
            return  # not every version has all of them
        signature = inspect.signature(original)

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError:
                return original(*args, **kwargs)  # which tells what is wrong
            return observed(original, given) if os.getpid() == self._process else original(*args, **kwargs)

        setattr(session, name, run)
        self._undo.callback(setattr, session, name, original)

    def _observed_run(self, run: Callable[..., Any], given: inspect.BoundArguments) -> Any:
        session, names, inputs = list(given.arguments.values())[:3]
        try:
            results = run(*given.args, **given.kwargs)
        except Exception as error:
            self._note_run(session, names, inputs, (), f"{type(error).__name__}: {error}")
            raise
        self._note_run(session, names, inputs, results, None)
        return results

    def _observed_later(self, run: Callable[..., Any], given: inspect.BoundArguments) -> Any:
        session, names, inputs, callback = list(given.arguments.values())[:4]

        def ended(results: Any, data: Any, error: str) -> None:
            self._note_run(session, names, inputs, () if error else results, error or None)
            callback(results, data, error)

        given.arguments["callback"] = ended
        return run(*given.args, **given.kwargs)

    def _counted_run(self, run: Callable[..., Any], given: inspect.BoundArguments) -> Any:
        self._num_bound += 1
        return run(*given.args, **given.kwargs)

    def _note_run(
        self, session: Any, names: Any, inputs: Mapping[str, Any], results: Sequence[Any], stopped: str | None
    ) -> None:
        with self._lock:
            if session not in self._sessions:
                self._sessions[session] = self._begin_session(session)
            recording = self._sessions[session]
        if recording is not None:
            recording.step(names, inputs, results, stopped)

    def _begin_session(self, session: Any) -> SessionRecording | None:
        if not self._has_room():
            return None
        path = self._path(Path(getattr(session, "_model_path", None) or "session").stem)
        try:
            return SessionRecording(session, path, **self.options)
        except GlassError as error:
            self._cannot_record(path, error)
            return None

    def _has_room(self) -> bool:
        if len(self._all()) < MAX_MODELS:
            return True
        self._num_ignored += 1
        return False

    def directory_for(self, name: str) -> Path:
        """Return a path in the directory that nothing else of this process gets."""
        name = re.sub(r"[^\w.-]", "_", name)[:100] or "model"
        self._names[name] = self._names.get(name, 0) + 1
        return self.directory / (name if self._names[name] == 1 else f"{name}-{self._names[name]}")

    def _path(self, name: str) -> Path:
        return own_directory(self.directory_for(name))


@contextlib.contextmanager
def _module_calls(before: Any) -> Iterator[None]:
    """Call `before(module)` ahead of every call of a module, its own hooks included."""
    original = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            before(self)
        return original(self, *args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _when_imported(name: str, then: Any) -> Iterator[None]:
    """Call `then(module)` when the module `name` is imported, or now if it has been."""
    if name in sys.modules:
        then(sys.modules[name])
        yield
        return
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the others would, and takes note when it has been executed."""

    def __init__(self, name: str, then: Any) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
