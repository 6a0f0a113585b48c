"""Keeps copies of objects on this machine, for what needs files: engines, snapshots, profiles, dumps of other tools.

A copy is never changed: its directory is called after what the store says of every object in it (name, size, version).
It is checked against the note in it, and is held while a process uses it. What was used longest ago goes when all
copies together exceed their bound.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import shutil
import zlib
from pathlib import Path, PurePosixPath

import msgspec

from glassengine import environment
from glassengine.environment import open_flag
from glassengine.errors import CorruptError, GlassError, UsageError
from glassengine.reading.files import open_regular, read_bytes
from glassengine.stores import objects
from glassengine.stores.objects import ObjectFacts
from glassengine.stores.places import RemotePath, place

with contextlib.suppress(ImportError):  # Windows has none
    import fcntl

MAX_BYTES = 20 << 30
"""Of all copies together, unless GLASS_STORE_CACHE_BYTES says otherwise."""

MAX_FILES = 20_000
_COPY, _NOTE, _CONTENT = "copy", "note.json", "content"
_PIECE = 8 << 20
_MOST_NOTE_BYTES = 1 << 26
_DIRECTORY = os.O_RDONLY | open_flag("O_CLOEXEC") | open_flag("O_NOFOLLOW") | open_flag("O_DIRECTORY")

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
    if not isinstance(there, RemotePath):
        return there
    found = objects.require(str(there), directory=True)
    files = {there.name: found}
    if found.is_directory:
        inside = itertools.islice(objects.below(found.url), MAX_FILES + 1)
        files = {f"{there.name}/{name}": one for name, one in inside}
    if len(files) > MAX_FILES:
        raise CorruptError("too many objects to copy", got=str(there), expected=f"at most {MAX_FILES:,}")
    for name in files:
        if any(str(parent) in files for parent in PurePosixPath(name).parents):
            raise CorruptError("an object is a directory as well", got=files[name].url)
    number, most = sum(file.size for file in files.values()), environment.store_cache_bytes(MAX_BYTES)
    if number > most:
        hint = "GLASS_STORE_CACHE_BYTES=BYTES, or copy it yourself"
        raise UsageError("too much for the copies of objects", got=f"{there}: {number:,} bytes", hint=hint)
    listing = sorted((file.url, file.size, file.version) for file in files.values())
    digest = hashlib.sha256(json.dumps([str(there), listing]).encode()).hexdigest()[:32]
    root = environment.cache_dirs()["glassengine"] / "objects" / digest
    try:
        _hold(root)
        if not _is_whole(root / _COPY, files):
            _make_room(root, number, most)
            _copy(files, root)
        os.utime(root)
    except OSError as error:
        got = f"{error.filename or root}: {error.strerror or error}"
        raise UsageError("an object cannot be copied to this machine", got=got, hint="GLASS_CACHE_DIR=DIR") from error
    content: Path = root / _COPY / _CONTENT / there.name
    return content


def _hold(root: Path) -> None:
    """Make the directory of a copy, and keep others from removing it while this process lives."""
    while root not in _held:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(root, _DIRECTORY)
        with contextlib.suppress(OSError):  # some network file systems have none
            fcntl.flock(lock, fcntl.LOCK_SH)
        if root.exists() and root.stat().st_ino == os.fstat(lock).st_ino:
            _held[root] = lock
        else:
            os.close(lock)


def _is_whole(copy: Path, files: dict[str, ObjectFacts]) -> bool:
    """Return whether a copy has these files, complete and as it was made; no part of the way to them is a link."""
    try:
        data = read_bytes(copy / _NOTE, most=_MOST_NOTE_BYTES, inside=copy.parent)
        note = msgspec.json.decode(data, type=dict[str, tuple[int, int]])
        if note.keys() != files.keys():
            return False
        for name, known in note.items():
            if _measured(copy / _CONTENT / name, copy.parent) != known:
                _log.warning("a copy of an object has changed, and is made again: %s", copy / _CONTENT / name)
                return False
    except (GlassError, OSError, ValueError, RecursionError):
        return False
    return True


def _measured(path: Path, root: Path) -> tuple[int, int]:
    """Return the size of a plain file of a copy, and its CRC-32."""
    size = checksum = 0
    with open_regular(path, inside=root) as file:
        while piece := file.read(_PIECE):
            size, checksum = size + len(piece), zlib.crc32(piece, checksum)
    return size, checksum


def _copy(files: dict[str, ObjectFacts], root: Path) -> None:
    # Another process may be at the same; each makes its own, and the first one stays.
    aside = root / f"aside-{os.getpid()}"
    for old in (aside, root / _COPY):
        shutil.rmtree(old, ignore_errors=True)

    def fetch(name: str) -> tuple[int, int]:
        path, found = aside / _CONTENT / name, files[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        objects.fetch(found.url, path)
        measured = _measured(path, root)
        difference = found.change()
        if difference is not None or measured[0] != found.size:
            got = f"{found.url}: {difference or f'{measured[0]:,} bytes came'}"
            raise CorruptError("an object changed while it was copied", got=got, hint="try again")
        return measured

    try:
        aside.mkdir()
        note = dict(zip(files, objects.in_parallel(fetch, list(files)), strict=True))
        (aside / _NOTE).write_text(json.dumps(note), encoding="utf-8")
        with contextlib.suppress(OSError):
            aside.rename(root / _COPY)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _make_room(root: Path, number: int, most: int) -> None:
    """Remove copies that no process holds, those used longest ago first, until another one has room."""
    copies = []
    for other in root.parent.iterdir():
        with contextlib.suppress(OSError):
            size = sum(file.lstat().st_size for file in other.rglob("*") if file.is_file())
            copies.append((other.stat().st_mtime, size, other))
    total = number + sum(size for _, size, other in copies if other != root)
    for _, size, other in sorted(copies):
        if total > most and other != root and _removed(other):
            total -= size
    if total > most:
        _log.warning("copies of objects take %s bytes, more than %s: others are in use", f"{total:,}", f"{most:,}")


def _removed(copy: Path) -> bool:
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        lock = os.open(copy, _DIRECTORY)
        stack.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(copy)
        return True
    return False
