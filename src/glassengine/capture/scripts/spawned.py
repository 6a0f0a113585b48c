"""Processes that multiprocessing spawns for a recorded script record too, each in a directory of its own.

The first thing that such a process reads is a pickle that says how to prepare itself; a call of ours is in there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import spawn, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from glassengine.capture.scripts.recorder import ScriptRecorder
from glassengine.errors import GlassError
from glassengine.recording.layout.layout import MANIFEST
from glassengine.recording.write.policy import ScriptOptions

_log = logging.getLogger(__name__)


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
