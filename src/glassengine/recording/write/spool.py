"""Where a recording that goes to a store is written first: a directory of this machine, one for each URL."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Annotated

import msgspec

from glassengine import environment
from glassengine.errors import GlassError, UsageError
from glassengine.reading.documents import read_document
from glassengine.reading.files import open_regular
from glassengine.recording.layout import layout
from glassengine.recording.write.directory import is_ours
from glassengine.recording.write.uploads import SPOOL_BYTES, Uploads
from glassengine.stores import objects
from glassengine.stores.places import Remote
from glassengine.writing.files import hold, private_directory, remove_tree

_NOTE = "upload.json"
_MAX_NOTE_BYTES = 1 << 16


class _Note(msgspec.Struct):
    schema_version: Annotated[int, msgspec.Meta(ge=1, le=1)]
    url: str


class Spool:
    """The directory in which a recording for a store is written; held by this process until it ends or is `closed`.

    Attributes:
        directory: Of the recording; not made yet.
        target: Where it goes.
    """

    def __init__(self, target: Remote, root: Path, lock: int) -> None:
        self.target = target
        self.directory = root / "recording"
        self._root = root
        self._lock = lock

    @classmethod
    def begun(cls, target: Remote, *, overwrite: bool) -> Spool:
        """Make the directory for a new recording, and room for it in the store.

        Raises:
            UsageError: There is a recording, here or in the store, and `overwrite` is false; one is being written; or
                other objects are there, or the store cannot be used.
        """
        root = root_of(target)
        _require_free(target, overwrite=overwrite)
        if root.exists() and not (root / _NOTE).exists():
            remove_tree(root)  # of one that was killed before it began
        if root.exists():
            with _opened(target, root) as lock:
                if not overwrite:
                    os.close(lock)
                    raise UsageError(
                        "a recording of this place was not uploaded whole",
                        got=f"{target}: the rest is in {root}",
                        hint=f"glass upload {target} brings it there, --overwrite forgets it",
                    )
                remove_tree(root)
                os.close(lock)
        try:
            private_directory(root)
            note = root / _NOTE
            note.write_bytes(msgspec.json.encode(_Note(1, str(target))))
            lock = _held(note)
        except OSError as error:
            what = "the directory for what waits to be uploaded cannot be made"
            got = f"{root}: {error.strerror or error}"
            raise UsageError(what, got=got, hint="GLASS_SPOOL_DIR names another") from error
        return cls(target, root, lock)

    @classmethod
    def left(cls, target: Remote) -> Spool | None:
        """Return what an earlier recording of this place left here, held by this process; None where nothing is.

        Raises:
            UsageError: It is being written.
            CorruptError: Something else is there.
        """
        root = root_of(target)
        if not root.exists():
            return None
        with _opened(target, root) as lock:
            return cls(target, root, lock)

    def uploads(self, spool_bytes: int | None) -> Uploads:
        """Begin to upload what is written.

        Raises:
            UsageError: The store cannot be written.
        """
        return Uploads(self.directory, self.target, SPOOL_BYTES if spool_bytes is None else spool_bytes)

    def close(self, *, remove: bool) -> None:
        """Let go of it, and remove it where all that was in it is in the store."""
        if remove:
            remove_tree(self._root)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def root_of(target: Remote) -> Path:
    """Return the directory of this machine for what goes to a place; it need not exist."""
    digest = hashlib.sha256(str(target).encode()).hexdigest()[:16]
    name = "".join(sign if sign.isalnum() else "_" for sign in target.name)[:40]
    return environment.spool_dir() / f"{name}-{digest}"


@contextlib.contextmanager
def _opened(target: Remote, root: Path):  # type: ignore[no-untyped-def]
    note = root / _NOTE
    found = read_document(note, _Note, most=_MAX_NOTE_BYTES, inside=root, what="the note of an upload")
    if found.url != str(target):
        raise UsageError("the note of an upload is of another place", got=f"{note}: {found.url}", expected=str(target))
    try:
        lock = _held(note)
    except BlockingIOError as error:
        hint = "name another place, or wait for the end of that recording"
        raise UsageError("a recording that is being written is not replaced", got=str(target), hint=hint) from error
    yield lock


def _held(note: Path) -> int:
    """Return the descriptor of a note that this process holds from now on.

    Raises:
        CorruptError: It is no plain file.
        BlockingIOError: Another process holds it.
    """
    with open_regular(note, inside=note.parent) as file:
        lock = os.dup(file.fileno())
    try:
        hold(lock)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _require_free(target: Remote, *, overwrite: bool) -> None:
    """Remove a recording that is in the store, or refuse it; the rules are those of a directory."""
    there = objects.listed(str(target))
    if not there:
        return
    names = [item.name for item in there]
    if layout.MANIFEST not in names and not all(map(is_ours, names)):
        raise UsageError("the output directory holds other files", got=str(target), hint="name a new or empty one")
    if not overwrite:
        raise UsageError("the recording exists already", got=str(target), hint="replace it with --overwrite")
    # The manifest goes last, so that a half-removed recording can still be overwritten.
    for item in sorted((item for item in there if is_ours(item.name)), key=lambda item: item.name == layout.MANIFEST):
        place = target / item.name
        inner = [str(place / one.name) for one in objects.listed(str(place))] if item.is_directory else [str(place)]
        objects.remove(inner)


def is_left(target: Remote) -> bool:
    """Return whether something that goes to a place waits here, and is not being written."""
    if not root_of(target).exists():
        return False
    try:
        found = Spool.left(target)
    except (GlassError, OSError):
        return False
    if found is not None:
        found.close(remove=False)
    return found is not None
