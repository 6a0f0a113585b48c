"""What the persistent cache holds: entries, hits, sizes, and why each had to be compiled."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from glassengine import environment
from glassengine.errors import UsageError
from glassengine.executable.cache.cache import max_bytes
from glassengine.executable.cache.key import differences, surroundings
from glassengine.executable.cache.store import Store


@dataclass(frozen=True)
class CachedGraph:
    """One entry of the cache.

    Attributes:
        key: Of the entry: the name of its directory.
        name: Of the executable that it was compiled for first.
        graph_hash: Of its graph.
        num_hits: How often another process took it.
        num_bytes: Of its files.
        compile_s: Seconds that compiling took.
        last_used: In seconds since the epoch; when it was made, before its first hit.
        cause: Why it had to be compiled: what differed from the nearest entry of that time.
        stale: Why it would not be taken here and now: versions or processor that differ. "" where it would.
        parts: Everything its key is made of.
    """

    key: str
    name: str
    graph_hash: str
    num_hits: int
    num_bytes: int
    compile_s: float
    last_used: float
    cause: str
    stale: str
    parts: dict[str, dict[str, str]]


@dataclass(frozen=True)
class CacheReport:
    """The cache as it is.

    Attributes:
        directory: Where it is; it need not exist.
        max_bytes: How large it may grow; 0 where it is turned off.
        problem: Why it cannot be used; "" where it can.
        entries: Those used last come first.
        damaged: Key -> what is wrong.
    """

    directory: str
    max_bytes: int
    problem: str
    entries: tuple[CachedGraph, ...]
    damaged: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether the cache can be used and nothing in it is damaged."""
        return not self.problem and not self.damaged

    @property
    def num_bytes(self) -> int:
        """Of all entries."""
        return sum(entry.num_bytes for entry in self.entries)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {"ok": self.ok, "num_bytes": self.num_bytes, **asdict(self)}


def examine_cache() -> CacheReport:
    """Return what the persistent cache of compiled graphs holds; nothing is created or changed.

    Raises:
        UsageError: GLASS_CACHE_MAX_BYTES is not a number.
    """
    root, limit = environment.cache_dirs()["glassengine"], max_bytes()
    if not root.exists():
        return CacheReport(str(root), limit, "", (), {})
    try:
        store = Store(root)
        now = surroundings()
        entries = [
            CachedGraph(
                entry.manifest.key,
                entry.manifest.name,
                entry.manifest.graph_hash,
                entry.num_hits,
                entry.manifest.num_bytes,
                entry.manifest.compile_s,
                entry.last_used,
                entry.manifest.cause,
                "; ".join(map(str, differences({part: entry.manifest.parts.get(part, {}) for part in now}, now))),
                {part: dict(values) for part, values in entry.manifest.parts.items()},
            )
            for entry in store.entries()
        ]
        damaged = store.damaged()
    except (UsageError, OSError) as error:
        return CacheReport(str(root), limit, str(error), (), {})
    entries.sort(key=lambda entry: -entry.last_used)
    return CacheReport(str(root), limit, "", tuple(entries), damaged)
