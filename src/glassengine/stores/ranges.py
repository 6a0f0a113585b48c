"""Reads ranges of objects: several requests at a time, through blocks of which a bounded number is kept in memory.

A range of some size is fetched as it is asked for. Of small ones, whose neighbors are usually asked for next, the
whole block is; blocks that are read one after the other are fetched several at a time.
"""

from __future__ import annotations

import functools
import io
import mmap
import os
import tempfile
import threading
from collections import OrderedDict
from typing import Any

from glassengine.errors import CorruptError
from glassengine.stores import objects
from glassengine.stores.objects import Found, in_parallel

BLOCK_BYTES = 4 << 20
MAX_BLOCKS = 32
"""Kept in memory by this process, of all objects together: 128 MiB."""

_AHEAD = 3
# Larger ranges lie in a file without a name, from which the system takes memory back: no tensor has a bound.
_MOST_IN_MEMORY = 1 << 28

_Key = tuple[str, str, int]


@functools.lru_cache(1)
def _blocks(_process: int) -> tuple[OrderedDict[_Key, bytes], threading.Lock]:
    """Return the blocks that a process used last, and their lock, which a fork must not inherit."""
    return OrderedDict(), threading.Lock()


def forget(url: str) -> None:
    """Drop what is kept of an object, or of those below it: what was damaged on its way is fetched again."""
    kept, lock = _blocks(os.getpid())
    with lock:
        for key in [key for key in kept if key[0] == url or key[0].startswith(f"{url}/")]:
            del kept[key]


def _block(found: Found, number: int) -> bytes:
    """Return one block; where the one before it is kept, those behind it are fetched with it."""
    kept, lock = _blocks(os.getpid())
    first, last = (found.url, found.version, number), -(-found.size // BLOCK_BYTES)
    with lock:
        if first in kept:
            kept.move_to_end(first)
            return kept[first]
        most = number + 1 + (_AHEAD if (*first[:2], number - 1) in kept else 0)
        wanted = [other for other in range(number, min(most, last)) if (*first[:2], other) not in kept]

    def fetch(other: int) -> bytes:
        return objects.read(found.url, other * BLOCK_BYTES, min((other + 1) * BLOCK_BYTES, found.size))

    data = in_parallel(fetch, wanted)
    with lock:
        kept.update(((*first[:2], other), block) for other, block in zip(wanted, data, strict=True))
        while len(kept) > MAX_BLOCKS:
            kept.popitem(last=False)
    return data[0]


def read_range(found: Found, start: int, num_bytes: int) -> Any:
    """Return a writable buffer with bytes of an object.

    Args:
        found: What the store said of the object.
        start: Of the bytes.
        num_bytes: At least 1.

    Raises:
        UsageError: The store cannot be asked.
        CorruptError: The object does not have these bytes.
    """
    if start + num_bytes > found.size:
        got = f"{found.url}: {found.size:,} bytes"
        raise CorruptError("an object is too short", got=got, expected=f"at least {start + num_bytes:,}")
    import numpy as np

    if num_bytes <= _MOST_IN_MEMORY:
        buffer: Any = np.empty(num_bytes, dtype=np.uint8)
    else:
        with tempfile.TemporaryFile(prefix="glassengine-") as file:
            file.truncate(num_bytes)
            buffer = np.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=np.uint8)
    view = memoryview(buffer)

    def fill(begin: int) -> None:
        end = min(begin + BLOCK_BYTES, num_bytes)
        view[begin:end] = objects.read(found.url, start + begin, start + end)

    if num_bytes >= 2 * BLOCK_BYTES:
        in_parallel(fill, range(0, num_bytes, BLOCK_BYTES))
        return buffer
    object_file, done = ObjectFile(found), 0
    object_file.seek(start)
    while done < num_bytes:
        done += object_file.readinto(view[done:])
    return buffer


class ObjectFile(io.RawIOBase):
    """An object open for reading, by blocks.

    Attributes:
        size: Bytes that it has.
    """

    def __init__(self, found: Found) -> None:
        self.size = found.size
        self._found = found
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a place; see `io`."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as there are bytes; see `io`."""
        view = memoryview(buffer).cast("B")
        if not view or self._position >= self.size:
            return 0
        number, offset = divmod(self._position, BLOCK_BYTES)
        data = memoryview(_block(self._found, number))[offset : offset + len(view)]
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


def open_object(url: str, *, owned: bool = False) -> io.BufferedReader:
    """Open an object for reading.

    Args:
        url: Of the object.
        owned: Whether it is part of something, rather than named by the user.

    Raises:
        UsageError: There is none, or the store cannot be asked.
        CorruptError: There is none, and it is `owned`.
    """
    return io.BufferedReader(ObjectFile(objects.require(url, owned=owned)), buffer_size=1 << 16)
