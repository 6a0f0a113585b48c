"""Facts of the `generate` of transformers that calls a model: its settings, the prompt of a pipeline."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from glassengine.prompt.settings import NAMES

_GENERATION, _PIPELINES = "transformers.generation.", "transformers.pipelines."
_MOST_FRAMES = 64
_MOST_CHARACTERS = 1 << 16


def generation_facts() -> dict[str, Any]:
    """Return "sampling" (settings in force) and "prompt" (its text), as far as the callers have them."""
    facts: dict[str, Any] = {}
    if f"{_GENERATION}utils" not in sys.modules:
        return facts
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(_GENERATION) and "sampling" not in facts:
            config = frame.f_locals.get("generation_config")
            values = {name: getattr(config, name, None) for name in NAMES}
            known = {name: value for name, value in values.items() if isinstance(value, (bool, int, float, list))}
            if "max_new_tokens" in known:
                known.pop("max_length", None)  # follows from it and the prompt
            facts |= {"sampling": known} if known else {}
        if module.startswith(_PIPELINES) and isinstance(text := frame.f_locals.get("prompt_text"), str):
            facts["prompt"] = text[:_MOST_CHARACTERS]
        frame = frame.f_back
    return facts
