"""Settings of Inductor, from the environment, and private directories: one of the user, one of each cached graph.

GLASS_CC_FLAGS and NEURON_CC_FLAGS hold flags. `--log_level=INFO` shows the log of the compiler; without it only errors
are shown. Every other flag is a setting of Inductor by its own name, `--max_autotune` or `--cpp.simdlen=256`. Settings
are parts of the key of the persistent cache. The level is not: it does not change the code.

Inductor builds and loads libraries in a directory. By default that has a known name among everybody's temporary files,
so another user of the machine can make it first, with libraries of his own in it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import shlex
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.runtime.cache_dir_utils import default_cache_dir, temporary_cache_dir

from glassengine import environment
from glassengine.errors import UnknownNameError, UsageError, logger
from glassengine.executable.cache import CacheWork
from glassengine.executable.cache_store import Parts
from glassengine.writing import private_directory, remove_tree, untrusted

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_OURS = "GLASS_CC_FLAGS"
_ignored: set[str] = set()


def use_private_directory() -> None:
    """Let Inductor work in its default directory only where that is the user's alone, and otherwise in one that is.

    What the user names himself (TORCHINDUCTOR_CACHE_DIR) is left as it is.
    """
    default = Path(default_cache_dir()).absolute()
    named = environment.inductor_directory()
    if named is not None and named.absolute() != default:
        return
    problem = _problem(default)
    if problem is not None:
        environment.set_inductor_directory(_other(default, problem))


@functools.cache
def _other(default: Path, problem: str) -> Path:
    """Return a directory of this user in place of `default`: among what he keeps, or of this process alone."""
    kept = environment.cache_dirs()["glassengine"]
    place = kept / "inductor"
    if _problem(kept) is not None or _problem(place) is not None:
        place = Path(tempfile.mkdtemp(prefix="glass-inductor-"))
        atexit.register(remove_tree, place)
    logger.warning("Inductor does not use %s: %s, and what is in it is run; it works in %s", default, problem, place)
    return place


def _problem(directory: Path) -> str | None:
    """Return why others could have put something into a directory, which is made if need be; None if they could not."""
    try:
        private_directory(directory)
        found = directory.lstat()
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(found.st_mode):
        return "it is a link"
    return untrusted(found)


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


_DEFAULTS = {name: entry.default for name, entry in vars(torch._inductor.config)["_config"].items()}
# Where things are kept and how many processes compile: nothing of what is computed depends on it.
_IRRELEVANT = frozenset({"compile_threads", "worker_start_method"})


class InductorCache:
    """Inductor's FX-graph cache and the libraries it builds."""

    def parts(self) -> Parts:
        """Return flags and variables of the environment, and every setting that was changed from its default."""
        flags = read_flags().settings
        settings = torch._inductor.config.get_config_copy()
        return {
            "backend": {"name": "inductor"},
            "flags": {name: repr(value) for name, value in sorted(flags.items())},
            "options": {
                name: _text(value)
                for name, value in sorted(settings.items())
                if name not in _IRRELEVANT and name in _DEFAULTS and _is_other(value, _DEFAULTS[name])
            },
            # The defaults themselves come from these.
            "variables": {
                name: value
                for name, value in environment.variables().items()
                if name.startswith("TORCHINDUCTOR_") and name != "TORCHINDUCTOR_CACHE_DIR"
            },
        }

    @contextlib.contextmanager
    def within(self, directory: Path) -> Iterator[CacheWork]:
        """Let Inductor work in `directory`, and see from its own counters whether it compiled."""
        use_private_directory()
        # It probes the processor by compiling, once in a process: not in the directory of the first graph.
        pick_vec_isa()
        work = CacheWork()
        before = _counts()
        with temporary_cache_dir(str(directory)):
            yield work
        hits, misses, bypasses = (now - then for now, then in zip(_counts(), before, strict=True))
        work.reused = hits > 0 and misses == 0 and bypasses == 0
        if bypasses or not any((directory / "fxgraph").glob("*/*/*")):
            work.reason = "Inductor does not keep this graph"


def _counts() -> tuple[int, int, int]:
    found = counters["inductor"]
    return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"], found["fxgraph_cache_bypass"]


def _is_other(value: Any, default: Any) -> bool:
    try:
        return bool(value != default)
    except Exception:  # a value that cannot be compared, e.g. a custom pass
        return value is not default


def _text(value: Any) -> str:
    """Return a setting as text that is the same in every process."""
    if callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return repr(value)
