"""Copies of objects on this machine, for what needs files: engines, snapshots, profiles, dumps of other tools.

A copy is never changed: its directory is called after what the store says of every object in it (name, size, version).
It is complete once its note is there, is checked against that, and is held while a process uses it. What was used
longest ago goes when all copies together exceed their bound.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from glassengine import environment
from glassengine.errors import CorruptError, UsageError
from glassengine.stores import objects
from glassengine.stores.objects import Found
from glassengine.stores.places import Remote, place
from glassengine.stores.ranges import in_parallel

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MAX_BYTES = 20 << 30
"""Of all copies together, unless GLASS_STORE_CACHE_BYTES says otherwise."""

MAX_FILES = 20_000
_MAX_DEPTH = 32
_NOTE = "note.json"
_CONTENT = "content"
_PIECE = 8 << 20
_MOST_NOTE_BYTES = 1 << 26
# Not a link, and not a pipe that nobody writes: the room of reading stands above this one, which does the same.
_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_DIRECTORY = _READ | getattr(os, "O_DIRECTORY", 0)

_held: dict[Path, int] = {}
_log = logging.getLogger(__name__)


def here(path: str | Path) -> Path:
    """Return a path of this machine with the content of another: itself, or a copy of what is in a store.

    The copy is that of now. It must not be written to, and stays while this process lives.

    Raises:
        UsageError: Nothing is there, or the store cannot be used, or the copy would exceed its bound.
        CorruptError: A name cannot be that of a file, or an object changes while it is copied.
    """
    there = place(path)
    if not isinstance(there, Remote):
        return there
    found = objects.find(str(there))
    if found is None:
        objects.require(str(there))  # names what is near
        raise AssertionError
    files = dict(_files(there)) if found.is_directory else {there.name: found}
    number = sum(file.size for file in files.values())
    most = environment.store_cache_bytes(MAX_BYTES)
    if number > most:
        hint = "GLASS_STORE_CACHE_BYTES=BYTES, or copy it yourself"
        raise UsageError("too much for the copies of objects", got=f"{there}: {number:,} bytes", hint=hint)
    listing = sorted((name, file.size, file.version) for name, file in files.items())
    digest = hashlib.sha256(json.dumps([str(there), listing]).encode()).hexdigest()[:32]
    root = environment.cache_dirs()["glassengine"] / "objects" / digest
    content: Path = root / _CONTENT / there.name
    base = there if found.is_directory else there.parent
    local = content if found.is_directory else content.parent
    try:
        _hold(root)
        if not _is_whole(root, local, files):
            _make_room(root, number, most)
            _copy(base, files, root, local)
        os.utime(root)
    except OSError as error:
        got = f"{error.filename or root}: {error.strerror or error}"
        raise UsageError("an object cannot be copied to this machine", got=got, hint="GLASS_CACHE_DIR=DIR") from error
    return content


def _files(directory: Remote, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Found]]:
    if depth > _MAX_DEPTH:
        raise CorruptError("objects lie too deep", got=str(directory), expected=f"at most {_MAX_DEPTH} levels")
    count = 0
    for item in objects.listed(str(directory)):
        if item.is_directory:
            inner: Iterator[tuple[str, Found]] = _files(directory / item.name, f"{prefix}{item.name}/", depth + 1)
        else:
            inner = iter([(prefix + item.name, item)])
        for found in inner:
            count += 1
            if count > MAX_FILES:
                raise CorruptError("too many objects to copy", got=str(directory), expected=f"at most {MAX_FILES:,}")
            yield found


def _hold(root: Path) -> None:
    """Make the directory of a copy, and keep others from removing it while this process lives."""
    while True:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if root in _held or fcntl is None:
            return
        lock = os.open(root, _DIRECTORY)
        with contextlib.suppress(OSError):  # some network file systems have none
            fcntl.flock(lock, fcntl.LOCK_SH)
        if root.exists() and os.stat(root).st_ino == os.fstat(lock).st_ino:  # noqa: PTH116 (beside fstat)
            _held[root] = lock
            return
        os.close(lock)


def _is_whole(root: Path, local: Path, files: dict[str, Found]) -> bool:
    """Return whether a copy has these files, complete and as it was made."""
    try:
        with _opened(root / _NOTE) as file:
            note = msgspec.json.decode(file.read(_MOST_NOTE_BYTES), type=dict[str, tuple[int, int]])
        if note.keys() != files.keys():
            return False
        there = root.resolve()
        for name, (size, checksum) in note.items():
            path = local / name
            is_ours = path.resolve() == there / path.relative_to(root)  # no part of the way is a link
            if not is_ours or path.stat().st_size != size or _checksum(path) != checksum:
                _log.warning("a copy of an object has changed, and is made again: %s", path)
                return False
    except (OSError, ValueError, RecursionError):
        return False
    return True


def _opened(path: Path) -> BinaryIO:
    """Open a plain file of a copy.

    Raises:
        OSError: It is something else, or cannot be read.
    """
    descriptor = os.open(path, _READ | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return os.fdopen(descriptor, "rb")


def _copy(base: Remote, files: dict[str, Found], root: Path, local: Path) -> None:
    (root / _NOTE).unlink(missing_ok=True)
    # Another process may be at the same; each makes its own, and the first one stays.
    aside = root / f"aside-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(root / _CONTENT, ignore_errors=True)
    target = aside / local.relative_to(root / _CONTENT)
    try:
        target.mkdir(parents=True)
        for name in files:
            try:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
            except FileExistsError as error:
                raise CorruptError("an object is a directory as well", got=str(base / name)) from error

        def fetch(name: str) -> tuple[str, tuple[int, int]]:
            path, url = target / name, str(base / name)
            if path.is_dir():
                raise CorruptError("an object is a directory as well", got=url)
            objects.fetch(url, path)
            size = path.stat().st_size
            difference = files[name].difference(objects.find(url))
            if difference is not None or size != files[name].size:
                got = f"{url}: {difference or f'{size:,} bytes came'}"
                raise CorruptError("an object changed while it was copied", got=got, hint="try again")
            return name, (size, _checksum(path))

        note = dict(in_parallel().map(fetch, files))
        with contextlib.suppress(OSError):
            aside.rename(root / _CONTENT)
        (root / f"{_NOTE}.new").write_text(json.dumps(note), encoding="utf-8")
        (root / f"{_NOTE}.new").replace(root / _NOTE)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _checksum(path: Path) -> int:
    found = 0
    with _opened(path) as file:
        while piece := file.read(_PIECE):
            found = zlib.crc32(piece, found)
    return found


def _make_room(root: Path, number: int, most: int) -> None:
    """Remove copies that no process holds, those used longest ago first, until another one has room."""
    copies = []
    for other in root.parent.iterdir():
        if other != root:
            with contextlib.suppress(OSError):
                sizes = [file.lstat().st_size for file in other.rglob("*") if file.is_file()]
                copies.append((other.stat().st_mtime, sum(sizes), other))
    total = number + sum(size for _, size, _ in copies)
    for _, size, other in sorted(copies):
        if total <= most:
            return
        if _removed(other):
            total -= size
    if total > most:
        _log.warning("copies of objects take %s bytes, more than %s: others are in use", f"{total:,}", f"{most:,}")


def _removed(copy: Path) -> bool:
    try:
        lock = os.open(copy, _DIRECTORY)
    except OSError:
        return False
    try:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(copy)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
