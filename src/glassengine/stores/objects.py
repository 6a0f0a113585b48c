"""Objects of a store, through fsspec: what is there, ranges of bytes, copies here and there.

Credentials, endpoints and regions are those of the store's own library: its environment variables, its files, and
fsspec's configuration. That library tries again what fails in passing; what then still fails is an error with its
reason. Large ranges are fetched as they are asked for, several requests at a time. Of small ones, whose neighbors are
usually asked for next, the whole block is; a bounded number of blocks is kept in memory.
"""

from __future__ import annotations

import contextlib
import functools
import io
import mmap
import os
import posixpath
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from glassengine.errors import CorruptError, GlassError, UsageError, first_line, nearest
from glassengine.stores import objects

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


# Scheme -> the extra of this package that brings its library; "" where nothing more is needed.
EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
    "hf": "",
    "memory": "",
}

MAX_OBJECTS = 200_000
"""In one place; a directory with more is refused."""

NUM_REQUESTS = 8
_MAX_DEPTH = 32

_DIRECTORY = "directory"
_VERSIONS = ("ETag", "etag", "generation", "blob_id", "md5", "content_md5", "last_commit", "LastModified", "created")
# A try; the library makes several. Users have their own in fsspec's configuration.
_TIMEOUTS = {"connect_timeout": 10, "read_timeout": 20, "retries": {"total_max_attempts": 3, "mode": "standard"}}
# Some servers answer a range with the checksum of the whole object. What is read by ranges has checksums of its own.
_OF_RANGES = {"response_checksum_validation": "when_required"}

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class ObjectFacts:
    """What a store says of a place.

    Attributes:
        url: Of the place.
        size: Bytes; 0 of a directory.
        version: What changes when the object does, as far as the store has it: "etag=...".
        is_directory: Whether it is objects below a name.
    """

    url: str
    size: int
    version: str
    is_directory: bool

    @property
    def name(self) -> str:
        """Last part of its path."""
        return self.url.rpartition("/")[2]

    def change(self) -> str | None:
        """Return how the object differs by now, or None.

        Raises:
            UsageError: The store cannot be asked.
        """
        now = find(self.url)
        if now is None:
            return "it is gone"
        if now.size != self.size:
            return f"it has {now.size:,} bytes, and had {self.size:,}"
        # A list may say less than a question for one object.
        is_same_kind = now.version.partition("=")[0] == self.version.partition("=")[0]
        return "it was replaced" if is_same_kind and now.version != self.version else None


def find(url: str) -> ObjectFacts | None:
    """Return what is at a place, or None.

    Raises:
        UsageError: The store cannot be asked.
    """
    found = None
    with _store(url) as (store, path), contextlib.suppress(FileNotFoundError):
        found = _facts(url, store.info(path))
    return found


def require(url: str, *, owned: bool = False, directory: bool = False) -> ObjectFacts:
    """Return what is known of an object.

    Raises:
        UsageError: There is none, or the store cannot be asked.
        CorruptError: There is none, and it is `owned`.
    """
    found = find(url)
    if found is not None and (directory or not found.is_directory):
        return found
    close: list[str] = []
    if found is None and not owned:
        folder, _, name = url.rpartition("/")
        with contextlib.suppress(GlassError):
            close = nearest(name, [item.name for item in listed(folder)])
    what = "no such object" if found is None else "a directory"
    kind = CorruptError if owned else UsageError
    raise kind("a file cannot be read", got=f"{url}: {what}", expected=close or None)


def listed(url: str) -> list[ObjectFacts]:
    """Return what is directly below a place, by name; nothing where nothing is there.

    Names that no path can have are refused: they would lead out of a directory.

    Raises:
        UsageError: The store cannot be asked.
        CorruptError: A name is no name of a file, or there are too many.
    """
    items: list[dict[str, Any]] = []
    with _store(url) as (store, path), contextlib.suppress(FileNotFoundError):
        items = [item for item in store.ls(path, detail=True) if item["name"].strip("/") != path.strip("/")]
    if len(items) > MAX_OBJECTS:
        raise CorruptError("too many objects in one place", got=f"{url}: {len(items):,}", expected=f"{MAX_OBJECTS:,}")
    found = []
    for item in items:
        is_directory = item.get("type") == _DIRECTORY
        name = posixpath.basename(item["name"].rstrip("/") if is_directory else item["name"])
        if name in ("", ".", "..") or any(sign in name for sign in "/\\\0") or len(name) > 255:
            raise CorruptError("object name is not a valid file name", got=f"{url}: {name[:100]!r}")
        found.append(_facts(f"{url}/{name}", item))
    return sorted(found, key=lambda item: item.url)


def below(url: str, depth: int = 0) -> Iterator[tuple[str, ObjectFacts]]:
    """Yield (relative name, object) for all objects below a place, at any depth.

    Raises:
        UsageError: The store cannot be asked.
        CorruptError: As `listed`, or the objects lie too deep.
    """
    if depth > _MAX_DEPTH:
        raise CorruptError("objects lie too deep", got=url, expected=f"at most {_MAX_DEPTH} levels")
    for item in listed(url):
        if item.is_directory:
            yield from ((f"{item.name}/{name}", found) for name, found in below(item.url, depth + 1))
        else:
            yield item.name, item


