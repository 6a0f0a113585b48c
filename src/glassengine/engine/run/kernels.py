"""The kernels of an engine by the sites that they compute, for profiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from glassengine.sites import SiteTable


def kernel_sites(
    kernels: Callable[[Path], Iterable[tuple[str, tuple[str, ...]]]], directory: Path, sites: SiteTable
) -> list[tuple[str, str]]:
    """Return (kernel, site of the last node that it computes), for a profile; none where the engine is gone by then."""
    if not directory.exists():
        return []
    order = {node: number for number, node in enumerate(sites.by_node)}
    named = []
    for kernel, nodes in kernels(directory):
        last = max((node for node in nodes if node in order), key=order.__getitem__, default=None)
        named.append((kernel, kernel if last is None else sites.by_node[last][0].name))
    return named
