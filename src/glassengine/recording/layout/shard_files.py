"""The bytes of finished and unfinished shards, on this machine or in a store, each range by itself."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import stat
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from glassengine.errors import CorruptError
from glassengine.reading.files import open_regular
from glassengine.recording.layout import layout
from glassengine.recording.layout.layout import shard_name, shard_number
from glassengine.stores import objects
from glassengine.stores.objects import ObjectFacts, forget, read_range
from glassengine.stores.places import RemotePath

# Smaller ranges are copied. Who cuts a file under a mapping ends the process that reads it with a signal; what has no
# bound must be mapped all the same, for it may be larger than the memory.
MIN_MAPPED_BYTES = 64 << 20
_MAX_OPEN = 16

# The mappings of Python's module keep a file open each, of which a process may have as few as 256.
_LIBC = ctypes.CDLL(None, use_errno=True)
MMAP, MUNMAP = _LIBC.mmap, _LIBC.munmap
MMAP.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong)
MMAP.restype = ctypes.c_void_p
MUNMAP.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
MAP_FAILED = ctypes.c_void_p(-1).value


class ShardFiles:
    """The shards of a recording on this machine, and those of another directory, `more`, with other numbers.

    Attributes:
        data_bytes: Bytes of tensors in each shard, by number, when this was made.
        keeps_still: Whether bytes that were right once are right the next time.
    """

    keeps_still = True

    def __init__(self, directory: Path, more: Path | None = None) -> None:
        self._open: dict[int, int] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._open)
        self._paths = {**(_find_shards(more) if more is not None else {}), **_find_shards(directory)}
        self._starts = {number: _header_bytes(path) for number, path in self._paths.items()}
        # A header that claims more than the file leaves no data.
        sizes = {number: path.stat().st_size for number, path in self._paths.items()}
        self.data_bytes = {number: max(0, size - self._starts[number]) for number, size in sizes.items()}

    def read(self, shard: int, offset: int, num_bytes: int) -> Any:
        """Return a writable buffer with bytes of a shard; they are mapped if they are many, and copied if few.

        Writing into it never changes the file. Its memory is given back when nothing refers to it any more.
        """
        start = self._starts[shard] + offset
        # Another thread may want another shard, for which this one is closed.
        with self._lock:
            descriptor = os.dup(self._descriptor(shard))
        try:
            if os.fstat(descriptor).st_size < start + num_bytes:
                raise _shorter(self._paths[shard])
            if num_bytes >= MIN_MAPPED_BYTES:
                return mapped(descriptor, start, num_bytes)
            return _copied(descriptor, start, num_bytes, self._paths[shard])
        finally:
            os.close(descriptor)

    read_again = read

    def damage(self, shard: int) -> str | None:
        """Return None: a file says nothing of its changes."""
        return None

    def _descriptor(self, shard: int) -> int:
        found = self._open.get(shard)
        if found is None:
            path = self._paths[shard]
            if not path.exists():
                # Its writer, still at work when this recording was opened, has sealed it in the meantime.
                path = path.with_name(shard_name(shard, sealed=True))
            while len(self._open) >= _MAX_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            with open_regular(path, inside=path.parent) as file:
                found = self._open[shard] = os.dup(file.fileno())
        return found


def _close(descriptors: dict[int, int]) -> None:
    for descriptor in descriptors.values():
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _shorter(path: Path) -> CorruptError:
    return CorruptError("a shard has become shorter", got=str(path))


def _copied(descriptor: int, start: int, num_bytes: int, path: Path) -> Any:
    """Return bytes in memory of their own, uninitialized."""
    buffer = np.empty(num_bytes, dtype=np.uint8)
    view = memoryview(buffer)  # type: ignore[arg-type]  # a buffer at run time
    done = 0
    while done < num_bytes:
        count = os.preadv(descriptor, [view[done:]], start + done)
        if not count:
            raise _shorter(path)
        done += count
    return buffer


def mapped(descriptor: int, start: int, num_bytes: int) -> Any:
    """Return a private, writable mapping: tensors want writable memory, and the file must not change."""
    before = start % mmap.ALLOCATIONGRANULARITY
    size = before + num_bytes
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = MMAP(None, size, access, mmap.MAP_PRIVATE, descriptor, start - before)
    if address == MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: {num_bytes} bytes cannot be mapped")
    buffer = (ctypes.c_ubyte * num_bytes).from_address(address + before)
    # Not at the end of the process: a tensor may still be read then.
    weakref.finalize(buffer, MUNMAP, address, size).atexit = False
    return buffer


def _find_shards(directory: Path) -> dict[int, Path]:
    """Return the shards by number; of a shard that is sealed twice over a crash, the sealed file."""
    shards: dict[int, Path] = {}
    for sealed in (False, True):
        suffix = Path(shard_name(0, sealed=sealed)).suffix
        for file in directory.glob(f"shard-*{suffix}"):
            number = shard_number(file.name, sealed=sealed)
            if number is not None and stat.S_ISREG(os.lstat(file).st_mode):
                shards[number] = file
    return shards


def _header_bytes(file: Path) -> int:
    with open_regular(file, inside=file.parent) as opened:
        return _data_start(opened.read(8))


def _data_start(head: bytes) -> int:
    """Return where the data of a shard begins; written by an earlier version, one never sealed begins with zeros."""
    return 8 + (int.from_bytes(head, "little") or layout.HEADER_BYTES - 8)


class ShardObjects:
    """The shards of a recording in a store; what `ShardFiles` is. An object may be replaced between two ranges."""

    keeps_still = False

    def __init__(self, directory: RemotePath, more: RemotePath | None = None) -> None:
        self._found = {**(_find(more) if more is not None else {}), **_find(directory)}
        starts = objects.in_parallel(
            lambda shard: _data_start(objects.read(shard.url, 0, 8)), list(self._found.values())
        )
        self._starts = dict(zip(self._found, starts, strict=True))
        self.data_bytes = {number: max(0, found.size - self._starts[number]) for number, found in self._found.items()}

    def read(self, shard: int, offset: int, num_bytes: int) -> Any:
        """Return a writable buffer with bytes of a shard."""
        return read_range(self._found[shard], self._starts[shard] + offset, num_bytes)

    def read_again(self, shard: int, offset: int, num_bytes: int) -> Any:
        """Do what `read` does, and fetch the bytes again: they may have been damaged on their way."""
        forget(self._found[shard].url)
        return self.read(shard, offset, num_bytes)

    def damage(self, shard: int) -> str | None:
        """Return how a shard differs from what it was when this was made, or None."""
        difference = self._found[shard].change()
        return None if difference is None else f"{self._found[shard].url} has changed since it was opened: {difference}"


def _find(directory: RemotePath) -> dict[int, ObjectFacts]:
    """Return the shards by number; of a shard that is there twice, the sealed one."""
    shards: dict[int, ObjectFacts] = {}
    there = [item for item in objects.listed(str(directory)) if not item.is_directory and item.size >= 8]
    for sealed in (False, True):
        numbers = [shard_number(item.name, sealed=sealed) for item in there]
        shards |= {number: item for number, item in zip(numbers, there, strict=True) if number is not None}
    return shards


Shards = ShardFiles | ShardObjects
