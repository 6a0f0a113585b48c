"""`import glassengine.auto`: record every model that the rest of this process calls.

The recordings are written into the directory that GLASS_RECORD_DIR names, or else into a new `glass-recording`; they
are complete when the process ends in the ordinary way.
"""

from __future__ import annotations

import atexit
import sys
from pathlib import Path
from typing import Any

from glassengine import environment
from glassengine.capture.script import ScriptRecorder


def _directory() -> Path:
    named = environment.record_dir()
    if named is not None:
        return named
    candidate, number = Path("glass-recording"), 1
    while candidate.exists():
        number += 1
        candidate = Path(f"glass-recording-{number}")
    return candidate


def _start() -> ScriptRecorder:
    recorder = ScriptRecorder(_directory())
    recorder.__enter__()
    error: list[BaseException] = []
    before = sys.excepthook

    def note(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        error.append(value)
        before(kind, value, trace)

    def finish() -> None:
        what = error[0] if error else None
        recorder.__exit__(type(what) if what else None, what, None)

    sys.excepthook = note
    atexit.register(finish)
    return recorder


recorder = _start()
"""The recordings of this process."""