def read(url: str, start: int, stop: int) -> bytes:
    """Return bytes `start` to `stop` of an object that has them.

    Raises:
        UsageError: The store cannot be asked.
        CorruptError: It gives other than these bytes: the object is shorter than it was.
    """
    data = b""
    if stop > start:
        with _store(url, CorruptError) as (store, path):
            data = bytes(store.cat_file(path, start=start, end=stop))
    if len(data) != max(0, stop - start):
        got = f"{url}: {len(data):,} bytes from {start:,} on"
        raise CorruptError("an object is not what the store said", got=got, expected=f"{stop - start:,} bytes")
    return data


def fetch(url: str, target: Path) -> None:
    """Copy an object into a new file of this machine.

    Raises:
        UsageError: The store cannot be asked, or the file not be written.
        CorruptError: There is no such object.
    """
    with _store(url, CorruptError, whole=True) as (store, path):
        store.get_file(path, str(target))


def put(source: Path, url: str) -> None:
    """Copy a file of this machine into an object, in place of what is there.

    Raises:
        UsageError: The store cannot be asked, or the file not be read.
    """
    size = source.stat().st_size
    with _store(url) as (store, path):
        store.put_file(str(source), path)
    found = find(url)
    if found is None or found.size != size:
        got = f"{url}: {'nothing' if found is None else f'{found.size:,} bytes'}"
        raise UsageError("the store did not keep what was written", got=got, expected=f"{size:,} bytes")


def write(data: bytes, url: str) -> None:
    """Write an object as a whole, in place of what is there.

    Raises:
        UsageError: The store cannot be asked.
    """
    with _store(url) as (store, path):
        store.pipe_file(path, data)


def remove(urls: Iterable[str]) -> None:
    """Remove objects; one that is not there is none.

    Raises:
        UsageError: The store cannot be asked.
    """
    for url in urls:
        with _store(url) as (store, path), contextlib.suppress(FileNotFoundError):
            store.rm_file(path)


def in_parallel(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return what a function returns for each item, in their order; at most `NUM_REQUESTS` are asked for at a time."""
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(NUM_REQUESTS, len(items)), thread_name_prefix="glassengine-store") as pool:
        return list(pool.map(function, items))


def _facts(url: str, info: dict[str, Any]) -> ObjectFacts:
    version = next((f"{key.lower()}={_text(info[key])}" for key in _VERSIONS if info.get(key) is not None), "")
    return ObjectFacts(url, int(info.get("size") or 0), version, info.get("type") == _DIRECTORY)


def _text(version: object) -> str:
    """Return a version as text: a time is in seconds, which some lists have where a single answer has a date."""
    return str(version.timestamp() if isinstance(version, datetime) else version)


@contextlib.contextmanager
def _store(
    url: str, missing: type[GlassError] = UsageError, *, whole: bool = False
) -> Iterator[tuple[AbstractFileSystem, str]]:
    """Yield the store of a URL and the path in it; what then fails becomes an error with its reason."""
    import fsspec
    from fsspec.config import conf

    scheme = url.partition(":")[0]
    extra = EXTRAS[scheme]
    options: dict[str, Any] = {"use_listings_cache": False}
    if extra == "s3" and "config_kwargs" not in conf.get("s3", {}):
        options["config_kwargs"] = _TIMEOUTS if whole else {**_TIMEOUTS, **_OF_RANGES}
    try:
        yield fsspec.core.url_to_fs(url, **options)
    except GlassError:
        raise
    except ImportError as error:
        hint = f"pip install 'glassengine[{extra}]'" if extra else None
        got = f"{url}: {first_line(error)}"
        raise UsageError(f"{scheme}:// needs a package that is not installed", got=got, hint=hint) from error
    except FileNotFoundError as error:
        raise missing("no such object", got=f"{url}: {_reason(error)}") from error
    except Exception as error:  # of whichever library the store has
        raise UsageError("the store cannot be used", got=f"{url}: {_reason(error)}", hint=_hint(error)) from error


def _hint(error: BaseException) -> str | None:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, PermissionError) or any("Credential" in kind or "Auth" in kind for kind in kinds):
        hint = "credentials are those of the store's own library, e.g. AWS_PROFILE (docs/stores.md lists them);"
        return hint + " they have to allow listing and reading, and writing where something is written"
    if kinds & {"EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "TimeoutError"}:
        return "another endpoint: AWS_ENDPOINT_URL; longer timeouts: docs/stores.md"
    if "FlexibleChecksumError" in kinds:
        return "AWS_RESPONSE_CHECKSUM_VALIDATION=when_required, if a server answers a range with the whole's checksum"
    return None


def _reason(error: BaseException) -> str:
    text = first_line(error)
    name = type(error).__name__
    return text[:400] if text and isinstance(error, OSError) else f"{name}: {text[:400]}" if text else name


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


def _block(found: ObjectFacts, number: int) -> bytes:
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


def read_range(found: ObjectFacts, start: int, num_bytes: int) -> Any:
    """Return a writable buffer with bytes of an object.

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
    """An object open for reading, by blocks."""

    def __init__(self, found: ObjectFacts) -> None:
        self.size = found.size
        self._facts = found
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
        data = memoryview(_block(self._facts, number))[offset : offset + len(view)]
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


def open_object(url: str, *, owned: bool = False) -> io.BufferedReader:
    """Open an object for reading.

    Raises:
        UsageError: There is none, or the store cannot be asked.
        CorruptError: There is none, and it is `owned`.
    """
    return io.BufferedReader(ObjectFile(objects.require(url, owned=owned)), buffer_size=1 << 16)
