"""Run Python code as `python script.py ARGS` or `python -m module ARGS` would, and record the models it calls."""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import io
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Unpack

from glassengine import asked
from glassengine.capture.scripts.ending import script_ended
from glassengine.capture.scripts.recorder import ScriptRecorder
from glassengine.capture.scripts.spawned import SpawnedRecordings
from glassengine.errors import UsageError
from glassengine.recording.write.policy import ScriptOptions
from glassengine.results.recorded import RecordedScript


def record_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    path: str | Path,
    is_module: bool = False,
    ends_process: bool = False,
    **options: Unpack[ScriptOptions],
) -> RecordedScript:
    """Run a script in this process and record every model that it, or a process that it spawns, calls.

    Args:
        script: A Python file, or with `is_module` the name of a module or of a package with a `__main__`.
        arguments: Its command line.
        path: Directory that gets one recording per model, and one directory per spawned process; new or empty.
        is_module: Look for `script` where Python looks for modules, the current directory first.
        ends_process: This process ends with the script, as that of the command line does: what watches its main thread
            sees it end. Threads cannot use pools of threads from then on.
        options: As for `record`; steps are counted, and bytes budgeted, for each model.

    Raises:
        UsageError: There is no such script, or the directory is not empty.
        GlassError: Not everything could be written.
    """
    status, process = 0, os.getpid()
    with _import_path(str(Path.cwd() if is_module else Path(script).resolve().parent)):
        file = _file_of(str(script)) if is_module else str(Path(script).absolute())
        if not Path(file).is_file():
            asked.script(str(script))
        recorder = ScriptRecorder(path, **options)
        spawned = SpawnedRecordings(recorder)
        try:
            main = _as_main(file if is_module else str(script), arguments)
            with recorder, spawned, main, script_ended(ends_process=ends_process):
                if is_module:
                    runpy.run_module(str(script), run_name="__main__", alter_sys=True)
                else:
                    _run(file)
        except SystemExit as ending:
            if os.getpid() != process:
                raise  # what the script has forked ends as it would without us
            status = _status(ending)
        except Exception as error:
            if not _is_of_script(error, file):
                raise
            # As Python itself would, without the frames that are ours.
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename != file:
                trace = trace.tb_next
            traceback.print_exception(type(error), error, trace)
            status = 1
    recordings = tuple(map(str, [*recorder.recordings, *spawned.recordings]))
    return RecordedScript(status, recordings, None if recordings else str(recorder.why_nothing))


def _run(file: str) -> None:
    """Run a file as Python does: by its absolute path, and as a module that stays until its threads have ended."""
    main = ModuleType("__main__")
    main.__file__, main.__loader__, main.__package__ = file, SourceFileLoader("__main__", file), None
    main.__dict__.update(__builtins__=builtins, __cached__=None, __annotations__={})
    sys.modules["__main__"] = main
    with io.open_code(file) as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102 (the script that the user asked to run)


def _file_of(module: str) -> str:
    """Return the file that `python -m` would run.

    Raises:
        UsageError: There is none.
    """
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
    except Exception as error:  # of the packages around it, which this imports: one is missing, or raises
        got = f"{module}: {type(error).__name__}: {error}"
        raise UsageError("no such module", got=got, hint=f"python -c 'import {module}'") from error
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        expected = "a module, or a package with a __main__, in this directory or installed"
        raise UsageError("no such module", got=module, expected=expected)
    return spec.origin


@contextlib.contextmanager
def _import_path(directory: str) -> Iterator[None]:
    """Have modules be looked for in a directory first."""
    path = list(sys.path)
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path[:] = path


@contextlib.contextmanager
def _as_main(script: str, arguments: Sequence[str]) -> Iterator[None]:
    """Give the script the command line it would have."""
    argv, main = sys.argv, sys.modules["__main__"]
    sys.argv = [script, *arguments]
    try:
        yield
    finally:
        sys.argv, sys.modules["__main__"] = argv, main


def _status(ending: SystemExit) -> int:
    if ending.code is None or isinstance(ending.code, int):
        return ending.code or 0
    sys.stderr.write(f"{ending.code}\n")
    return 1


def _is_of_script(error: BaseException, script: str) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == script:
            return True
        trace = trace.tb_next
    return isinstance(error, SyntaxError)
