"""Bytes of objects by ranges: several requests at a time, and blocks of which a bounded number is kept in memory.

A range of some size is fetched as it is asked for; of small ones, whose neighbors are usually asked for next, the
whole block is. Blocks that are read one after the other are fetched ahead.
"""

from __future__ import annotations

import io
import mmap
import os
import tempfile
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from glassengine.errors import CorruptError
from glassengine.stores import objects
from glassengine.stores.objects import Found

BLOCK_BYTES = 4 << 20
MAX_BLOCKS = 32
"""Kept in memory by this process, of all objects together: 128 MiB."""

NUM_REQUESTS = 8
_AHEAD = 3
# Larger ranges lie in a file without a name, from which the system takes memory back: no tensor has a bound.
_MOST_IN_MEMORY = 1 << 28

_Key = tuple[str, str, int]


class _Blocks:
    """The blocks that were fetched last, or are being fetched, of all objects."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[_Key, Future[bytes]] = OrderedDict()
        self._last: dict[str, int] = {}
        self._pool = ThreadPoolExecutor(NUM_REQUESTS, thread_name_prefix="glassengine-store")

    def pool(self) -> ThreadPoolExecutor:
        """Return the threads that ask stores."""
        return self._pool

    def block(self, url: str, found: Found, number: int) -> bytes:
        """Return one block, and fetch those behind it where the one before it was asked for last."""
        with self._lock:
            follows = self._last.get(url) in (number - 1, number)
            self._last[url] = number
            if len(self._last) > MAX_BLOCKS:
                del self._last[next(iter(self._last))]
            wanted = self._wanted(url, found, number)
            if follows:
                for other in range(number + 1, min(number + 1 + _AHEAD, -(-found.size // BLOCK_BYTES))):
                    self._wanted(url, found, other)
        try:
            return wanted.result()
        except BaseException:
            with self._lock:
                self._blocks.pop((url, found.version, number), None)
            raise

    def _wanted(self, url: str, found: Found, number: int) -> Future[bytes]:
        key = (url, found.version, number)
        block = self._blocks.get(key)
        if block is None:
            start = number * BLOCK_BYTES
            block = self._pool.submit(objects.read, url, start, min(start + BLOCK_BYTES, found.size))
            self._blocks[key] = block
            while len(self._blocks) > MAX_BLOCKS:
                self._blocks.popitem(last=False)[1].cancel()
        else:
            self._blocks.move_to_end(key)
        return block

    def forget(self, url: str) -> None:
        """Drop what is kept of an object, or of those below it."""
        with self._lock:
            for key in [key for key in self._blocks if key[0] == url or key[0].startswith(f"{url}/")]:
                del self._blocks[key]


_lock = threading.Lock()
_known: dict[int, _Blocks] = {}


def _blocks() -> _Blocks:
    """Return the blocks of this process: threads do not live on in one that is forked from it."""
    with _lock:
        found = _known.get(os.getpid())
        if found is None:
            _known.clear()
            found = _known[os.getpid()] = _Blocks()
        return found


def forget(url: str) -> None:
    """Drop what is kept of an object, or of those below it: what was damaged on its way is fetched again."""
    _blocks().forget(url)


def in_parallel() -> ThreadPoolExecutor:
    """Return the threads that ask stores, `NUM_REQUESTS` at a time."""
    return _blocks().pool()


def read_range(url: str, found: Found, start: int, num_bytes: int) -> Any:
    """Return a writable buffer with bytes of an object.

    Args:
        url: Of the object.
        found: What the store said of it.
        start: Of the bytes.
        num_bytes: At least 1.

    Raises:
        UsageError: The store cannot be asked.
        CorruptError: The object does not have these bytes.
    """
    if start + num_bytes > found.size:
        got = f"{url}: {found.size:,} bytes"
        raise CorruptError("an object is too short", got=got, expected=f"at least {start + num_bytes:,}")
    import numpy as np

    if num_bytes >= 2 * BLOCK_BYTES:
        return _in_pieces(url, start, num_bytes)
    buffer = np.empty(num_bytes, dtype=np.uint8)
    view = memoryview(buffer)  # type: ignore[arg-type]  # a buffer at run time
    done = 0
    while done < num_bytes:
        number, offset = divmod(start + done, BLOCK_BYTES)
        data = _blocks().block(url, found, number)[offset : offset + num_bytes - done]
        view[done : done + len(data)] = data
        done += len(data)
    return buffer


def _in_pieces(url: str, start: int, num_bytes: int) -> Any:
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
        view[begin:end] = objects.read(url, start + begin, start + end)

    # Not all at once: what waits for its turn holds nothing, what has come is copied.
    for _ in in_parallel().map(fill, range(0, num_bytes, BLOCK_BYTES)):
        pass
    return buffer


def changed(url: str, found: Found) -> str | None:
    """Return how an object differs from what the store said of it, or None."""
    return found.difference(objects.find(url))


class ObjectFile(io.RawIOBase):
    """An object open for reading, by blocks.

    Attributes:
        size: Bytes that it has.
    """

    def __init__(self, url: str, found: Found) -> None:
        self.size = found.size
        self._url = url
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
        number, offset = divmod(self._position, BLOCK_BYTES)
        if not view or self._position >= self.size:
            return 0
        data = _blocks().block(self._url, self._found, number)[offset : offset + len(view)]
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
    return io.BufferedReader(ObjectFile(url, objects.require(url, owned=owned)), buffer_size=1 << 16)
