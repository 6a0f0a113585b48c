"""The directory of a recording: made, emptied, and its manifest replaced."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glassengine.errors import CorruptError, UsageError
from glassengine.reading.files import open_regular
from glassengine.recording.layout import layout, noise_floor
from glassengine.writing import hold, local, write_all


def make_directory(path: Path, overwrite: bool) -> None:
    """Make an empty directory for a recording."""
    local(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        names = replaceable(path, [item.name for item in path.iterdir()], overwrite=overwrite)
        if names and _is_being_written(path):
            hint = "name another directory, or wait for the end of that recording"
            raise UsageError("a recording that is being written is not replaced", got=str(path), hint=hint)
        for name in names:
            item = path / name
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item)
            else:
                item.unlink()
    except OSError as error:
        raise UsageError("cannot write the recording", got=reason_of(error, path)) from error


def replaceable(path: Path, names: Sequence[str], *, overwrite: bool) -> list[str]:
    """Return which names in a directory a new recording replaces, in the order in which they are removed."""
    if names and layout.MANIFEST not in names and not all(map(is_ours, names)):
        raise UsageError("the output directory holds other files", got=str(path), hint="name a new or empty one")
    if names and not overwrite:
        raise UsageError("the recording exists already", got=str(path), hint="replace it with --overwrite")
    # The manifest goes last, so that a half-removed recording can still be overwritten.
    return sorted(filter(is_ours, names), key=lambda name: name == layout.MANIFEST)


class Index:
    """The index of the recording at `directory`, made; while it is open the recording is not replaced."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / layout.INDEX
        self._num_bytes = 0
        self._file = self._path.open("xb", buffering=0)
        with contextlib.suppress(BlockingIOError):  # another process checks whether it is held
            hold(self._file.fileno())

    def append(self, frames: Sequence[bytes]) -> None:
        """Write frames."""
        require_open(self._file.fileno(), self._num_bytes, self._path)
        try:
            write_all(self._file, frames)
        except OSError:
            # What comes behind half a record is not read.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), self._num_bytes)
                self._file.seek(self._num_bytes)
            raise
        self._num_bytes += sum(map(len, frames))

    def require(self) -> None:
        """Raise unless the file is there with all that was written."""
        os.close(os.dup(self._file.fileno()))
        require_there(self._path, self._num_bytes)

    @property
    def has_name(self) -> bool:
        """Whether the file is in some directory."""
        return os.fstat(self._file.fileno()).st_nlink > 0

    def close(self) -> None:
        """Close the file; what goes wrong then comes after all that was `required`."""
        with contextlib.suppress(OSError):
            self._file.close()


def begun(directory: Path, manifest: bytes) -> Index:
    """Make the index and the manifest of a recording that begins; neither is there where that fails."""
    index = Index(directory)
    try:
        save_manifest(directory, manifest)
    except BaseException:
        with contextlib.suppress(OSError):
            index.close()
            (directory / layout.INDEX).unlink()
        raise
    return index


def _is_being_written(path: Path) -> bool:
    try:
        with open_regular(path / layout.INDEX, inside=path) as index:
            hold(index.fileno())
    except BlockingIOError:
        return True
    except (OSError, CorruptError):
        return False
    return False


def manifest_of(
    state: str, reason: str | None, *, num_steps: int, num_tensors: int, metadata: Mapping[str, Any]
) -> bytes:
    """Return the manifest of a recording."""
    for key, value in metadata.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError("recording metadata is not JSON", got=f"{key!r}: {error}") from error
    document = {
        "schema_version": layout.SCHEMA_VERSION,
        "format": "glassengine recording",
        "state": state,
        "reason": reason,
        "num_steps": num_steps,
        "num_tensors": num_tensors,
        "metadata": dict(metadata),
    }
    return json.dumps(document, indent=1).encode()


def save_manifest(path: Path, manifest: bytes) -> None:
    """Replace the manifest of the recording at `path` as a whole."""
    aside = path / f"{layout.MANIFEST}.tmp"
    try:
        aside.write_bytes(manifest)
        aside.replace(path / layout.MANIFEST)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def reason_of(error: OSError, path: Path) -> str:
    """Return why something at `path` could not be written."""
    return f"{error.strerror or error} ({error.filename or path})"


def is_ours(name: str) -> bool:
    """Return whether a recording has files of this name."""
    own = {layout.MANIFEST, f"{layout.MANIFEST}.tmp", layout.INDEX, layout.STATISTICS, noise_floor.FILE}
    own |= {layout.SERIES, layout.RING, layout.MOVED, layout.RECOVERED, f"{layout.RECOVERED}.part"}
    return name in own or re.fullmatch(r"shard-\d{5}\.(part|safetensors)", name) is not None


def require_open(descriptor: int, num_bytes: int, path: Path) -> None:
    """Raise unless an open file has a name, and the bytes that were written to it."""
    found = os.fstat(descriptor)
    if not found.st_nlink:
        raise OSError(errno.ENOENT, "the file was removed while it was written", str(path))
    if found.st_size < num_bytes:
        raise OSError(errno.EIO, "the file was cut while it was written", str(path))


def require_there(path: Path, num_bytes: int) -> None:
    """Raise unless there is a file with the bytes that were written to it."""
    if path.stat().st_size < num_bytes:
        raise OSError(errno.EIO, "the file was cut since it was written", str(path))
