"""Caches the libraries of Inductor on disk, in a directory of their own for each graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

from glassengine import environment
from glassengine.backends.inductor.settings import read_flags, use_private_directory
from glassengine.executable.cache.cache import CacheWork
from glassengine.executable.cache.key import Parts

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
