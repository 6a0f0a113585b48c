"""Run a Python script as `python script.py ARGS` would, and record the models it calls."""

from __future__ import annotations

import contextlib
import runpy
import sys
import threading
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from glassengine.capture.script import ScriptRecorder
from glassengine.errors import UsageError
from glassengine.results import Result


@dataclass(frozen=True)
class RecordedScript(Result):
    """How a script ended and what was recorded.

    Attributes:
        status: Its exit status.
        recordings: Directories, one per model.
    """

    status: int
    recordings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the script succeeded and called a model."""
        return self.status == 0 and bool(self.recordings)


def record_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    path: str | Path,
    sites: Sequence[str] | None = None,
    values: bool | Sequence[str] = True,
    steps: Collection[int] | None = None,
    byte_budget: int | None = None,
    overwrite: bool = False,
) -> RecordedScript:
    """Run a script in this process and record every model it calls.

    Args:
        script: A Python file.
        arguments: Its command line.
        path: Directory that gets one recording per model; new or empty.
        sites: As for `record`.
        values: As for `record`.
        steps: As for `record`; counted for each model.
        byte_budget: As for `record`; for each model.
        overwrite: Replace recordings that exist.

    Raises:
        UsageError: There is no such script, or the directory is not empty.
        GlassError: Not everything could be written.
    """
    if not Path(script).is_file():
        raise UsageError("there is no such script", got=str(script), hint="glass record -o DIR -- script.py ARGS")
    recorder = ScriptRecorder(
        path, sites=sites, values=values, steps=steps, byte_budget=byte_budget, overwrite=overwrite
    )
    status = 0
    try:
        with recorder, _as_main(str(script), arguments), _threads_ended():
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ending:
        status = _status(ending)
    except Exception as error:
        if not _is_of_script(error, str(script)):
            raise
        # As Python itself would, without the frames that are ours.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        status = 1
    return RecordedScript(status, tuple(map(str, recorder.recordings)))


@contextlib.contextmanager
def _as_main(script: str, arguments: Sequence[str]) -> Iterator[None]:
    """Give the script the command line and the import path it would have."""
    argv, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = argv, path, main


@contextlib.contextmanager
def _threads_ended() -> Iterator[None]:
    """Wait at the end for the threads that were begun meanwhile, as Python does before it exits: all but daemons."""
    before = set(threading.enumerate())
    try:
        yield
    finally:
        while left := [thread for thread in set(threading.enumerate()) - before if not thread.daemon]:
            left[0].join()


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
