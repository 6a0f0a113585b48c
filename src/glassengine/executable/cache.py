"""Shares compiled graphs between processes: the second process loads them, and compiles nothing.

The compiler keeps its products in a directory (Inductor: the FX-graph and AOTAutograd caches of torch, and the
libraries that it built); an entry of the store is such a directory. Loading is the same call of the compiler, in a copy
of that directory. The compiler compares its own key as well, so a part missing from ours costs a compilation and never
gives the code of another graph. Any cache failure falls back to compiling, logs a warning and never raises.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from glassengine import environment
from glassengine.errors import CorruptError, UsageError, logger
from glassengine.executable.cache_store import (
    CacheManifest,
    Parts,
    Store,
    differences,
    digest,
    explain_miss,
    key_parts,
    surroundings,
)
from glassengine.executable.counters import registry
from glassengine.executable.graph import CapturedGraph
from glassengine.results.backends import CachedGraph, CacheReport
from glassengine.writing import remove_tree

DEFAULT_MAX_BYTES = 2 << 30
Outcome = Literal["hit", "miss", "corrupt", "off"]
_lock = threading.RLock()
_said: set[str] = set()


@dataclass
class CacheWork:
    """Reports what a compiler did in a directory: it took the code from it, or cannot keep it there for `reason`."""

    reused: bool = False
    reason: str = ""


class CompilerCache(Protocol):
    """The caches of a compiler that can find its products again."""

    def parts(self) -> Parts:
        """Return the back-end's name, its options, and its settings that differ from their defaults."""

    def within(self, directory: Path) -> contextlib.AbstractContextManager[CacheWork]:
        """Let the compiler keep its products in `directory` while the block runs; the result is right afterwards."""


@dataclass(frozen=True)
class Compiled:
    """A compiled graph.

    Attributes:
        function: Result of the compiler.
        key: In the cache; "" where it is not kept there.
        outcome: "hit" if nothing was compiled; else "miss", "corrupt" (an entry was damaged), "off" (no cache).
        cause: Why it was compiled; "" for a hit.
    """

    function: Callable[[Any], Any]
    key: str
    outcome: Outcome
    cause: str


def compiled(
    name: str, graph: CapturedGraph, compiler: Callable[[], Callable[[Any], Any]], cache: CompilerCache | None
) -> Compiled:
    """Return the compiled `graph`: from the cache, or compiled and stored there.

    `compiler` is called again if a cached product proves unusable; `cache` is None where it keeps nothing.

    Raises:
        Exception: Any exception of `compiler`.
    """
    store = _open_store() if cache is not None else None
    if cache is None or store is None or (directory := _new_directory()) is None:
        return Compiled(compiler(), "", "off", "the cache is off")
    parts = key_parts(graph, cache.parts())
    key = digest(parts)
    # Compilers find their directory through a variable of the process.
    with _lock:
        outcome, cause = _look_up(store, key, parts, directory)
        start = time.perf_counter()
        try:
            with cache.within(directory) as work:
                function = compiler()
        except Exception as error:
            if outcome != "hit":
                registry.count(f"PersistentCache{outcome.capitalize()}")
                raise
            outcome, cause = "corrupt", _drop(store, key, f"cache entry {key} cannot be loaded: {error}")
            directory = Path(tempfile.mkdtemp(dir=directory.parent))
            with cache.within(directory) as work:
                function = compiler()
        if outcome == "hit" and not work.reused:
            outcome, cause = "miss", "the compiler found a difference that is in no part of the key"
        if outcome != "hit" and not work.reason:
            _keep(store, name, graph.hash, parts, cause, time.perf_counter() - start, directory)
    registry.count(f"PersistentCache{outcome.capitalize()}")
    if outcome != "hit":
        logger.info("not in the cache: %s: %s%s", name, cause, f"; not kept: {work.reason}" if work.reason else "")
    return Compiled(function, "" if work.reason else key, outcome, cause)


