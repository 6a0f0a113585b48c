"""Where results are written that need a directory of this machine while they are: locks, links, many small changes."""

from __future__ import annotations

from pathlib import Path

from glassengine.errors import UsageError
from glassengine.stores.places import Remote, place


def local(path: str | Path) -> Path:
    """Return the path of what is to be written here.

    Raises:
        UsageError: It is in a store, as `s3://bucket/run`, or nowhere. A directory that is called so is `./s3:/...`,
            as a string.
    """
    found = place(path)
    if not isinstance(found, Remote):
        return found
    raise UsageError(
        "only files of this machine are written",
        got=str(found),
        expected="a path",
        hint="write to a directory here, and copy or mount it",
    )
