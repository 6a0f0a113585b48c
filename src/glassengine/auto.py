"""`import glassengine.auto`: record every model that the rest of this process calls.

The recordings are written into the directory that GLASS_RECORD_DIR names, or else into a new `glass-recording`; they
are complete when the process ends in the ordinary way. A process that multiprocessing has spawned writes into a
directory of its own in there, `SpawnProcess-1` and so on, or beside it where none is named; one that is forked records
nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import multiprocessing
import re
import sys
from pathlib import Path
from typing import Any

from glassengine import environment
from glassengine.capture.script_recorder import ScriptRecorder, call_at_end, finish

_log = logging.getLogger(__name__)


def _directory() -> Path:
    named, process = environment.record_dir(), multiprocessing.current_process().name
    if process == "MainProcess":
        return named or _new(Path("glass-recording"))
    # A process that multiprocessing has spawned imports the script, and this module, once more.
    return _new(Path("glass-recording") if named is None else named / re.sub(r"[^\w.-]", "_", process))


def _new(wanted: Path) -> Path:
    """Make a directory that no other process has, and return it."""
    for number in itertools.count(1):
        candidate = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with contextlib.suppress(FileExistsError):
            candidate.mkdir(parents=True)
            return candidate
    raise AssertionError("there is always another number")


def _start() -> ScriptRecorder:
    recorder = ScriptRecorder(_directory())
    recorder.__enter__()
    error: list[BaseException] = []
    before = sys.excepthook

    def note(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        error.append(value)
        before(kind, value, trace)

    def end(raised: BaseException | None = None) -> None:
        finish(recorder, error[0] if error else raised)
        if is_main and not error and recorder.why_nothing is not None:
            _log.warning("%s", recorder.why_nothing)

    sys.excepthook = note
    is_main = multiprocessing.current_process().name == "MainProcess"
    if is_main:
        atexit.register(end)
    else:
        call_at_end(recorder, end)
    return recorder


recorder = _start()
"""The recordings of this process."""
