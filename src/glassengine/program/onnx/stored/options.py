"""Options of a session of ONNX Runtime, as a user makes it.

    graph_optimization_level=basic     an attribute of SessionOptions; levels by their short names
    session.set_denormal_as_zero=1     an entry of its configuration, which has a dot in its name
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from glassengine.errors import UnknownNameError, UsageError
from glassengine.reading.documents import read_document

Given = Mapping[str, Any] | str | Path | Sequence[str] | None

LEVELS = {
    "disable": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "layout": "ORT_ENABLE_LAYOUT",
    "all": "ORT_ENABLE_ALL",
}
_LEVEL = "graph_optimization_level"
_ENUMS = {_LEVEL: "GraphOptimizationLevel", "execution_mode": "ExecutionMode", "execution_order": "ExecutionOrder"}
_SWITCHES = ("enable_cpu_mem_arena", "enable_mem_pattern", "enable_mem_reuse", "use_deterministic_compute")
_NUMBERS = ("intra_op_num_threads", "inter_op_num_threads")
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class SessionSettings:
    """How a session is made; what is not said is ONNX Runtime's own default, which optimizes as far as it can.

    Attributes:
        given: Option -> value.
    """

    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def level(self) -> str:
        """How far the graph is optimized: a key of `LEVELS`."""
        asked = str(self.given.get(_LEVEL, "all"))
        return next((short for short, name in LEVELS.items() if name == asked), asked)

    def options(self) -> Any:
        """Return the options as ONNX Runtime takes them.

        Raises:
            UsageError: It refuses a value.
        """
        import onnxruntime

        made = onnxruntime.SessionOptions()
        made.intra_op_num_threads = torch.get_num_threads()
        made.log_severity_level = 4  # what it says is in the error
        for name, value in self.given.items():
            try:
                if "." in name:
                    made.add_session_config_entry(name, str(value))
                elif name in _ENUMS:
                    setattr(made, name, getattr(getattr(onnxruntime, _ENUMS[name]), LEVELS.get(str(value), str(value))))
                else:
                    setattr(made, name, value)
            except Exception as error:  # whatever its C++ raises
                raise UsageError("ONNX Runtime does not take a session option", got=f"{name}={value}") from error
        return made


def session_settings(given: Given) -> SessionSettings:
    """Return the settings that a user names.

    Args:
        given: A mapping, the path of a JSON object, or texts "KEY=VALUE" (or paths).

    Raises:
        UsageError: A text is neither, or a value is of another kind.
        UnknownNameError: There is no such option, or it changes nothing that is computed.
    """
    found: dict[str, Any] = {}
    if isinstance(given, Mapping):
        found = dict(given)
    else:
        for text in [given] if isinstance(given, str | Path) else given or ():
            name, has_value, value = str(text).partition("=")
            if str(text).endswith(".json"):
                found |= read_document(text, dict[str, Any], most=_MOST_BYTES, what="the session options")
            elif has_value:
                found[name.strip()] = value.strip()
            else:
                raise UsageError(
                    "--session-options are KEY=VALUE, or a JSON file", got=str(text), expected=f"{_LEVEL}=basic"
                )
    return SessionSettings({name: _value(name, value) for name, value in found.items()})


def _value(name: str, value: Any) -> Any:
    if name == _LEVEL and value not in (*LEVELS, *LEVELS.values()):
        raise UnknownNameError("optimization level", str(value), list(LEVELS))
    if "." in name or name in _ENUMS:
        return value
    if name not in (*_SWITCHES, *_NUMBERS):
        known = [*_ENUMS, *_SWITCHES, *_NUMBERS]
        raise UnknownNameError("session option", name, known, hint="entries of a session's configuration have a dot")
    try:
        value = json.loads(value.lower()) if isinstance(value, str) else value
    except ValueError:
        value = None
    if isinstance(value, bool) if name in _SWITCHES else isinstance(value, int) and not isinstance(value, bool):
        return value
    kind = "true or false" if name in _SWITCHES else "a whole number"
    raise UsageError(f"the session option {name} has another kind of value", expected=kind)
