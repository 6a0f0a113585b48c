"""Files and directories that go to a store: written on this machine, and uploaded when they are complete."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from glassengine import environment
from glassengine.errors import UsageError
from glassengine.stores import objects
from glassengine.stores.places import Remote, place
from glassengine.stores.ranges import in_parallel


@contextlib.contextmanager
def delivered(target: str | Path, *, overwrite: bool = True, last: str = "", replace: bool = False) -> Iterator[Path]:
    """Yield where to write a file or directory; where it goes to a store, it is uploaded when the block ends well.

    Args:
        target: A path of this machine, which is yielded, or a URL.
        overwrite: Replace objects that are there; otherwise one of the same name is an error, and nothing is uploaded.
        last: Name of the file that is uploaded last: what says that the others are there.
        replace: Remove what else is there.

    Raises:
        UsageError: The store cannot be used, or has one of the objects.
    """
    there = place(target)
    if not isinstance(there, Remote):
        yield there
        return
    objects.find(str(there))  # before any work is done
    root = environment.spool_dir() / f"out-{os.getpid()}-{time.monotonic_ns()}"
    root.mkdir(mode=0o700, parents=True)
    local = root / there.name
    try:
        yield local
        if replace:
            objects.remove([str(there / last)])
        deliver(local, there, overwrite=overwrite, last=last)
        if replace:
            objects.remove([str(path) for path in below(there) if not (local / path.relative_to(there)).exists()])
    finally:
        shutil.rmtree(root, ignore_errors=True)


def deliver(local: Path, there: Remote, *, overwrite: bool = True, last: str = "") -> None:
    """Upload a file or directory.

    Raises:
        UsageError: As `delivered`.
    """
    if local.is_dir():
        files = [path for path in sorted(local.rglob("*")) if path.is_file() and not path.is_symlink()]
        pairs = [(path, str(there / path.relative_to(local).as_posix())) for path in files]
    else:
        pairs = [(local, str(there))]
    if not overwrite:
        for _, url in pairs:
            if objects.find(url) is not None:
                raise UsageError("the file exists already", got=url, hint="replace it with --overwrite")
    first = [pair for pair in pairs if pair[0] != local / last]
    for _ in in_parallel().map(lambda pair: objects.put(*pair), first):
        pass
    for pair in pairs:
        if pair not in first:
            objects.put(*pair)


def below(directory: Remote) -> Iterator[Remote]:
    """Yield the objects below a place, at any depth."""
    for item in objects.listed(str(directory)):
        if item.is_directory:
            yield from below(directory / item.name)
        else:
            yield directory / item.name