def examine_cache() -> CacheReport:
    """Return what the persistent cache of compiled graphs holds; nothing is created or changed.

    Raises:
        UsageError: GLASS_CACHE_MAX_BYTES is not a number.
    """
    root, limit = environment.cache_dirs()["glassengine"], _max_bytes()
    if not root.exists():
        return CacheReport(str(root), limit, "", (), {})
    try:
        store, now = Store(root), surroundings()
        entries = [
            CachedGraph(
                found.manifest.key,
                found.manifest.name,
                found.manifest.graph_hash,
                found.num_hits,
                found.manifest.num_bytes,
                found.manifest.compile_s,
                found.last_used,
                found.manifest.cause,
                "; ".join(map(str, differences({part: found.manifest.parts.get(part, {}) for part in now}, now))),
                found.manifest.parts,
            )
            for found in sorted(store.entries(), key=lambda found: -found.last_used)
        ]
        return CacheReport(str(root), limit, "", tuple(entries), store.damaged())
    except (UsageError, OSError) as error:
        return CacheReport(str(root), limit, str(error), (), {})


def _open_store() -> Store | None:
    """Return the store that the environment names; None, with a warning, where it cannot be used.

    Raises:
        UsageError: GLASS_CACHE_MAX_BYTES is not a number.
    """
    if _max_bytes() == 0:
        return None
    try:
        return Store(environment.cache_dirs()["glassengine"])
    except (UsageError, OSError) as error:
        _warn_once(f"compiled graphs are not kept: {error}")
        return None


def _max_bytes() -> int:
    """Return how large the cache may grow.

    Raises:
        UsageError: GLASS_CACHE_MAX_BYTES is not a number.
    """
    value = environment.cache_max_bytes() or str(DEFAULT_MAX_BYTES)
    if not value.isdecimal():
        raise UsageError(
            "GLASS_CACHE_MAX_BYTES is not a number of bytes",
            got=repr(value),
            expected="digits; 0 for no cache",
            hint=f"GLASS_CACHE_MAX_BYTES={DEFAULT_MAX_BYTES}",
        )
    return int(value)


def _look_up(store: Store, key: str, parts: Parts, directory: Path) -> tuple[Outcome, str]:
    """Fill `directory` with the entry; return what was found, and why the graph must be compiled where it must."""
    try:
        if store.fetch(key, directory):
            return "hit", ""
        stored = (found.manifest for found in store.entries())
        return "miss", explain_miss(parts, ((f"{one.name} {one.key[:8]}", one.parts) for one in stored))
    except CorruptError as error:
        return "corrupt", _drop(store, key, f"{error.what}: {error.got}" if error.got else error.what)
    except Exception as error:  # any cache failure falls back to compiling
        _warn_once(cause := f"the cache cannot be read: {error}")
        return "miss", cause


def _drop(store: Store, key: str, cause: str) -> str:
    logger.warning("%s; it is removed from %s, and compiled again", cause, store.root)
    store.remove(key)
    return cause


def _keep(store: Store, name: str, hash: str, parts: Parts, cause: str, seconds: float, directory: Path) -> None:
    plain = {part: dict(values) for part, values in parts.items()}
    limit = _max_bytes()
    try:
        manifest = CacheManifest(
            key=digest(parts), name=name, graph_hash=hash, parts=plain, cause=cause, compile_s=round(seconds, 3)
        )
        store.put(manifest, directory)
        removed = store.shrink(limit)
    except Exception as error:
        _warn_once(f"compiled graphs are not kept: {error}")
        return
    if removed:
        registry.count("PersistentCacheEvicted", len(removed))
        _warn_once(f"the cache {store.root} is full (GLASS_CACHE_MAX_BYTES={limit}): least recently used entries go")
        freed = sum(entry.manifest.num_bytes for entry in removed)
        logger.info("removed from the cache: %d entries, %d bytes", len(removed), freed)


def _warn_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.warning("%s", text)


@functools.cache
def _scratch(pid: int) -> Path:
    """Return a directory of this process, removed when it ends; a forked child gets its own."""
    path = Path(tempfile.mkdtemp(prefix="glass-compile-"))

    def remove() -> None:
        if os.getpid() == pid:
            remove_tree(path)

    atexit.register(remove)
    return path


def _new_directory() -> Path | None:
    """Return an empty directory that stays: compiled code may load more files of it when it first runs.

    None, with a warning, where none can be made.
    """
    try:
        if not _scratch(os.getpid()).is_dir():  # temporary files are cleared now and then, and training is long
            _scratch.cache_clear()
        return Path(tempfile.mkdtemp(dir=_scratch(os.getpid())))
    except OSError as error:
        _warn_once(f"compiled graphs are not kept: {error}")
        return None
