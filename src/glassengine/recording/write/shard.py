"""Shards: raw bytes behind a reserved header, sealed into safetensors files one after the other.

safetensors refuses holes and trailing bytes, so every gap that alignment leaves becomes an explicit pad entry. What is
appended waits until `flush`, which writes it in one call of the operating system.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from glassengine.recording.layout import layout
from glassengine.recording.layout.description import Description, Group, pad_entry
from glassengine.recording.layout.layout import ALIGNMENT, Location, aligned, shard_name
from glassengine.recording.write.destination import Uploads, require_open, require_there
from glassengine.writing import write_all

_ZEROS = bytes(ALIGNMENT)
_SPACES = b" " * (1 << 16)
# Braces, metadata keys, and a last pad entry.
_HEADER_OVERHEAD = 512


class Shard:
    """An open `shard-NNNNN.part`. Bytes are in the file (the kernel's cache) when `flush` returns.

    Attributes:
        number: The number in its name.
        size: Data bytes so far; pads and what waits for `flush` included, the header not.
    """

    def __init__(self, directory: Path, number: int, header_bytes: int) -> None:
        self.number = number
        self.size = 0
        self._directory = directory
        self._room = header_bytes - 8
        self._used = _HEADER_OVERHEAD
        self._entries: list[str] = []
        self._aliases: list[str] = []
        self._waiting: list[bytes | memoryview] = []
        self._blocks: list[tuple[Group, int, int]] = []
        self._written = (0, 0, 0, 0)
        self._is_sealed = False
        self._file = (directory / shard_name(number, sealed=False)).open("xb", buffering=0)
        try:
            spaces = [_SPACES] * (self._room // len(_SPACES)) + [_SPACES[: self._room % len(_SPACES)]]
            # Written, not skipped: a disk that fills up later must still be able to take the header. Spaces: what the
            # header does not need of them stays.
            write_all(self._file, [self._room.to_bytes(8, "little"), *spaces])
        except OSError:
            with contextlib.suppress(OSError):
                self._file.close()
                self.path.unlink()
            raise

    def has_room(self, *added: Description | Group) -> bool:
        """Return whether the header can take an entry, or alias, of these as well."""
        return self._used + sum(item.most_header_bytes for item in added) <= self._room

    def align(self) -> int:
        """Fill up to the next aligned offset and return it."""
        offset = aligned(self.size)
        if offset > self.size:
            self._waiting.append(_ZEROS[: offset - self.size])
            self._pad(self.size, offset)
            self.size = offset
        return offset

    def append(self, data: memoryview) -> None:
        """Take bytes at the current end; `data` must not change before `flush`."""
        self._waiting.append(data)
        self.size += data.nbytes

    def add(self, description: Description, step: int, rank: int, location: Location) -> None:
        """Give the bytes at `location`, just appended, their name in the header."""
        offset = location.offset
        self._name(description.header_entry(step, rank, offset, offset + description.nbytes))

    def add_block(self, group: Group, step: int, location: Location) -> None:
        """Give the bytes of a block at `location`, just appended, their names; they become text when it is sealed."""
        self._blocks.append((group, step, location.offset))
        self._used += group.most_header_bytes

    def add_alias(self, description: Description, original: Description, step: int, rank: int, file: str) -> None:
        """Note in the header's metadata that a tensor has the bytes of another one of its step, which are in `file`."""
        escaped = description.header_alias(original, step, rank, file)
        self._aliases.append(escaped)
        self._used += len(escaped) + 1

    def disown(self, offset: int) -> None:
        """Take the bytes from `offset` to the end for padding: what should have followed them never came."""
        if self.size > offset:
            self._pad(offset, self.size)

    def flush(self) -> None:
        """Write what waits; where that fails, the shard is what it was after the last flush."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            try:
                # Before: what is written behind a cut leaves zeros there.
                require_open(self._file.fileno(), 8 + self._room + self._written[0], self.path)
                write_all(self._file, waiting)
            except OSError:
                self.size, num_entries, num_aliases, num_blocks = self._written
                with contextlib.suppress(OSError):
                    self._file.seek(8 + self._room + self.size)
                del self._entries[num_entries:]
                del self._aliases[num_aliases:]
                del self._blocks[num_blocks:]
                raise
        self._written = (self.size, len(self._entries), len(self._aliases), len(self._blocks))

    @property
    def path(self) -> Path:
        """Where the file is."""
        return self._directory / shard_name(self.number, sealed=self._is_sealed)

    def require(self) -> None:
        """Raise unless the file is there with all that was written."""
        require_there(self.path, 8 + self._room + self.size)

    def seal(self) -> None:
        """Write the header and rename the file; it then is a safetensors file. What fails may be tried again."""
        self.flush()
        self.require()
        if not self._file.closed:
            self._write_header()
        sealed = self._directory / shard_name(self.number, sealed=True)
        self.path.rename(sealed)
        self._is_sealed = True

    def _write_header(self) -> None:
        file = shard_name(self.number, sealed=True)
        aliases, entries = list(self._aliases), list(self._entries)
        for group, step, offset in self._blocks:
            entries.append(group.header_entries(step, offset))
            if group.originals:
                aliases.append(group.header_aliases(step, file))
        parts = [b'{"__metadata__":{"format":"pt","aliases":"{', ",".join(aliases).encode(), b'}"}']
        for text in entries:
            parts += b",", text.encode()
        parts.append(b"}")
        assert sum(map(len, parts)) <= self._room, "has_room underestimates the header"
        # What a failed write left behind the last good byte would make the file unreadable.
        os.ftruncate(self._file.fileno(), 8 + self._room + self.size)  # unlike that of the file, also after a signal
        self._file.seek(8)
        write_all(self._file, parts)
        self._file.close()

    @property
    def is_empty(self) -> bool:
        """Whether it was given nothing."""
        return self._used == _HEADER_OVERHEAD

    def remove(self) -> None:
        """Close the file and remove it."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file without sealing it."""
        self._waiting.clear()
        self._file.close()

    def _pad(self, start: int, end: int) -> None:
        self._name(pad_entry(start, end, end - start))

    def _name(self, entry: str) -> None:
        self._entries.append(entry)
        self._used += len(entry) + 1


SHARD_BYTES = 1 << 31


class Shards:
    """Shards of one directory, the last of which may be open.

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
        """Return the shard that takes these tensors next; a full one is sealed."""
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
