"""The place that a recording is written to: its directory and manifest, and the store that it is brought to meanwhile.

A store gets sealed shards first, then the index, `recording.json` last, from a thread beside the run. What waits to be
uploaded is bounded: who writes waits for room. An uploaded shard leaves a hollow file of its size behind, so that the
index still fits and the disk is free. A recording whose process was killed leaves what was not uploaded in its
directory; `recording.export.upload` brings it to the store.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from glassengine import environment
from glassengine.errors import CorruptError, GlassError, UsageError
from glassengine.reading.files import open_regular, read_text
from glassengine.recording.layout import layout, noise_floor
from glassengine.stores import objects
from glassengine.stores.places import RemotePath
from glassengine.writing import held, hold, local, private_directory, remove_tree, write_all

SHARD_BYTES = 64 << 20
# While nothing waits to be uploaded, smaller ones are sealed, so that little is left at the end; the more there are,
# the larger they get, for their numbers end.
_LEAST_SHARD_BYTES, _MORE_BYTES = 8 << 20, 1 << 16
SPOOL_BYTES = 4 << 30

DONE = "uploaded.log"
"""Names of the shards that are in the store, a line each."""
_MOST_DONE_BYTES = 1 << 26

# Of a store that does not answer: a recording waits so long for one success, and then stops; the model goes on.
PATIENCE_S = 600.0
_FIRST_DELAY_S, _MOST_DELAY_S = 0.5, 30.0
# Beside its patience, for one request that is under way.
_LAST_S = 5.0
# The index is brought to the store when nothing else is to be done, this often.
_IDLE_S = 5.0
_LAST = (layout.INDEX, layout.MANIFEST)

_log = logging.getLogger(__name__)


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


def is_ours(name: str) -> bool:
    """Return whether a recording has files of this name."""
    own = {layout.MANIFEST, f"{layout.MANIFEST}.tmp", layout.INDEX, layout.STATISTICS, noise_floor.FILE}
    own |= {layout.SERIES, layout.RING, layout.MOVED, layout.RECOVERED, f"{layout.RECOVERED}.part"}
    return name in own or re.fullmatch(r"shard-\d{5}\.(part|safetensors)", name) is not None


def _is_being_written(path: Path) -> bool:
    try:
        with open_regular(path / layout.INDEX, inside=path) as index:
            hold(index.fileno())
    except BlockingIOError:
        return True
    except (OSError, CorruptError):
        return False
    return False


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


class Uploads:
    """Uploads one recording, shard by shard, from a thread of its own.

    Attributes:
        shard_bytes: After how many bytes a shard is sealed at the latest.
        failure: Why nothing more is uploaded, if nothing is.
    """

    def __init__(self, directory: Path, target: RemotePath, spool_bytes: int) -> None:
        self.shard_bytes = max(min(SHARD_BYTES, spool_bytes // 4), 1)
        self.failure: GlassError | None = None
        self._directory = directory
        self._target = target
        self._most = spool_bytes
        self._patience_s = PATIENCE_S
        self._changed = threading.Condition()
        self._waiting: deque[Path] = deque()
        self._waiting_bytes = 0
        self._ends = self._hurries = False
        self._since_index = 0
        self._index_bytes = -1
        self._checkpoint()
        # As it is now: once the recording is closed, it says that everything is there.
        objects.put(directory / layout.MANIFEST, str(target / layout.MANIFEST))
        self._thread = threading.Thread(target=self._work, name="glassengine-upload", daemon=True)
        self._thread.start()

    def sealed(self, path: Path) -> None:
        """Take a shard that is complete."""
        with self._changed:
            self._waiting.append(path)
            self._waiting_bytes += path.stat().st_size
            self._changed.notify_all()

    def is_enough(self, num_bytes: int, number: int) -> bool:
        """Return whether a shard with so many bytes and this number is to be sealed."""
        least = min(_LEAST_SHARD_BYTES + number * _MORE_BYTES, self.shard_bytes)
        return num_bytes >= (self.shard_bytes if self._waiting else least)

    @property
    def is_behind(self) -> bool:
        """Whether more than half of what may wait does."""
        return self._waiting_bytes > self._most // 2

    def wait_for_room(self) -> None:
        """Wait until another shard may be written."""
        with self._changed:
            while not self._hurries:
                if self.failure is not None:
                    raise self.failure
                if not self._waiting or self._waiting_bytes + self.shard_bytes <= self._most:
                    return
                self._changed.wait(1.0)

    def hurry(self, patience_s: float) -> None:
        """Let what is left be written without waiting for room: the process ends."""
        with self._changed:
            self._hurries = True
            self._patience_s = patience_s
            self._changed.notify_all()

    def finish(self, patience_s: float | None = None) -> UsageError | None:
        """Upload what is left once the recording is closed, and end; return why it is not all there, and where it is.

        Args:
            patience_s: How long the store may not answer from now on; as before where None.
        """
        with self._changed:
            self._ends = True
            if patience_s is not None:
                self._patience_s = patience_s
            self._changed.notify_all()
            if self._waiting:
                _log.info("%s: %s bytes are still to be uploaded", self._target, f"{self._waiting_bytes:,}")
        self._thread.join(None if patience_s is None else patience_s + _LAST_S)
        failure = self.failure
        if self._thread.is_alive():
            failure = UsageError("the store does not answer", got=f"it does not answer for {patience_s} s")
        if failure is None:
            return None
        hint = f"the rest is in {self._directory}: glass upload {self._target}"
        return UsageError(
            "not everything was uploaded", got=f"{self._target}: {failure.got or failure.what}", hint=hint
        )

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    if not self._waiting and not self._ends:
                        self._changed.wait(_IDLE_S)
                    path = self._waiting[0] if self._waiting else None
                if path is not None:
                    self._upload(path)
                elif self._ends:
                    upload_rest(self._directory, self._target, self._patiently)
                    return
                else:
                    self._patiently(self._checkpoint)
        except Exception as error:
            with self._changed:
                self.failure = error if isinstance(error, GlassError) else UsageError(str(error))
                self._waiting.clear()
                self._changed.notify_all()
            _log.warning("uploading %s has stopped: %s", self._target, error)

    def _upload(self, path: Path) -> None:
        size = path.stat().st_size
        self._patiently(lambda: objects.put(path, str(self._target / path.name)))
        self._since_index += size
        # An index that is larger than the shards would be most of what is uploaded.
        if self._since_index >= (self._directory / layout.INDEX).stat().st_size:
            self._patiently(self._checkpoint)
        with (self._directory / DONE).open("a", encoding="ascii") as done:
            done.write(f"{path.name}\n")
        truncate_uploaded(path)
        with self._changed:
            self._waiting.popleft()
            self._waiting_bytes -= size
            self._changed.notify_all()

    def _checkpoint(self) -> None:
        """Bring the index to the store, as it is now: what it says of shards that are not there is not read."""
        index = self._directory / layout.INDEX
        size, copy = index.stat().st_size, index.with_name(f"{index.name}.copy")
        if size == self._index_bytes:
            return
        try:
            shutil.copyfile(index, copy)  # which does not grow
            objects.put(copy, str(self._target / index.name))
        finally:
            copy.unlink(missing_ok=True)
        self._index_bytes, self._since_index = size, 0

    def _patiently(self, function: Callable[[], None]) -> None:
        """Call a function again, after a while that grows, until it succeeds or patience ends."""
        delay, begun = _FIRST_DELAY_S, time.monotonic()
        while True:
            try:
                return function()
            except GlassError as error:
                if time.monotonic() + delay - begun > self._patience_s:
                    raise
                _log.info("uploading is tried again in %.1f s: %s", delay, error)
            with self._changed:
                self._changed.wait(delay)  # the end of the recording shortens it
            delay = min(2 * delay, _MOST_DELAY_S)


def upload_rest(directory: Path, target: RemotePath, call: Callable[[Callable[[], None]], None]) -> int:
    """Upload the files of a recording that are not in the store, index and manifest last; return how many."""
    done = uploaded(directory)
    files = [path for path in sorted(directory.rglob("*")) if path.is_file() and not path.is_symlink()]
    names = [path.relative_to(directory).as_posix() for path in files]
    # Nothing that was being made when a process was killed.
    others = (layout.RING, layout.MOVED, f"{layout.MANIFEST}.tmp")
    names = [name for name in names if name not in done and name not in others and is_ours(name.partition("/")[0])]
    ordered = [name for name in names if name not in _LAST] + [name for name in _LAST if name in names]
    for name in ordered:
        path, url = directory / name, str(target / name)
        call(lambda path=path, url=url: objects.put(path, url))  # type: ignore[misc]
    return len(ordered)


def uploaded(directory: Path) -> set[str]:
    """Return the names of the shards of a recording that are in the store, of which hollow files are left."""
    path = directory / DONE
    if not os.path.lexists(path):
        return set()
    return set(read_text(path, most=_MOST_DONE_BYTES, inside=directory, encoding="ascii").splitlines())


def truncate_uploaded(path: Path) -> None:
    """Replace a shard by a file of its size that has the length of its header and takes no room."""
    aside = path.with_name(f"{path.name}.hollow")
    try:
        size = path.stat().st_size
        with open_regular(path, inside=path.parent) as file, aside.open("wb") as empty:
            empty.write(file.read(8))
            os.truncate(empty.fileno(), size)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


class Spool:
    """The directory for one place in a store, locked by this process until it ends or this is `closed`."""

    def __init__(self, target: RemotePath) -> None:
        self.target = target
        self.directory = directory_of(target)
        self._lock = contextlib.ExitStack()
        try:
            self._lock.enter_context(held(self.directory.parent))
        except BlockingIOError as error:
            hint = "name another place, or wait for the end of that recording"
            raise UsageError("a recording that is being written is not replaced", got=str(target), hint=hint) from error

    @classmethod
    def begun(cls, target: RemotePath, *, overwrite: bool) -> Spool:
        """Make room for a new recording, here and in the store."""
        root = directory_of(target).parent
        try:
            private_directory(root)
        except OSError as error:
            what = "the directory for what waits to be uploaded cannot be made"
            got = f"{root}: {error.strerror or error}"
            raise UsageError(what, got=got, hint="GLASS_SPOOL_DIR names another") from error
        spool = cls(target)
        try:
            _make_room(target, overwrite=overwrite)
            if not overwrite and (spool.directory / layout.MANIFEST).exists():
                raise UsageError(
                    "a recording of this place was not uploaded whole",
                    got=f"{target}: the rest is in {root}",
                    hint=f"glass upload {target} brings it there, --overwrite forgets it",
                )
            remove_tree(spool.directory)
        except BaseException:
            spool.close(remove=not spool.directory.exists())
            raise
        return spool

    def close(self, *, remove: bool) -> None:
        """Let go of the directory, and remove it where all that was in it is in the store."""
        if remove:
            remove_tree(self.directory.parent)
        self._lock.close()


def directory_of(target: RemotePath) -> Path:
    """Return where on this machine a recording for a place is written; it need not exist."""
    digest = hashlib.sha256(str(target).encode()).hexdigest()[:16]
    name = "".join(sign if sign.isalnum() else "_" for sign in target.name)[:40]
    return environment.spool_dir() / f"{name}-{digest}" / "recording"


def is_left(target: RemotePath) -> bool:
    """Return whether a part of a recording for a place waits here, and is not being written."""
    if not directory_of(target).exists():
        return False
    try:
        Spool(target).close(remove=False)
    except (UsageError, OSError):
        return False
    return True


def _make_room(target: RemotePath, *, overwrite: bool) -> None:
    """Remove a recording that is in the store, or refuse it; the rules are those of a directory."""
    there = {item.name: item for item in objects.listed(str(target))}
    for name in replaceable(target, list(there), overwrite=overwrite):
        item = there[name]
        objects.remove([one.url for one in (objects.listed(item.url) if item.is_directory else [item])])
