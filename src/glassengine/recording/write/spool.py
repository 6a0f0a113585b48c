"""Holds the directory of this machine in which a recording for a store is written first: one for each URL."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from glassengine import environment
from glassengine.errors import UsageError
from glassengine.recording.layout import layout
from glassengine.recording.write.directory import replaceable
from glassengine.stores import objects
from glassengine.stores.places import Remote
from glassengine.writing.files import held, private_directory, remove_tree


class Spool:
    """The directory for one place in a store, locked by this process until it ends or this is `closed`.

    Args:
        target: Where the recording goes.

    Attributes:
        target: As given.
        directory: Of the recording; need not exist.

    Raises:
        UsageError: Another writer holds it.
    """

    def __init__(self, target: Remote) -> None:
        self.target = target
        self.directory = directory_of(target)
        self._lock = contextlib.ExitStack()
        try:
            self._lock.enter_context(held(self.directory.parent))
        except BlockingIOError as error:
            hint = "name another place, or wait for the end of that recording"
            raise UsageError("a recording that is being written is not replaced", got=str(target), hint=hint) from error

    @classmethod
    def begun(cls, target: Remote, *, overwrite: bool) -> Spool:
        """Make room for a new recording, here and in the store.

        Raises:
            UsageError: There is a recording, here or in the store, and `overwrite` is false; one is being written; or
                other objects are there, or the store cannot be used.
        """
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


def directory_of(target: Remote) -> Path:
    """Return where on this machine a recording for a place is written; it need not exist."""
    digest = hashlib.sha256(str(target).encode()).hexdigest()[:16]
    name = "".join(sign if sign.isalnum() else "_" for sign in target.name)[:40]
    return environment.spool_dir() / f"{name}-{digest}" / "recording"


def is_left(target: Remote) -> bool:
    """Return whether a part of a recording for a place waits here, and is not being written."""
    if not directory_of(target).exists():
        return False
    try:
        Spool(target).close(remove=False)
    except (UsageError, OSError):
        return False
    return True


def _make_room(target: Remote, *, overwrite: bool) -> None:
    """Remove a recording that is in the store, or refuse it; the rules are those of a directory."""
    there = {item.name: item for item in objects.listed(str(target))}
    for name in replaceable(target, list(there), overwrite=overwrite):
        item = there[name]
        objects.remove([one.url for one in (objects.listed(item.url) if item.is_directory else [item])])
