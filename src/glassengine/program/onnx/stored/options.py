"""Options of a session of ONNX Runtime, as a user makes it.

`graph_optimization_level=basic` is an attribute of SessionOptions; the levels are disable, basic, extended, layout and
all. `session.set_denormal_as_zero=1` is an entry of its configuration, which has a dot in its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from glassengine.errors import BackendError, UsageError
from glassengine.program.onnx.stored.file import INSTALL
from glassengine.reading.documents import read_document

_LEVEL = "graph_optimization_level"
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
        """How far the graph is optimized."""
        name = str(self.given.get(_LEVEL, "all")).lower()
        return "disable" if "disable" in name else name.removeprefix("ort_enable_")

    def options(self) -> Any:
        """Return the options as ONNX Runtime takes them.

        Raises:
            BackendError: It is not installed.
            UsageError: It has no such option, or refuses the value.
        """
        try:
            import onnxruntime
        except ImportError as error:
            raise BackendError("an ONNX file cannot be run here", got=str(error), hint=INSTALL) from error
        made = onnxruntime.SessionOptions()
        made.intra_op_num_threads = torch.get_num_threads()
        made.log_severity_level = 4  # what it says is in the error
        for name, value in self.given.items():
            try:
                if "." in name:
                    made.add_session_config_entry(name, str(value))
                elif name == _LEVEL:
                    way = "DISABLE_ALL" if self.level == "disable" else f"ENABLE_{self.level.upper()}"
                    made.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{way}")
                else:
                    setattr(made, name, value)
            except Exception as error:  # whatever its C++ raises
                known = [one for one in dir(made) if not callable(getattr(made, one)) and one[0] != "_"]
                raise UsageError(
                    "ONNX Runtime does not take a session option", got=f"{name}={value}", expected=", ".join(known)
                ) from error
        return made


def session_settings(given: Mapping[str, Any] | str | Path | Sequence[str] | None) -> SessionSettings:
    """Return the settings that a user names: a mapping, the path of a JSON object, or texts "KEY=VALUE".

    Raises:
        UsageError: A text is neither.
    """
    if isinstance(given, Mapping):
        return SessionSettings(dict(given))
    settings: dict[str, Any] = {}
    for text in map(str, [given] if isinstance(given, str | Path) else given or ()):
        name, has_value, value = text.partition("=")
        if text.endswith(".json"):
            settings |= read_document(text, dict[str, Any], most=_MOST_BYTES, what="the session options")
        elif not has_value:
            raise UsageError("--session-options are KEY=VALUE, or a JSON file", got=text, expected=f"{_LEVEL}=basic")
        else:
            settings[name] = _plain(value)
    return SessionSettings(settings)


def _plain(text: str) -> bool | int | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.isdecimal() else text
