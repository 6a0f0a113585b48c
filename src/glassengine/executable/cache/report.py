"""What the persistent cache holds: entries, hits, sizes, and why each had to be compiled."""

from __future__ import annotations

from glassengine import environment
from glassengine.errors import UsageError
from glassengine.executable.cache.cache import max_bytes
from glassengine.executable.cache.key import differences, surroundings
from glassengine.executable.cache.store import Store
from glassengine.results.compilation import CachedGraph, CacheReport


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
