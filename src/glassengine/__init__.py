"""Glass Engine: compile a Hugging Face model into an engine you can see through.

The public names below are imported when they are first used, so that `import glassengine` costs nothing and changes
nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Public name -> module that defines it. The only list of public names; `__all__` is taken from it.
_PUBLIC = {
    "BackendError": "glassengine.errors",
    "CorruptError": "glassengine.errors",
    "GlassError": "glassengine.errors",
    "IncomparableError": "glassengine.errors",
    "NetworkOutputs": "glassengine.taps",
    "Recording": "glassengine.recording.reader",
    "UnknownNameError": "glassengine.errors",
    "UsageError": "glassengine.errors",
    "build": "glassengine.engine",
    "check": "glassengine.diagnose",
    "compare": "glassengine.compare",
    "load": "glassengine.engine",
    "named_network_outputs": "glassengine.taps",
    "sites": "glassengine.program",
    "tap": "glassengine.taps",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
