"""What is in a directory of snapshots."""

from __future__ import annotations

from pathlib import Path

from glassengine.errors import CorruptError, UsageError
from glassengine.executable.snapshot import layout
from glassengine.executable.snapshot.reader import Snapshot
from glassengine.reading.copies import here
from glassengine.results.recorded import ListedSnapshot


def list_snapshots(directory: str | Path) -> tuple[ListedSnapshot, ...]:
    """Return every snapshot of a directory, by name; those that were never finished, and damaged ones, too.

    Raises:
        UsageError: There is none.
    """
    root = here(directory)
    try:
        found = sorted(path for path in root.iterdir() if path.is_dir())
    except OSError as error:
        raise UsageError("cannot read a directory of snapshots", got=f"{error.strerror} ({root})") from error
    listed = []
    for path in found:
        if path.name.startswith(".") and path.name.endswith(".partial"):
            listed.append(ListedSnapshot(path.name, "unfinished", num_bytes=_size(path)))
        elif (path / layout.META).exists():
            listed.append(_listed(path))
    if not listed:
        raise UsageError(
            "no snapshots", got=str(root), hint="glass run ENGINE --snapshot DIR, or glass.snapshots.take(DIR)"
        )
    return tuple(listed)


def _listed(path: Path) -> ListedSnapshot:
    try:
        snapshot = Snapshot.open(path)
    except CorruptError as error:
        return ListedSnapshot(path.name, "damaged", num_bytes=_size(path), problem=error.got)
    has = {
        "graph": snapshot.graph_hash is not None,
        "inputs": bool(snapshot.inputs),
        "outputs": snapshot.outputs is not None,
        "redacted": snapshot.redacted,
    }
    origin = snapshot.origin
    return ListedSnapshot(
        path.name,
        snapshot.reason,
        tuple(word for word, there in has.items() if there),
        None if origin is None else str(origin),
        _size(path),
    )


def _size(path: Path) -> int:
    return sum(item.stat().st_size for item in path.iterdir() if item.is_file())
