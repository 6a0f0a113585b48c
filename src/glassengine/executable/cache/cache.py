"""The persistent cache of compiled graphs: what another process has compiled is loaded, not compiled again.

It holds no format of its own. An entry is a directory in which the back-end's compiler keeps what it wants to find
again (for Inductor: its FX-graph cache and the libraries it built) and a manifest with the parts of the key. Loading is
the same call of the compiler as compiling, made where it finds its files; it checks its own key as well, so that a part
missing from ours costs a compilation and never gives another graph's code. Any cache failure falls back to
compiling, logs a warning and never raises.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from glassengine import environment
from glassengine.errors import CorruptError, UsageError
from glassengine.executable.cache.key import Parts, digest, explain_miss, key_parts
from glassengine.executable.cache.manifest import Manifest
from glassengine.executable.cache.store import Store, list_files
from glassengine.executable.graph.graph import CapturedGraph
from glassengine.executable.metrics.metrics import registry
from glassengine.writing.files import remove_tree

logger = logging.getLogger("glassengine")

DEFAULT_MAX_BYTES = 2 << 30
Outcome = Literal["hit", "miss", "corrupt", "off"]
_lock = threading.RLock()
_said: set[str] = set()


@dataclass
class Work:
    """What a compiler did in a directory: took the code from it, or cannot keep it there for `reason`."""

    reused: bool = False
    reason: str = ""


class CompilerCache(Protocol):
    """What a back-end hands in whose compiler can find its products again."""

    def parts(self) -> Parts:
        """Return the back-end's name, its options, and its settings that differ from their defaults."""

    def within(self, directory: Path) -> contextlib.AbstractContextManager[Work]:
        """Let the compiler keep its products in `directory` while the block runs; the result is right afterwards."""


@dataclass(frozen=True)
class Compiled:
    """A compiled graph.

    Attributes:
        function: What the compiler gave.
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

    Args:
        name: Of the executable.
        graph: What is compiled.
        compiler: Compiles; is called again where what the cache held proves unusable.
        cache: Of the back-end; None where its compiler keeps nothing.

    Raises:
        Exception: What `compiler` raises.
    """
    store = open_store() if cache is not None else None
    directory = _new_directory() if store is not None else None
    if cache is None or store is None or directory is None:
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
                _count(outcome)
                raise
            outcome, cause = "corrupt", f"cache entry {key} cannot be loaded: {error}"
            _report_damage(store, key, cause)
            _empty(directory)
            with cache.within(directory) as work:
                function = compiler()
        if outcome == "hit" and not work.reused:
            outcome, cause = "miss", "the compiler found a difference that is in no part of the key"
        if outcome != "hit" and not work.reason:
            seconds = time.perf_counter() - start
            _keep(store, Manifest(key, name, graph.hash, parts, cause, seconds), directory)
    _count(outcome)
    if outcome != "hit":
        logger.info("not in the cache: %s: %s%s", name, cause, f"; not kept: {work.reason}" if work.reason else "")
    return Compiled(function, "" if work.reason else key, outcome, cause)


def _count(outcome: Outcome) -> None:
    registry.count(f"PersistentCache{outcome.capitalize()}")


def open_store() -> Store | None:
    """Return the store that the environment names; None, with a warning, where it cannot be used.

    Raises:
        UsageError: GLASS_CACHE_MAX_BYTES is not a number.
    """
    if max_bytes() == 0:
        return None
    root = environment.cache_dirs()["glassengine"]
    try:
        store = _store_at(root)
        store.check()
        return store
    except (UsageError, OSError) as error:
        _warn_once(f"compiled graphs are not kept: {error}")
        return None


def max_bytes() -> int:
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


@functools.lru_cache(maxsize=4)
def _store_at(root: Path) -> Store:
    return Store(root)


def _look_up(store: Store, key: str, parts: Parts, directory: Path) -> tuple[Outcome, str]:
    """Fill `directory` with the entry; return what was found, and why the graph must be compiled where it must."""
    try:
        if store.fetch(key, directory) is not None:
            return "hit", ""
        stored = (
            (f"{entry.manifest.name} {entry.manifest.key[:8]}", entry.manifest.parts) for entry in store.entries()
        )
        return "miss", str(explain_miss(parts, stored))
    except CorruptError as error:
        cause = f"{error.what}: {error.got}" if error.got else error.what
        _report_damage(store, key, cause)
    except Exception as error:  # any cache failure falls back to compiling
        cause = f"the cache cannot be read: {error}"
        _warn_once(cause)
        _empty(directory)
        return "miss", cause
    _empty(directory)
    return "corrupt", cause


def _report_damage(store: Store, key: str, cause: str) -> None:
    logger.warning("%s; it is removed from %s, and compiled again", cause, store.root)
    store.remove(key)


def _keep(store: Store, manifest: Manifest, directory: Path) -> None:
    try:
        store.put(replace(manifest, files=list_files(directory)), directory)
        removed = store.shrink(max_bytes())
    except UsageError:
        raise
    except Exception as error:
        _warn_once(f"compiled graphs are not kept: {error}")
        return
    if removed:
        registry.count("PersistentCacheEvicted", len(removed))
        freed = sum(entry.manifest.num_bytes for entry in removed)
        text = (
            f"the cache {store.root} is full (GLASS_CACHE_MAX_BYTES={max_bytes()}): what was used least recently goes"
        )
        _warn_once(text)
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
    """Return an empty directory, which stays: compiled code may load more of its files when it first runs.

    None, with a warning, where none can be made.
    """
    try:
        if not _scratch(os.getpid()).is_dir():  # temporary files are cleared now and then, and training is long
            _scratch.cache_clear()
        return Path(tempfile.mkdtemp(dir=_scratch(os.getpid())))
    except OSError as error:
        _warn_once(f"compiled graphs are not kept: {error}")
        return None


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        remove_tree(path) if path.is_dir() else path.unlink()
