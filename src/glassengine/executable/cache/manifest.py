"""The manifest of a cache entry, written and read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from glassengine.errors import CorruptError
from glassengine.executable.cache.key import SCHEMA_VERSION, Parts
from glassengine.reading.documents import Size, parsed
from glassengine.reading.files import read_bytes, shown

_MAX_MANIFEST_BYTES = 4 << 20


@dataclass(frozen=True)
class Manifest:
    """What an entry is.

    Attributes:
        key: Digest of `parts`.
        name: Of the executable it was compiled for first.
        graph_hash: Of the captured graph.
        parts: Of the key.
        cause: Why it had to be compiled.
        compile_s: Seconds that took.
        files: Relative path -> (bytes, sha256).
    """

    key: str
    name: str
    graph_hash: str
    parts: Parts
    cause: str
    compile_s: float
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(size for size, _ in self.files.values())


class _File(msgspec.Struct):
    bytes: Size
    sha256: str


class _Document(msgspec.Struct):
    schema_version: int
    key: str
    name: str
    graph_hash: str
    cause: str
    compile_s: float
    parts: dict[str, dict[str, str]]
    files: dict[str, _File]
    checksum: str


def manifest_text(manifest: Manifest) -> str:
    """Return the text of the file `manifest.json`."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "key": manifest.key,
        "name": manifest.name,
        "graph_hash": manifest.graph_hash,
        "cause": manifest.cause,
        "compile_s": round(manifest.compile_s, 3),
        "parts": manifest.parts,
        "files": {name: {"bytes": size, "sha256": checksum} for name, (size, checksum) in manifest.files.items()},
    }
    return json.dumps(content | {"checksum": _checksum(content)}, indent=1)


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        CorruptError: It is damaged.
        FileNotFoundError: There is none.
    """
    what = f"the manifest of cache entry {path.parent.name}"
    path.lstat()
    try:
        data = read_bytes(path, most=_MAX_MANIFEST_BYTES, inside=path.parent.parent)
    except CorruptError:
        path.lstat()  # another process may have removed the entry meanwhile
        raise
    typed = parsed(data, _Document, path, what=what)
    content = parsed(data, dict[str, Any], path, what=what)
    found = content.pop("checksum", None)
    if found != _checksum(content):
        raise CorruptError(f"{what} is damaged", got="its checksum is wrong")
    if typed.schema_version != SCHEMA_VERSION:
        got = f"schema version {typed.schema_version}, this version reads {SCHEMA_VERSION}"
        raise CorruptError(f"{what} is damaged", got=got)
    if typed.key != path.parent.name:
        raise CorruptError(f"cache entry {path.parent.name} is of another key", got=shown(typed.key))
    if any(not name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts for name in typed.files):
        raise CorruptError(f"{what} is damaged", got="it names files outside of the entry")
    files = {name: (file.bytes, file.sha256) for name, file in typed.files.items()}
    return Manifest(typed.key, typed.name, typed.graph_hash, typed.parts, typed.cause, typed.compile_s, files)
