"""Writes a recording into a store: into a directory of this machine first, whose shards are uploaded beside the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glassengine.errors import GlassError, UsageError
from glassengine.recording.layout import layout
from glassengine.recording.write.spool import Spool
from glassengine.recording.write.uploads import SPOOL_BYTES, Uploads
from glassengine.recording.write.writer import RecordingWriter
from glassengine.stores.places import Remote, place


class StoredWriter(RecordingWriter):
    """A `RecordingWriter` whose recording goes to a store.

    Closing seals what is written here; `deliver` then waits until all of it is in the store.

    Attributes:
        target: Where the recording goes; `path` is where it is until then.

    Raises:
        UsageError: The store cannot be used or has a recording there, or what waits cannot be written here.
    """

    def __init__(
        self, target: Remote, *, metadata: Mapping[str, Any], overwrite: bool = False, spool_bytes: int | None = None
    ) -> None:
        self._process = os.getpid()
        self._spool = Spool.begun(target, overwrite=overwrite)
        try:
            super().__init__(self._spool.directory, metadata=metadata)
            try:
                most = SPOOL_BYTES if spool_bytes is None else spool_bytes
                self._uploads = self._shards.uploads = Uploads(self.path, target, most)
            except BaseException:
                super().abandon()
                raise
        except BaseException:
            self._spool.close(remove=True)
            raise
        self.target: Path = target

    @property
    def is_behind(self) -> bool:
        """Whether the store takes less than is written."""
        return self._uploads.is_behind

    def hurry(self, patience_s: float) -> None:
        """Wait no more for a store that does not keep up."""
        self._uploads.hurry(patience_s)

    def deliver(self, patience_s: float | None = None) -> GlassError | None:
        """Wait until the recording, which is closed, is in the store; return why it is not.

        Args:
            patience_s: How long the store may not answer; as while it was written where None.
        """
        problem = self._uploads.finish(patience_s)
        if problem is None and (self.path / layout.RING).exists():
            hint = f"glass upload {self.target}"
            problem = UsageError("not everything was uploaded", got=f"{self.path}: steps in its ring", hint=hint)
        self._spool.close(remove=problem is None)
        return problem

    def abandon(self) -> None:
        """Close the files; in a process that was forked, also the lock, which is its parent's."""
        super().abandon()
        if os.getpid() != self._process:
            self._spool.close(remove=False)


def new_writer(
    path: str | Path, *, metadata: Mapping[str, Any], overwrite: bool, spool_bytes: int | None
) -> RecordingWriter:
    """Return what writes a recording to a path, here or in a store.

    Raises:
        UsageError: It cannot be written, or exists and `overwrite` is false.
    """
    where = place(path)
    if isinstance(where, Remote):
        return StoredWriter(where, metadata=metadata, overwrite=overwrite, spool_bytes=spool_bytes)
    return RecordingWriter(where, metadata=metadata, overwrite=overwrite)
