"""Runs Python code as `python script.py ARGS` or `python -m module ARGS` would, and records the models it calls.

The script ends as the end of its interpreter would end it. Python ends the non-daemon threads first, calling what
`threading._register_atexit` got before it waits for them, and then calls what `atexit` got, the last first. A script
may end within a process that goes on: what that process had before is left alone.
"""

from __future__ import annotations

import atexit
import builtins
import concurrent.futures.process
import concurrent.futures.thread  # noqa: F401
import contextlib
import importlib.util
import inspect
import io
import multiprocessing
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Unpack

from glassengine import asked
from glassengine.capture.script_recorder import ScriptRecorder, SpawnedRecordings
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
    recorder = ScriptRecorder(path, **options)
    return run_recorded(recorder, script, arguments, is_module=is_module, ends_process=ends_process)


def run_recorded(
    recorder: ScriptRecorder,
    script: str | Path,
    arguments: Sequence[str],
    *,
    is_module: bool = False,
    ends_process: bool = False,
) -> RecordedScript:
    """Run a script as `record_script` does, with a recorder of the caller."""
    status, process = 0, os.getpid()
    with _import_path(str(Path.cwd() if is_module else Path(script).resolve().parent)):
        file = _file_of(str(script)) if is_module else str(Path(script).absolute())
        if not Path(file).is_file():
            asked.script(str(script))
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
            # As Python itself would, without the frames that are ours.
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename != file:
                trace = trace.tb_next
            if trace is None and not isinstance(error, SyntaxError):
                raise
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
    """Return the file that `python -m` would run."""
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


_POLL = 0.05  # seconds


@contextlib.contextmanager
def script_ended(*, ends_process: bool = False) -> Iterator[None]:
    """On leaving, end what was begun meanwhile: threads and executors, functions registered for the end, processes.

    Args:
        ends_process: This process ends with the script: its main thread has then ended for the threads that watch it.
    """
    threads, children = set(threading.enumerate()), set(multiprocessing.active_children())
    with _registered_at_exit() as registered:
        num_before = len(_thread_functions())
        try:
            yield
        finally:
            if ends_process:
                threading._shutdown()  # type: ignore[attr-defined]
            _end_threads(threads, num_before)
            _call(registered)
            _end_threads(threads, num_before)  # which these functions began
            for child in set(multiprocessing.active_children()) - children:
                if not child.daemon:
                    child.join()


def _thread_functions() -> list[Callable[[], object]]:
    """Return what is called before the interpreter waits for its threads; the live list."""
    found: list[Callable[[], object]] = getattr(threading, "_threading_atexits", [])
    return found


def _end_threads(before: set[threading.Thread], num_before: int) -> None:
    """Wait for the threads that are not in `before`, daemons left out; executors that keep theirs waiting are shut."""
    functions = _thread_functions()
    while len(functions) > num_before:
        _call([(functions.pop(), (), {})])
    while left := [thread for thread in set(threading.enumerate()) - before if not thread.daemon]:
        for thread in left:
            executor = _executor_of(thread)
            if executor is not None:
                # Work that is waiting is done, as at the end of the interpreter.
                executor.shutdown(wait=False)
        left[0].join(_POLL)


def _executor_of(thread: threading.Thread) -> Executor | None:
    """Return the executor that `thread` works for, if it does: a pool of threads, or of processes."""
    references = [*getattr(thread, "_args", ())[:1], getattr(thread, "executor_reference", None)]
    for reference in references:
        executor = reference() if callable(reference) else None
        if isinstance(executor, Executor):
            return executor
    return None


_Registered = list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]]


@contextlib.contextmanager
def _registered_at_exit() -> Iterator[_Registered]:
    """Collect what is registered with `atexit` meanwhile, which the interpreter then does not call itself."""
    collected: _Registered = []
    register, unregister = atexit.register, atexit.unregister

    def collect(function: Any, /, *args: Any, **kwargs: Any) -> Any:
        # What is of Python itself (finalizers, say) is the process's, not its first user's; what cannot be called
        # raises there.
        root = str(getattr(function, "__module__", None) or "").partition(".")[0]
        is_python = inspect.isroutine(function) and root in sys.stdlib_module_names
        if is_python or not callable(function):
            return register(function, *args, **kwargs)
        collected.append((function, args, kwargs))
        return function

    def forget(function: Any, /) -> None:
        collected[:] = [item for item in collected if item[0] != function]
        unregister(function)

    atexit.register, atexit.unregister = collect, forget
    try:
        yield collected
    finally:
        atexit.register, atexit.unregister = register, unregister
        for function, args, kwargs in collected:
            register(function, *args, **kwargs)  # since something stopped us


def _call(registered: _Registered) -> None:
    """Call and forget functions, the last first; what one raises is printed and stops no other."""
    while registered:
        function, args, kwargs = registered.pop()
        try:
            function(*args, **kwargs)
        except SystemExit:
            pass
        except Exception:
            sys.stderr.write(f"Exception ignored in atexit callback: {function!r}\n")
            traceback.print_exc()
