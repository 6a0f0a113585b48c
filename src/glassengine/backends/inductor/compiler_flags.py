"""Flags for the compiler, as the variables GLASS_CC_FLAGS and NEURON_CC_FLAGS give them.

`--log_level=INFO` shows what the compiler logs; without it only errors are shown. Every other flag is a setting of
Inductor by its own name, `--max_autotune` or `--cpp.simdlen=256`. Settings are parts of the key of the persistent
cache. The level is not: it changes nothing of the code, and turning it on must not compile everything again.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from glassengine import environment
from glassengine.errors import UnknownNameError, UsageError

logger = logging.getLogger("glassengine")

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_OURS = "GLASS_CC_FLAGS"
_ignored: set[str] = set()


@dataclass(frozen=True)
class CompilerFlags:
    """What the flags say: the level of the compiler's log ("" if nothing), and settings of Inductor by name."""

    log_level: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


def read_flags() -> CompilerFlags:
    """Return the flags in effect; they are read for each compilation, since scripts set them late.

    Raises:
        UnknownNameError: GLASS_CC_FLAGS has a flag that there is not. One in NEURON_CC_FLAGS is meant for another
            compiler: it is ignored, and said once.
        UsageError: The value of a flag does not fit.
    """
    text, source = environment.compiler_flags()
    level, settings = "", {}
    known = torch._inductor.config.get_config_copy()
    for word in shlex.split(text):
        name, _, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if word.startswith("--") and name == "log_level":
            level = _one_of(value.upper(), word, source)
        elif word.startswith("--") and name in known:
            settings[name] = _typed(value, known[name], word, source)
        elif source == _OURS:
            raise UnknownNameError(
                "compiler flag", word, ("--log_level", *(f"--{name}" for name in known)), hint=f"change {source}"
            )
        elif word not in _ignored:
            _ignored.add(word)
            logger.warning("%s in %s is of another compiler and ignored", word, source)
    return CompilerFlags(level, settings)


@contextlib.contextmanager
def flags_in_effect() -> Iterator[None]:
    """Compile with the flags of the environment while the block runs; torch shows on stderr what its compiler logs."""
    flags = read_flags()
    with contextlib.ExitStack() as stack:
        # It logs a line for every template of every kind of device.
        stack.enter_context(_level("torch._inductor.template_heuristics", "WARNING"))
        # A user who asked for more through TORCH_LOGS gets it.
        if flags.log_level or logging.getLogger("torch._inductor").getEffectiveLevel() >= logging.WARNING:
            stack.enter_context(_level("torch._inductor", flags.log_level or "ERROR"))
        stack.enter_context(torch._inductor.config.patch(flags.settings))
        yield


@contextlib.contextmanager
def _level(name: str, level: str) -> Iterator[None]:
    found = logging.getLogger(name)
    before = found.level
    found.setLevel(level)
    try:
        yield
    finally:
        found.setLevel(before)


def _one_of(level: str, word: str, source: str) -> str:
    if level not in _LEVELS:
        raise UsageError(f"{word} in {source} is not a log level", got=repr(level), expected=_LEVELS)
    return level


def _typed(value: str, default: Any, word: str, source: str) -> Any:
    """Return `value` as the type that a setting has; an absent value switches it on."""
    lowered = value.lower()
    try:
        if isinstance(default, bool) or lowered in ("true", "false", ""):
            return {"": True, "1": True, "true": True, "0": False, "false": False}[lowered]
        if default is None:
            return int(value) if value.lstrip("-").isdecimal() else value
        if isinstance(default, (int, float, str)):
            return type(default)(value)
        raise ValueError("it is not a plain value")
    except (KeyError, ValueError) as error:
        kind = type(default).__name__
        raise UsageError(
            f"{word} in {source} does not fit", got=repr(value), expected=f"a value like {default!r} ({kind})"
        ) from error
