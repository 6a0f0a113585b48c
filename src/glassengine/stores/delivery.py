"""Delivers files and directories to a store: written on this machine, and uploaded when they are complete."""

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
            objects.remove([found.url for name, found in objects.below(str(there)) if not (local / name).exists()])
    finally:
        shutil.rmtree(root, ignore_errors=True)


def deliver(local: Path, there: Remote, *, overwrite: bool = True, last: str = "") -> None:
    """Upload a file or directory.

    Raises:
        UsageError: As `delivered`.
    """
    urls = {local: str(there)}
    if local.is_dir():
        files = [path for path in sorted(local.rglob("*")) if path.is_file() and not path.is_symlink()]
        urls = {path: str(there / path.relative_to(local).as_posix()) for path in files}
    for url in urls.values() if not overwrite else ():
        if objects.find(url) is not None:
            raise UsageError("the file exists already", got=url, hint="replace it with --overwrite")
    final = local / last
    objects.in_parallel(lambda path: objects.put(path, urls[path]), [path for path in urls if path != final])
    if final in urls:
        objects.put(final, urls[final])
