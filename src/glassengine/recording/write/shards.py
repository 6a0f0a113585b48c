"""The shards of a recording, one after the other."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from glassengine.recording.layout import layout
from glassengine.recording.layout.description import Description, Group
from glassengine.recording.write.shard import Shard
from glassengine.recording.write.uploads import Uploads

SHARD_BYTES = 1 << 31


class Shards:
    """Shards of one directory, the last of which may be open.

    Args:
        path: The directory.
        first: Number of the first one.

    Attributes:
        uploads: Take each shard that is sealed, where the recording goes to a store.
    """

    def __init__(self, path: Path, first: int) -> None:
        self.uploads: Uploads | None = None
        self._path = path
        self._next = first
        self._header_bytes = layout.HEADER_BYTES
        self._open: Shard | None = None
        self._sealed: list[Shard] = []
        self._is_there: Callable[[], bool] = lambda: True

    def begin(self, is_there: Callable[[], bool]) -> None:
        """Make the first shard, with the index: what is made later, in a directory that is just removed, keeps it.

        Args:
            is_there: Whether the index has a name; where it has none, nothing is made any more.
        """
        self._is_there = is_there
        with contextlib.suppress(OSError):  # of a disk that is full there is told when something is stored
            self._begin_next()

    @property
    def place(self) -> tuple[int, int]:
        """Shard that is being written, and the bytes in it so far."""
        return (-1, 0) if self._open is None else (self._open.number, self._open.size)

    def for_next(self, *added: Description | Group) -> Shard:
        """Return the shard that takes these tensors next; a full one is sealed.

        Raises:
            OSError: It cannot be written.
            UsageError: A store does not take what was written before.
        """
        if self._open is not None:
            size = self._open.size
            is_enough = size >= SHARD_BYTES
            if self.uploads is not None:
                is_enough = self.uploads.is_enough(size, self._open.number)
            has_room = self._open.has_room(*added)
            if is_enough or not has_room:
                self.seal()
                if self.uploads is None or not has_room:
                    self._header_bytes = min(2 * self._header_bytes, layout.MAX_HEADER_BYTES)
        if self._open is None:
            if self.uploads is not None:
                self.uploads.wait_for_room()
            return self._begin_next()
        return self._open

    def _begin_next(self) -> Shard:
        if not self._is_there():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._path))
        self._open = Shard(self._path, self._next, self._header_bytes)
        self._next += 1
        return self._open

    def flush(self) -> None:
        """Write the bytes that were taken."""
        if self._open is not None:
            self._open.flush()

    def seal(self) -> None:
        """End the open shard, if there is one."""
        if self._open is not None:
            if self._open.is_empty:
                self._open.remove()
            else:
                self._open.seal()
                self._sealed.append(self._open)
                if self.uploads is not None:
                    self.uploads.sealed(self._open.path)
            self._open = None

    def require(self) -> None:
        """Wait until all sealed shards are on the disk."""
        for shard in self._sealed:
            shard.require()

    def close(self) -> None:
        """Close the file of the open shard, and write nothing."""
        if self._open is not None:
            self._open.close()
