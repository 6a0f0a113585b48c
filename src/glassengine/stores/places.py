"""Paths of files here and of objects in a store: `s3://bucket/run` is a path like any other.

A URL that went through `Path` has lost a slash (`s3:/bucket/run`) and is recognized all the same. What goes to a store
is written on this machine, and uploaded when it is complete.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import shutil
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glassengine import environment
from glassengine.errors import UsageError, nearest
from glassengine.stores import objects

# Two letters at least: one is a drive of Windows. A path keeps one of the two slashes.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)
_HERE = ("file", "local")
_MAX_DEPTH = 64


class RemotePath(type(Path())):  # type: ignore[misc]  # the class of this system's paths
    """A path in a store; as text it is its URL, and asks its store what a path asks its disk.

    Everything that needs a descriptor (`os.open`, a mapping) fails: `reading.files` and `stores` read it.
    """

    def __str__(self) -> str:
        return _URL.sub(lambda found: f"{found[1].lower()}://{found[2]}", super().__str__(), count=1)

    def __fspath__(self) -> str:
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemotePath, (str(self),)

    def exists(self, **_: Any) -> bool:
        """Return whether there is an object, or one below it."""
        return objects.find(str(self)) is not None

    def is_file(self, **_: Any) -> bool:
        """Return whether there is an object."""
        return (found := objects.find(str(self))) is not None and not found.is_directory

    def is_dir(self, **_: Any) -> bool:
        """Return whether there are objects below it."""
        return (found := objects.find(str(self))) is not None and found.is_directory

    def is_symlink(self) -> bool:
        """Return False: a store has none."""
        return False

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield what is directly below it, by name."""
        yield from (self / item.name for item in objects.listed(str(self)))

    def glob(self, pattern: str, **_: Any) -> Iterator[RemotePath]:
        """Yield what is there for a relative pattern without `**`, by name."""
        first, _slash, rest = str(pattern).partition("/")
        if "*" not in first:
            found = iter([self / first])
        else:
            found = (item for item in self.iterdir() if fnmatch.fnmatchcase(item.name, first))
        for item in found:
            if rest:
                yield from item.glob(rest)
            elif "*" in first or item.exists():
                yield item

    def absolute(self, **_: Any) -> RemotePath:
        """Return itself."""
        return self

    resolve = absolute

    def is_absolute(self) -> bool:
        """Return True: it depends on no working directory."""
        return True


def place(path: str | Path) -> Path:
    """Return a path of this machine, or a `RemotePath`.

    A directory that is called like a URL is `./s3:/...`, as a string.

    Raises:
        UsageError: It is the address of something that is neither, as `https://host/x`, or leads out of its bucket.
    """
    if isinstance(path, RemotePath):
        return path
    found = _URL.fullmatch(str(path))
    if found is None:
        return Path(path)
    scheme, rest = found[1].lower(), found[2]
    if scheme in _HERE:
        return Path("/" + urllib.parse.unquote(rest).lstrip("/"))
    known = (*objects.EXTRAS, *_HERE)
    if scheme not in objects.EXTRAS:
        raise UsageError(
            "not a path, and not in a store that can be used",
            got=f"{scheme}://{rest}",
            expected=[f"{name}://" for name in [*nearest(scheme, known), *known][: len(known)]],
            hint="copy or mount it; a directory that is called so is ./" + f"{scheme}:/{rest}",
        )
    parts = rest.split("/")
    if "::" in rest or ".." in parts or "\0" in rest or len(parts) > _MAX_DEPTH or not parts[0]:
        raise UsageError("not a place in a store", got=f"{scheme}://{rest}", expected=f"{scheme}://BUCKET/PATH")
    return RemotePath(f"{scheme}://{rest}".rstrip("/"))


def remote(path: str | Path) -> RemotePath | None:
    """Return the place in a store that a path names, or None for any other path."""
    if isinstance(path, RemotePath):
        return path
    found = _URL.fullmatch(str(path))
    is_ours = found is not None and found[1].lower() in objects.EXTRAS
    return place(path) if is_ours else None  # type: ignore[return-value]


def size_of(path: Path) -> int:
    """Return the bytes of a file or an object."""
    return objects.require(str(path)).size if isinstance(path, RemotePath) else path.stat().st_size


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
    if not isinstance(there, RemotePath):
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


def deliver(local: Path, there: RemotePath, *, overwrite: bool = True, last: str = "") -> None:
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
