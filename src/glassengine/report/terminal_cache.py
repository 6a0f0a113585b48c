"""The cache of compiled graphs on the terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glassengine.results.compilation import CacheReport


def cache_lines(report: CacheReport) -> Iterator[str]:
    """Yield the lines: where and how full it is, a table of its entries, and why each was compiled."""
    limit = "turned off: GLASS_CACHE_MAX_BYTES=0" if report.max_bytes == 0 else f"at most {_size(report.max_bytes)}"
    count = f"{len(report.entries)} {'entry' if len(report.entries) == 1 else 'entries'}"
    yield f"{report.directory}: {count}, {_size(report.num_bytes)}, {limit}"
    if report.problem:
        yield f"not used: {report.problem}"
    if report.entries:
        yield "beyond that, what was used least recently is removed"
        yield ""
        width = max(len("name"), *(len(entry.name) for entry in report.entries))
        title = f"{'hits':>5}  {'last used':<16}  {'size':>9}  {'compiled':>8}  why it was compiled"
        yield f"{'key':<8}  {'name':<{width}}  {title}"
        for entry in report.entries:
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used))
            yield (
                f"{entry.key[:8]}  {entry.name:<{width}}  {entry.num_hits:>5}  {used}  {_size(entry.num_bytes):>9}  "
                f"{entry.compile_s:>6.1f} s  {entry.cause}"
            )
    stale = [entry for entry in report.entries if entry.stale]
    if stale:
        yield ""
        yield f"built elsewhere, and recompiled here on use: {len(stale)}"
        for entry in stale:
            yield f"  {entry.key[:8]}  {entry.name:<{width}}  {entry.stale}"
    for key, problem in report.damaged.items():
        yield f"damaged, compiled again when wanted: {key[:8]}  {problem.splitlines()[0]}"


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
