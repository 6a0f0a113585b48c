"""Which operations were not recorded, and on which lines of the user's code."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from glassengine.executable.metrics.metrics import registry
from glassengine.results.lazy import Fallback

logger = logging.getLogger("glassengine.lazy")

NOT_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<frozen")
"""Where files begin that are no code of the user."""
_fallbacks: Counter[tuple[str, str, str]] = Counter()


def user_line() -> str:
    """Return "file:line" of the innermost code outside of torch and of this package; "" where there is none."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if not frame.f_code.co_filename.startswith(NOT_USERS):
            return f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
    return ""


def note_fallback(target: Any, reason: str) -> None:
    """Count an operation that ATen computes at once, by the name that PyTorch/XLA gives it, with the user's line."""
    packet = getattr(target, "_overloadpacket", target)
    name = str(packet).replace(".", "::", 1)
    registry.count(name)
    key = (name, reason, user_line())
    registry.count(f"Fallback::{name} at {key[2]}")
    _fallbacks[key] += 1
    if _fallbacks[key] == 1:
        logger.info("%s runs on ATen: %s, at %s", *key)


def fallbacks() -> tuple[Fallback, ...]:
    """Return what was not recorded, the most frequent first."""
    return tuple(Fallback(*key, count) for key, count in _fallbacks.most_common())
