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


def put_away(directory: Path, items: Iterable[Path], *, first: int = 1) -> Path:
    """Move `items` of `directory`, in their order, into a new directory `earlier-NNN` in it, and return that.

    Args:
        directory: What they are in.
        items: Files and directories; a move that is interrupted leaves the rest where they are.
        first: NNN where there is none yet; else it is one more than the last.

    Raises:
        OSError: Something cannot be moved.
    """
    taken = [int(found[1]) for path in directory.iterdir() if (found := re.fullmatch(r"earlier-(\d+)", path.name))]
    target = directory / f"earlier-{max(taken, default=first - 1) + 1:03d}"
    target.mkdir()
    for path in items:
        path.rename(target / path.name)
    return target
