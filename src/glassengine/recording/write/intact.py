"""Whether files that a recording has written still exist: other programs may remove or cut them."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from glassengine.errors import GlassError
from glassengine.reading.files import open_regular
from glassengine.recording.layout import layout
from glassengine.recording.layout.recovery import read_index
from glassengine.recording.layout.shard_files import ShardFiles


def require_open(descriptor: int, num_bytes: int, path: Path) -> None:
    """Raise unless an open file has a name, and the bytes that were written to it.

    Raises:
        OSError: It was removed, or cut.
    """
    found = os.fstat(descriptor)
    if not found.st_nlink:
        raise OSError(errno.ENOENT, "the file was removed while it was written", str(path))
    if found.st_size < num_bytes:
        raise OSError(errno.EIO, "the file was cut while it was written", str(path))


def require_there(path: Path, num_bytes: int) -> None:
    """Raise unless there is a file with the bytes that were written to it.

    Raises:
        OSError: It was removed, or cut.
    """
    if path.stat().st_size < num_bytes:
        raise OSError(errno.EIO, "the file was cut since it was written", str(path))


def safe_steps(directory: Path, moved: int) -> str:
    """Say how many steps of a recording can be read; `moved` where its directory has another name by now."""
    count = 0 if directory.exists() else moved
    with contextlib.suppress(OSError, GlassError, ValueError):
        shards = ShardFiles(directory)
        with open_regular(directory / layout.INDEX, inside=directory) as index:
            count = len(read_index(index, shards.data_bytes).steps)
    return f"{count} completed steps are safe" if count else "no completed step is safe"
