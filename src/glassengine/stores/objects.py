"""Objects of a store, through fsspec: what is there, bytes of it, copies here and there; every failure with its reason.

Credentials, endpoints and regions are those of the store's own library: its environment variables, its files, and
fsspec's configuration. That library tries again what fails in passing; what then still fails is an error.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from glassengine.errors import CorruptError, GlassError, UsageError, first_line, nearest

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

_DIRECTORY = "directory"
_VERSIONS = ("ETag", "etag", "generation", "blob_id", "md5", "content_md5", "last_commit", "LastModified", "created")
# A try; the library makes several. Users have their own in fsspec's configuration.
_TIMEOUTS = {"connect_timeout": 10, "read_timeout": 20, "retries": {"total_max_attempts": 3, "mode": "standard"}}
# Some servers answer a range with the checksum of the whole object. What is read by ranges has checksums of its own.
_OF_RANGES = {"response_checksum_validation": "when_required"}

Result = TypeVar("Result")


@dataclass(frozen=True)
class Found:
    """What a store says of a place.

    Attributes:
        name: Last part of its path.
        size: Bytes; 0 of a directory.
        version: What changes when the object does, as far as the store has it: "etag=...".
        is_directory: Whether it is objects below a name.
    """

    name: str
    size: int
    version: str
    is_directory: bool

    def difference(self, now: Found | None) -> str | None:
        """Return how an object differs from what it was, or None."""
        if now is None:
            return "it is gone"
        if now.size != self.size:
            return f"it has {now.size:,} bytes, and had {self.size:,}"
        # A list may say less than a question for one object.
        is_same_kind = now.version.partition("=")[0] == self.version.partition("=")[0]
        return "it was replaced" if is_same_kind and now.version != self.version else None


def find(url: str) -> Found | None:
    """Return what is at a place, or None.

    Raises:
        UsageError: The store cannot be asked.
    """

    def ask(store: AbstractFileSystem, path: str) -> Found | None:
        try:
            return _found(store.info(path))
        except FileNotFoundError:
            return None

    return _with_store(url, ask)


def require(url: str, *, owned: bool = False) -> Found:
    """Return what is known of an object.

    Raises:
        UsageError: There is none, or the store cannot be asked.
        CorruptError: There is none, and it is part of something (`owned`).
    """
    found = find(url)
    if found is None or found.is_directory:
        kind = CorruptError if owned else UsageError
        folder, _, name = url.rpartition("/")
        close = [] if owned or found is not None else _near(folder, name)
        what = "a directory" if found is not None else "no such object"
        raise kind("a file cannot be read", got=f"{url}: {what}", expected=close or None)
    return found


def listed(url: str) -> list[Found]:
    """Return what is directly below a place, by name; nothing where nothing is there.

    Names that no path can have are refused: they would lead out of a directory.

    Raises:
        UsageError: The store cannot be asked.
        CorruptError: A name is no name of a file, or there are too many.
    """

    def ask(store: AbstractFileSystem, path: str) -> list[Found]:
        try:
            return [_found(item) for item in store.ls(path, detail=True) if item["name"].strip("/") != path.strip("/")]
        except FileNotFoundError:
            return []

    found = _with_store(url, ask)
    if len(found) > MAX_OBJECTS:
        raise CorruptError("too many objects in one place", got=f"{url}: {len(found):,}", expected=f"{MAX_OBJECTS:,}")
    for item in found:
        if item.name in ("", ".", "..") or any(sign in item.name for sign in "/\\\0") or len(item.name) > 255:
            got = f"{url}: {item.name[:100]!r}"
            raise CorruptError("an object has a name that no file can have", got=got)
    return sorted(found, key=lambda item: item.name)


def names(url: str) -> list[str]:
    """Return the names directly below a place; as `listed`."""
    return [item.name for item in listed(url)]


def read(url: str, start: int, stop: int) -> bytes:
    """Return bytes `start` to `stop` of an object that has them.

    Raises:
        UsageError: The store cannot be asked.
        CorruptError: It gives other than these bytes: the object is shorter than it was.
    """
    if stop <= start:
        return b""

    def ask(store: AbstractFileSystem, path: str) -> bytes:
        return bytes(store.cat_file(path, start=start, end=stop))

    data = _with_store(url, ask, CorruptError)
    if len(data) != stop - start:
        got = f"{url}: {len(data):,} bytes from {start:,} on"
        raise CorruptError("an object is not what the store said", got=got, expected=f"{stop - start:,} bytes")
    return data


def fetch(url: str, target: Path) -> None:
    """Copy an object into a new file of this machine.

    Raises:
        UsageError: The store cannot be asked, or the file not be written.
        CorruptError: There is no such object.
    """
    _with_store(url, lambda store, path: store.get_file(path, str(target)), CorruptError, whole=True)


def put(source: Path, url: str) -> None:
    """Copy a file of this machine into an object, in place of what is there.

    Raises:
        UsageError: The store cannot be asked, or the file not be read.
    """
    size = source.stat().st_size
    _with_store(url, lambda store, path: store.put_file(str(source), path))
    found = find(url)
    if found is None or found.size != size:
        got = f"{url}: {'nothing' if found is None else f'{found.size:,} bytes'}"
        raise UsageError("the store did not keep what was written", got=got, expected=f"{size:,} bytes")


def write(data: bytes, url: str) -> None:
    """Write an object as a whole, in place of what is there.

    Raises:
        UsageError: The store cannot be asked.
    """
    _with_store(url, lambda store, path: store.pipe_file(path, data))


def remove(urls: Sequence[str]) -> None:
    """Remove objects; one that is not there is none.

    Raises:
        UsageError: The store cannot be asked.
    """

    def ask(store: AbstractFileSystem, path: str) -> None:
        try:
            store.rm_file(path)
        except FileNotFoundError:
            return

    for url in urls:
        _with_store(url, ask)


def _near(folder: str, name: str) -> list[str]:
    try:
        return nearest(name, names(folder))
    except GlassError:
        return []


def _found(info: dict[str, Any]) -> Found:
    size = info.get("size")
    version = next((f"{key.lower()}={_text(info[key])}" for key in _VERSIONS if info.get(key) is not None), "")
    is_directory = info.get("type") == _DIRECTORY
    name = str(info["name"]).rstrip("/") if is_directory else str(info["name"])
    return Found(posixpath.basename(name), int(size or 0), version, is_directory)


def _text(version: object) -> str:
    """Return a version as text: a time is in seconds, which some lists have where a single answer has a date."""
    return str(version.timestamp() if isinstance(version, datetime) else version)


def _store(url: str, *, whole: bool) -> tuple[AbstractFileSystem, str]:
    import fsspec
    from fsspec.config import conf

    scheme = url.partition(":")[0]
    options: dict[str, Any] = {"use_listings_cache": False}
    if EXTRAS[scheme] == "s3" and "config_kwargs" not in conf.get("s3", {}):
        options["config_kwargs"] = _TIMEOUTS if whole else {**_TIMEOUTS, **_OF_RANGES}
    try:
        store, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        extra = EXTRAS[scheme]
        raise UsageError(
            f"{scheme}:// needs a package that is not installed",
            got=f"{url}: {first_line(error)}",
            hint=f"pip install 'glassengine[{extra}]'" if extra else None,
        ) from error
    return store, path


def _with_store(
    url: str,
    ask: Callable[[AbstractFileSystem, str], Result],
    missing: type[GlassError] = UsageError,
    *,
    whole: bool = False,
) -> Result:
    try:
        store, path = _store(url, whole=whole)
        return ask(store, path)
    except GlassError:
        raise
    except FileNotFoundError as error:
        raise missing("no such object", got=f"{url}: {_reason(error)}") from error
    except Exception as error:  # of whichever library the store has
        raise failed(url, error) from error


def failed(url: str, error: BaseException) -> UsageError:
    """Return the error for a store that cannot be asked."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    hint = None
    if isinstance(error, PermissionError) or any("Credential" in kind or "Auth" in kind for kind in kinds):
        hint = "credentials are those of the store's own library, e.g. AWS_PROFILE (docs/stores.md lists them);"
        hint += " they have to allow listing and reading, and writing where something is written"
    elif kinds & {"EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "TimeoutError"}:
        hint = "another endpoint: AWS_ENDPOINT_URL; longer timeouts: docs/stores.md"
    elif "FlexibleChecksumError" in kinds:
        hint = "AWS_RESPONSE_CHECKSUM_VALIDATION=when_required, if a server answers a range with the whole's checksum"
    return UsageError("the store cannot be used", got=f"{url}: {_reason(error)}", hint=hint)


def _reason(error: BaseException) -> str:
    text = first_line(error)
    name = type(error).__name__
    return text[:400] if text and isinstance(error, OSError) else f"{name}: {text[:400]}" if text else name
