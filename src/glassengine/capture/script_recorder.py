"""Records what an unmodified script runs: PyTorch modules, compiled ones included, and runs of other runtimes.

Each model gets a recording of its own, named after its class, in one directory. A model is a module that is called
while no other is: its submodules are part of it. What is recorded of it is what `glass.record` records. Processes that
this one forks are not recorded. Those that multiprocessing spawns record too, each in a directory of its own: the first
thing that such a process reads is a pickle that says how to prepare itself, and a call of ours is in there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import spawn, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Unpack, cast

import torch
from torch import nn

from glassengine.capture.module_names import ModuleNames
from glassengine.capture.record import Recorder, own_directory, record
from glassengine.capture.runtimes import RuntimeRun, Runtimes, SessionRecording, unseen_runtimes
from glassengine.errors import GlassError, IncomparableError, UsageError
from glassengine.recording.layout.layout import MANIFEST
from glassengine.recording.write.policy import RecordOptions, ScriptOptions
from glassengine.stores.places import RemotePath, place

MAX_MODELS = 8

_log = logging.getLogger(__name__)


class ScriptRecorder:
    """Recordings of the models that this process calls from now on; a context manager.

    Args:
        directory: Holds one directory per model; new or empty.
        options: As for `record`; steps are counted, and bytes budgeted, for each model.
    """

    def __init__(self, directory: str | Path, **options: Unpack[ScriptOptions]) -> None:
        # Scripts change the working directory.
        self.directory = place(directory).absolute()
        self.options = options
        self._overwrite = options.get("overwrite", False)
        self._lock = threading.RLock()
        self._process = os.getpid()
        # Of what is recorded, and of what is not: whether that lives on is the script's business.
        self._known: set[nn.Module] = set()
        self._ignored: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._recorders: list[Recorder] = []
        self._sessions: dict[Any, SessionRecording | None] = {}
        self._names: dict[str, int] = {}
        self._num_ignored = 0
        self._runtimes = Runtimes(self._note_run)
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
        if not isinstance(self.directory, RemotePath):
            self.directory.mkdir(parents=True, exist_ok=True)
        self._undo.enter_context(_module_calls(self._before_call, self._runtimes.scripted_call))
        self._undo.enter_context(self._runtimes)
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
        for what, number in self._runtimes.num_unseen.items():
            _log.warning("%d %s were not recorded", number, what)
        if failures and error is None:
            raise failures[0]

    @property
    def why_nothing(self) -> GlassError | None:
        """What explains that nothing was recorded; None where something was."""
        if self._all():
            return None
        seen = [f"{number} {kind}" for kind, number in self._runtimes.num_unseen.items()]
        seen += [f"{title} was imported" for title in unseen_runtimes()]
        number = self._runtimes.num_processes
        seen += [f"{number} processes were started"] if number else []
        return IncomparableError(
            "nothing was recorded: no model was called in this process",
            got=f"{'; '.join(seen)}: not recorded" if seen else None,
            expected="calls of PyTorch modules, ONNX Runtime sessions, OpenVINO requests or AOTInductor packages",
            hint="in a process that the script starts: import glassengine.auto there; plain functions: in an nn.Module",
        )

    @property
    def recordings(self) -> list[Path]:
        """The directories of the recordings, in the order in which their models were first called."""
        return [recording.path for recording in self._all()]

    def _all(self) -> list[Recorder | SessionRecording]:
        return [*self._recorders, *filter(None, self._sessions.values())]

    def _before_call(self, module: nn.Module) -> bool:
        """Begin to record a model that is called for the first time; return whether it is seen from outside only."""
        if module in self._known or torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
            return False
        if module in self._ignored or os.getpid() != self._process:
            return False
        with self._lock:
            if module in self._known or module in self._ignored:
                return False  # since another thread called it first
            if any(recorder.is_open for recorder in self._recorders):
                return False  # made while its model runs
            if isinstance(module, torch.jit.ScriptModule):
                return True
            inside = ModuleNames(module).known
            recorder = self._begin(module)
            if recorder is None:
                self._ignored.update(inside)
            else:
                self._known.update(inside)
                self._recorders.append(recorder)
        return False

    def _begin(self, module: nn.Module) -> Recorder | None:
        if not self._has_room():
            return None
        path = self._path(type(getattr(module, "_orig_mod", module)).__name__)
        try:
            return self.recorder_of(module, path).__enter__()
        except GlassError as error:
            self._cannot_record(path, error)
            return None

    def recorder_of(self, module: nn.Module, path: Path) -> Recorder:
        """Return what records a model that was called for the first time."""
        return record(module, path, **self.options)

    def _cannot_record(self, path: Path, error: GlassError) -> None:
        # The script would run without us.
        self._failures.append(error)
        _log.warning("%s is not recorded: %s", path.name, error)

    def _note_run(self, run: RuntimeRun) -> None:
        with self._lock:
            if run.owner not in self._sessions:
                self._sessions[run.owner] = self._begin_session(run)
            recording = self._sessions[run.owner]
        if recording is not None:
            recording.step(run)

    def _begin_session(self, run: RuntimeRun) -> SessionRecording | None:
        if not self._has_room():
            return None
        source = run.describe(run.owner)
        path = self._path(source.name)
        try:
            options = {name: value for name, value in self.options.items() if name in RecordOptions.__annotations__}
            return SessionRecording(source, path, **cast(RecordOptions, options))
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
def _module_calls(before: Callable[[nn.Module], bool], outside: Callable[..., Any]) -> Iterator[None]:
    """Call `before(module)` ahead of every call of a module, its own hooks included.

    Where it returns true the call is left to `outside(original, (module, *args), kwargs)`.
    """
    original = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and before(self):
            return outside(original, (self, *args), kwargs)
        return original(self, *args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


class SpawnedRecordings:
    """Has the processes record that are spawned while this is entered; a context manager.

    Args:
        recorder: Of this process; theirs has the same options.
    """

    def __init__(self, recorder: ScriptRecorder) -> None:
        self._recorder = recorder
        self._directories: list[Path] = []
        # Of an earlier run, which leaves alone what is not replaced.
        self._stale: set[tuple[Path, int]] = set()
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> SpawnedRecordings:
        original: Callable[[str], dict[str, Any]] = spawn.get_preparation_data

        def prepare(name: str) -> dict[str, Any]:
            found = original(name)
            # Another Python may know nothing of us.
            if spawn.get_executable() in (sys.executable, os.fsencode(sys.executable)):
                directory = self._recorder.directory_for(name)
                self._directories.append(directory)
                self._stale.update(_manifests(directory))
                found["glassengine"] = _Start(directory, self._recorder.options)
            return found

        spawn.get_preparation_data = prepare
        self._undo.callback(setattr, spawn, "get_preparation_data", original)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        for directory in self._directories:
            with contextlib.suppress(OSError):
                directory.rmdir()  # where nothing was called

    @property
    def recordings(self) -> list[Path]:
        """The directories of their recordings."""
        found = [item for directory in self._directories for item in _manifests(directory) if item not in self._stale]
        return [manifest.parent for manifest, _ in found]


def _manifests(directory: Path) -> list[tuple[Path, int]]:
    """Return the manifests of the recordings of a process, and when each was written."""
    return [(path, path.stat().st_mtime_ns) for path in sorted(directory.rglob(MANIFEST))]


class _Start:
    """What begins the recordings of a process when it is read there."""

    def __init__(self, directory: Path, options: ScriptOptions) -> None:
        self._arguments = (directory, options)

    def __reduce__(self) -> tuple[Any, ...]:
        return _start, self._arguments


def _start(directory: Path, options: ScriptOptions) -> None:
    recorder = ScriptRecorder(directory, **options)
    try:
        recorder.__enter__()
    except (GlassError, OSError) as error:
        # The script would run without us.
        _log.warning("a process is not recorded: %s", error)
        return
    # What this process spawns in its turn records as well.
    spawned = SpawnedRecordings(recorder)
    spawned.__enter__()
    _finish_with_process(recorder, spawned)


def _finish_with_process(recorder: ScriptRecorder, spawned: SpawnedRecordings) -> None:
    """Complete the recordings when this process ends, also when it is terminated, like the workers of a pool."""
    begun = done = False
    signals: list[int] = []
    process = os.getpid()

    def end(error: BaseException | None = None) -> None:
        nonlocal begun, done
        if begun:
            return
        begun = True
        finish(recorder, error)
        spawned.__exit__()
        done = True
        if signals:
            os.kill(os.getpid(), signals[0])

    def terminated(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        signals.append(number)
        if done or os.getpid() != process:  # what this process has forked writes nothing
            os.kill(os.getpid(), number)
            return
        end()  # which is at work already where it was interrupted

    call_at_end(recorder, end)
    # A script may handle it itself; and only a main thread can.
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, terminated)


def call_at_end(recorder: ScriptRecorder, end: Callable[[BaseException | None], None]) -> None:
    """Call `end` with what has ended this process, which multiprocessing has started; atexit does nothing there."""
    process = os.getpid()
    errors = _errors_of_the_work()

    def register(_: object) -> None:
        if os.getpid() == process:
            util.Finalize(None, lambda: end(errors[0] if errors else sys.exception()), exitpriority=0)

    register(recorder)
    # What comes from a fork server has prepared itself before it forgets what was registered.
    util.register_after_fork(recorder, register)


def _errors_of_the_work() -> list[BaseException]:
    """Return a list that will hold what the work of this process raised: at its end, Python 3.12 has forgotten it."""
    errors: list[BaseException] = []
    original = BaseProcess._bootstrap  # type: ignore[attr-defined]

    def bootstrap(process: Any, *args: Any, **kwargs: Any) -> Any:
        run = process.run

        def work() -> None:
            try:
                run()
            except BaseException as error:
                errors.append(error)
                raise

        process.run = work
        return original(process, *args, **kwargs)

    BaseProcess._bootstrap = bootstrap  # type: ignore[attr-defined]
    return errors


def finish(recorder: ScriptRecorder, error: BaseException | None) -> None:
    """End a recording with its process, which `error` has ended; what could not be written is logged, not raised."""
    try:
        recorder.__exit__(type(error) if error is not None else None, error, None)
    except GlassError as failure:
        _log.warning("not everything was recorded: %s", failure)
