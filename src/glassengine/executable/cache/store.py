"""The directory of the persistent cache: one directory per compiled graph, which appears whole or not at all.

    <key>/manifest.json   key, name, parts of the key, why it was compiled, checksums of the files; itself checksummed
    <key>/files/          what the compiler keeps of its own, in its own format
    <key>/uses            a byte for every hit; its time of change is that of the last use

What is in `files` becomes code of the process that loads it. So the directory must belong to the user alone, nothing is
taken from it but what the manifest lists, and every file is checked while it is copied out: the compiler never works in
this directory, and what it reads is what was checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from glassengine.errors import CorruptError, UsageError
from glassengine.executable.cache.key import digest
from glassengine.executable.cache.manifest import (
    Manifest,
    manifest_text,
    read_manifest,
)
from glassengine.reading.files import open_regular, shown
from glassengine.writing.files import append, remove_tree
from glassengine.writing.locations import local

_MANIFEST, _FILES, _USES = "manifest.json", "files", "uses"
_CHUNK = 1 << 20
_ABANDONED_S = 3600.0  # age above which what a killed process was writing is removed
_KEY = re.compile(r"[0-9a-f]{40}")
_TRIES = 3  # another process may replace an entry while it is read
_serial = itertools.count()


@dataclass(frozen=True)
class Entry:
    """A stored entry: its manifest, how often it was taken, and when last, in seconds since the epoch."""

    manifest: Manifest
    num_hits: int
    last_used: float


class Store:
    """The entries of one directory.

    Args:
        root: Created with access for its owner only.

    Raises:
        UsageError: Another user owns the directory or can write to it.
        OSError: It can neither be read nor created.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._manifests: dict[str, tuple[int, Manifest]] = {}
        self.check()

    def check(self) -> None:
        """Make sure that the directory is there and can be trusted: it may have changed since it was opened.

        Raises:
            UsageError: Another user owns the directory or can write to it.
            OSError: It can neither be read nor created.
        """
        local(self.root)
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.root.stat()
        problem = None
        if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
            problem = f"user {status.st_uid} owns it"
        elif os.name == "posix" and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            problem = f"mode {stat.S_IMODE(status.st_mode):04o}: others can write to it"
        if problem is not None:
            raise UsageError(
                f"the cache of compiled graphs {self.root} cannot be trusted",
                got=problem,
                expected="a directory of your own, mode 0700: what is in it is run",
                hint="chmod 700, or another directory: GLASS_CACHE_DIR",
            )

    def fetch(self, key: str, target: Path) -> Manifest | None:
        """Copy the files of an entry into the empty directory `target`, checking them; None if there is no entry.

        Raises:
            CorruptError: The entry is damaged.
        """
        damage: CorruptError | None = None
        for _ in range(_TRIES):
            # What is missing belonged to an entry that another process has removed, unless it goes on missing.
            entry, damage = self.root / key, None
            try:
                manifest = read_manifest(entry / _MANIFEST)
            except FileNotFoundError:
                if not entry.is_dir():
                    return None
                damage = CorruptError(f"cache entry {key} has no manifest")
                continue
            if digest(manifest.parts) != key:
                raise CorruptError(f"cache entry {key} is of another key", got=manifest.key)
            try:
                _require_own_directories(entry, manifest)
                for name, (size, checksum) in manifest.files.items():
                    _copy_checked(entry / _FILES / name, target / name, size, checksum)
            except FileNotFoundError as error:
                if (entry / _MANIFEST).exists():
                    damage = CorruptError(f"cache entry {key} lacks a file", got=Path(error.filename).name)
                continue
            with contextlib.suppress(OSError):
                append(entry / _USES, b".")
            return manifest
        if damage is not None:
            raise damage
        return None

    def put(self, manifest: Manifest, source: Path) -> None:
        """Store the files of `source` that the manifest lists; an entry of the same key is replaced.

        Raises:
            OSError: The disk is full, the directory cannot be written; nothing is left behind.
        """
        self._remove_abandoned()
        aside = self._aside()
        try:
            for name in manifest.files:
                target = aside / _FILES / name
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                shutil.copyfile(source / name, target)
            (aside / _MANIFEST).write_text(manifest_text(manifest), encoding="utf-8")
            for _ in range(_TRIES):
                try:
                    aside.rename(self.root / manifest.key)
                    break
                except OSError:
                    if not (self.root / manifest.key).exists():
                        raise
                    self.remove(manifest.key)
        finally:
            remove_tree(aside)

    def remove(self, key: str) -> None:
        """Remove an entry, if it can be; one that another process is reading vanishes for it as a whole."""
        aside = self._aside()
        with contextlib.suppress(OSError):
            (self.root / key).rename(aside)
        remove_tree(aside)

    def damaged(self) -> dict[str, str]:
        """Return key -> what is wrong of entries that cannot be read; they are removed when they are next wanted."""
        found = {}
        for path in sorted(self.root.iterdir()):
            if _KEY.fullmatch(path.name):
                try:
                    self._manifest(path)
                except (OSError, CorruptError) as error:
                    found[path.name] = str(error)
        return found

    def entries(self) -> Iterator[Entry]:
        """Yield every entry whose manifest can be read."""
        for path in sorted(self.root.iterdir()):
            if not _KEY.fullmatch(path.name):
                continue
            try:
                changed, known = self._manifest(path)
            except (OSError, CorruptError):
                continue
            try:
                uses = (path / _USES).stat()
                yield Entry(known, uses.st_size, uses.st_mtime)
            except OSError:
                yield Entry(known, 0, changed * 1e-9)

    def shrink(self, max_bytes: int) -> list[Entry]:
        """Remove the entries that were used least recently until all are within `max_bytes`, and return them."""
        entries = sorted(self.entries(), key=lambda entry: entry.last_used)
        total = sum(entry.manifest.num_bytes for entry in entries)
        removed = []
        for entry in entries:
            if total <= max_bytes:
                break
            self.remove(entry.manifest.key)
            total -= entry.manifest.num_bytes
            removed.append(entry)
        return removed

    def _manifest(self, entry: Path) -> tuple[int, Manifest]:
        """Return when the manifest of an entry changed, in nanoseconds since the epoch, and the manifest."""
        changed = (entry / _MANIFEST).stat().st_mtime_ns
        known = self._manifests.get(entry.name)
        if known is None or known[0] != changed:
            known = self._manifests[entry.name] = (changed, read_manifest(entry / _MANIFEST))
        return known

    def _aside(self) -> Path:
        return self.root / f".{os.getpid()}-{next(_serial)}-{time.time_ns():x}"

    def _remove_abandoned(self) -> None:
        for path in self.root.glob(".*-*-*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    remove_tree(path)


def list_files(directory: Path) -> dict[str, tuple[int, str]]:
    """Return relative path -> (bytes, sha256) of every file under `directory`, without the compiler's locks."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.suffix != ".lock":
            with open_regular(path, inside=path.parent) as file:
                checksum = hashlib.file_digest(file, "sha256").hexdigest()
            found[path.relative_to(directory).as_posix()] = (path.stat().st_size, checksum)
    return found


def _require_own_directories(entry: Path, manifest: Manifest) -> None:
    """Raise CorruptError where a link instead of a directory of an entry."""
    directories = {parent for name in manifest.files for parent in PurePosixPath(_FILES, name).parents}
    for path in directories:
        if (entry / path).is_symlink():
            raise CorruptError(f"cache entry {entry.name} is damaged", got=f"{shown(entry / path)} is a link")


def _copy_checked(source: Path, target: Path, size: int, checksum: str) -> None:
    """Copy a file that must have `size` bytes and the SHA-256 `checksum`.

    Raises:
        CorruptError: It has not.
        FileNotFoundError: There is none.
    """
    found = hashlib.sha256()
    try:
        descriptor = os.open(source, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CorruptError(f"{source.name} in the cache cannot be read", got=str(error)) from error
    with open(descriptor, "rb") as file:  # noqa: PTH123
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            raise CorruptError(f"{source.name} in the cache is damaged", got=f"{status.st_size} bytes, not {size}")
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as copy:
            while chunk := file.read(_CHUNK):
                found.update(chunk)
                copy.write(chunk)
    if found.hexdigest() != checksum:
        raise CorruptError(f"{source.name} in the cache is damaged", got="other bytes than were stored")
