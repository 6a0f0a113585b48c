"""The files of an engine: listed, hashed, and found as they were."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable
from pathlib import Path

from glassengine.engine.store.manifest import FILE, REBUILD, FileEntry, Manifest
from glassengine.errors import CorruptError
from glassengine.reading.files import open_regular

HASHED_AT_LOAD_BYTES = 16 << 20
"""Files up to this size are hashed at every load, larger ones only when asked to verify."""


def list_files(directory: Path) -> tuple[FileEntry, ...]:
    """Return every file below `directory` except the manifest, with size and hash, sorted by path."""
    found = []
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != FILE:
            relative = path.relative_to(directory).as_posix()
            found.append(FileEntry(relative, path.stat().st_size, hash_file(path)))
    return tuple(found)


def check_files(manifest: Manifest, directory: Path, *, verify: bool, always: Iterable[str] = ()) -> None:
    """Refuse an engine whose files are missing or changed.

    Args:
        manifest: Its manifest.
        directory: Where it is.
        verify: Hash files of every size, not only small ones.
        always: Path prefixes of files that are hashed at any size.

    Raises:
        CorruptError: Names the file and what is wrong with it.
    """
    for entry in manifest.files:
        problem = None
        try:
            with open_regular(directory / entry.path, inside=directory) as file:
                size = os.fstat(file.fileno()).st_size
                if size != entry.size:
                    problem = f"{size:,} bytes instead of {entry.size:,}"
                elif verify or size <= HASHED_AT_LOAD_BYTES or entry.path.startswith(tuple(always)):
                    problem = None if _hash(file) == entry.sha256 else "another checksum"
        except CorruptError as error:
            is_missing = not os.path.lexists(directory / entry.path.replace("\0", ""))
            problem = "it is missing" if is_missing else error.what
        except OSError as error:
            problem = str(error.strerror)
        if problem:
            raise CorruptError(
                f"the engine {manifest.name!r} is damaged",
                got=f"{entry.path}: {problem}",
                hint=REBUILD,
            )


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, read in pieces."""
    with open_regular(path, inside=path.parent) as file:
        return _hash(file)


def _hash(file: io.BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()
