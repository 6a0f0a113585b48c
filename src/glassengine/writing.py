"""Files that appear whole or not at all, and those of an earlier run put away before new ones are written."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

ASIDE = re.compile(r"\.\d+\.partial")
"""Names that `aside` gives; a process that is killed leaves one behind."""


@contextlib.contextmanager
def aside(target: Path) -> Iterator[Path]:
    """Yield a path beside `target` that takes its place when the block ends well, and vanishes otherwise."""
    path = target.parent / f".{os.getpid()}{threading.get_ident()}.partial"
    try:
        yield path
        path.replace(target)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def hold(file: int) -> None:
    """Lock an open file or directory until it is closed or the process ends; nothing where there are no locks.

    Args:
        file: Its descriptor.

    Raises:
        BlockingIOError: Someone else holds it.
    """
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # some network file systems have none
        return


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Lock a directory while the block runs; nothing where directories cannot be locked. No file is left in it.

    Raises:
        BlockingIOError: Someone else holds it.
    """
    try:
        lock = os.open(directory, os.O_RDONLY)
    except OSError:  # Windows opens no directories
        yield
        return
    try:
        hold(lock)
        yield
    finally:
        os.close(lock)


def next_directory(parent: Path, prefix: str, *, digits: int, first: int = 1) -> Path:
    """Make the directory `<prefix>-<number>` in `parent` that follows those there; every caller gets its own.

    Args:
        parent: A directory.
        prefix: Of the name.
        digits: Of the number, at least.
        first: The number where there is none yet; else it is one more than the last.

    Raises:
        OSError: It cannot be made.
    """
    name = re.compile(rf"{re.escape(prefix)}-(\d+)")
    number = max(
        (int(found[1]) for path in parent.iterdir() if (found := name.fullmatch(path.name))), default=first - 1
    )
    while True:
        number += 1
        target = parent / f"{prefix}-{number:0{digits}d}"
        # Another process may have made it since.
        with contextlib.suppress(FileExistsError):
            target.mkdir()
            return target


def put_away(directory: Path, items: Iterable[Path], *, first: int = 1) -> Path:
    """Move `items` of `directory`, in their order, into a new directory `earlier-NNN` in it, and return that.

    Args:
        directory: What they are in.
        items: Files and directories; a move that is interrupted leaves the rest where they are.
        first: As in `next_directory`.

    Raises:
        OSError: Something cannot be moved.
    """
    target = next_directory(directory, "earlier", digits=3, first=first)
    for path in items:
        path.rename(target / path.name)
    return target
