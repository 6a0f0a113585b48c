"""Stores the products of a compiler, one directory per graph, by a key of everything that compiled code depends on.

    <key>/manifest.json   parts of the key, cause of the compilation, digest of the files
    <key>/files/          the compiler's own files, in its own format
    <key>/uses            one byte per hit; its time is that of the last use

Loading these files runs their code. So the directory must belong to the user alone, and the compiler reads a checked
copy of the files.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from glassengine import environment
from glassengine.errors import CorruptError, UsageError, shortened
from glassengine.executable.graph import CapturedGraph
from glassengine.reading.documents import Size, read_document
from glassengine.reading.files import open_regular, require_directory, shown
from glassengine.writing import append, local, private_directory, remove_tree, untrusted

Parts = Mapping[str, Mapping[str, str]]
"""Part ("inputs", "versions", ...) -> name within it -> value, all as text."""

SCHEMA_VERSION = 2  # of the parts, and of the entries that keep them
_READABLE = 300  # characters of a graph that are kept as they are
_LONG = 60  # characters of a value above which only the words that differ are shown


def key_parts(graph: CapturedGraph, compiler: Parts) -> Parts:
    """Return everything that the compiled code of `graph` depends on.

    Operations and inputs are parts of their own: most misses are another input. `compiler` has those of the back-
    end.
    """
    operations = [line.partition(" = ")[2] for line in graph.lines if " = input " not in line]
    return {
        "graph": {
            "calls": _short(line.partition("(")[0] for line in operations),
            "arguments": _short(line[len(line.partition("(")[0]) :] for line in operations),
        },
        "inputs": {str(index): str(spec).removesuffix(" requires_grad") for index, spec in enumerate(graph.inputs)},
        **compiler,
        **surroundings(),
        "settings": {
            "threads": str(torch.get_num_threads()),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        },
    }


def _short(texts: Iterable[str]) -> str:
    """Return short texts as they are, as for a single operation, and a hash of longer ones."""
    text = " ".join(texts)
    return text if len(text) <= _READABLE else hashlib.sha256(text.encode()).hexdigest()[:32]


def surroundings() -> Parts:
    """Return the parts that are the same for every graph of every process on this machine: versions, devices."""
    versions = environment.versions()
    return {
        # Another build of the same version of torch has another label or commit.
        "versions": {
            "cache": str(SCHEMA_VERSION),
            "torch": f"{torch.__version__} {torch.version.git_version or ''}".strip(),
            "glassengine": str(versions["glassengine"]),
            "python": str(versions["python"]),
        },
        "processor": {
            "capability": torch.backends.cpu.get_cpu_capability(),
            "flags": " ".join(sorted(environment.cpu_flags())),
        },
        "accelerator": {
            "name": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
            "cuda": torch.version.cuda or "",
        },
    }


def digest(parts: Parts) -> str:
    """Return the key of `parts`: 40 hexadecimal digits."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:40]


@dataclass(frozen=True)
class KeyDifference:
    """One value that differs: `stored` in the nearest entry, `wanted` now; "" where it is absent."""

    part: str
    name: str
    stored: str
    wanted: str

    def __str__(self) -> str:
        stored, wanted = self.stored or "none", self.wanted or "none"
        if max(len(stored), len(wanted)) > _LONG:
            before, now = self.stored.split(), self.wanted.split()
            words = [f"-{word}" for word in before if word not in now] + [
                f"+{word}" for word in now if word not in before
            ]
            return f"{self.part}.{self.name}: {' '.join(words)}"
        return f"{self.part}.{self.name}: {stored} -> {wanted}"


def differences(stored: Parts, wanted: Parts) -> list[KeyDifference]:
    """Return every value that differs between two sets of parts, in the order of `wanted`."""
    found = []
    for part in dict.fromkeys([*wanted, *stored]):
        before, now = stored.get(part, {}), wanted.get(part, {})
        found += [
            KeyDifference(part, name, before.get(name, ""), now.get(name, ""))
            for name in dict.fromkeys([*now, *before])
            if before.get(name) != now.get(name)
        ]
    return found


def explain_miss(wanted: Parts, stored: Iterable[tuple[str, Parts]]) -> str:
    """Return why no entry has the key of `wanted`: the difference to the nearest entry.

    `stored` are (name, parts) of every entry.
    """
    candidates = [(differences(parts, wanted), name) for name, parts in stored]
    if not candidates:
        return "nothing is stored yet"
    found, name = min(candidates, key=lambda one: (_has_other_calls(one[0]), len(one[0])))
    if not _has_other_calls(found):
        return f"{shortened(found, 4, joint='; ')} (nearest: {name})"
    rest = [difference for difference in found if difference.part not in ("graph", "inputs")]
    also = f"; compiled otherwise, too: {shortened(rest, 4, joint='; ')}" if rest else ""
    return f"no entry has these operations{also}"


def _has_other_calls(found: Iterable[KeyDifference]) -> bool:
    return any(difference.name == "calls" for difference in found)


_MANIFEST, _FILES, _USES = "manifest.json", "files", "uses"
_MAX_MANIFEST_BYTES = 4 << 20
_CHUNK = 1 << 20
_ABANDONED_S = 3600.0  # age above which the unfinished entry of a killed process is removed
_KEY = re.compile(r"[0-9a-f]{40}")
_TRIES = 3  # another process may replace an entry meanwhile
_serial = itertools.count()


class CacheManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Describes one entry.

    Attributes:
        key: Digest of `parts`.
        name: Of the executable it was compiled for first.
        graph_hash: Of the captured graph.
        parts: Of the key.
        cause: Why it was compiled.
        compile_s: Seconds of the compilation.
        num_bytes: Of all files.
        content: SHA-256 of their names and bytes.
        schema_version: Of this document.
    """

    key: str
    name: str
    graph_hash: str
    parts: dict[str, dict[str, str]]
    cause: str
    compile_s: float
    num_bytes: Size = 0
    content: str = ""
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class CacheEntry:
    """A stored entry: its manifest, its hits, and its last use in seconds since the epoch."""

    manifest: CacheManifest
    num_hits: int
    last_used: float


class Store:
    """The entries of one directory.

    The directory is created with access for its owner only.

    Raises:
        UsageError: Another user owns the directory or can write to it.
        OSError: It can neither be read nor created.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.check()

    def check(self) -> None:
        """Create the directory if need be, and refuse one that is not the user's alone; raises as `Store`."""
        local(self.root)
        private_directory(self.root)
        if problem := untrusted(self.root.stat()):
            raise UsageError(
                f"the cache of compiled graphs {self.root} cannot be trusted",
                got=problem,
                expected="a directory of your own, mode 0700: its files are run",
                hint="chmod 700, or another directory: GLASS_CACHE_DIR",
            )

    def fetch(self, key: str, target: Path) -> bool:
        """Copy the files of an entry into the empty directory `target`; False if there is no entry.

        Raises:
            CorruptError: The entry is damaged.
        """
        entry = self.root / key
        for _ in range(_TRIES):
            try:
                manifest = _read_manifest(entry)
                require_directory(entry / _FILES)
                if _copied(entry / _FILES, target) != (manifest.content, manifest.num_bytes):
                    raise CorruptError(f"files of cache entry {key} are damaged")
            except (CorruptError, OSError) as error:
                for path in target.iterdir():
                    remove_tree(path) if path.is_dir() else path.unlink()
                if not (entry / _MANIFEST).exists() and not (entry / _FILES).exists():
                    return False
                damage = error
                continue
            with contextlib.suppress(OSError):
                append(entry / _USES, b".")
            return True
        raise damage if isinstance(damage, CorruptError) else CorruptError(f"cache entry {key} is damaged: {damage}")

    def put(self, manifest: CacheManifest, source: Path) -> None:
        """Store the files of `source`; an entry of the same key is replaced.

        Raises:
            OSError: The disk is full, or the directory cannot be written; nothing is left behind.
        """
        self._remove_abandoned()
        aside = self._aside()
        try:
            content, num_bytes = _copied(source, aside / _FILES)
            manifest = msgspec.structs.replace(manifest, content=content, num_bytes=num_bytes)
            (aside / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
            for _ in range(_TRIES):
                try:
                    aside.rename(self.root / manifest.key)
                    break
                except OSError:
                    if not (self.root / manifest.key).exists():
                        raise
                    self.remove(manifest.key)
        finally:
            remove_tree(aside)

    def remove(self, key: str) -> None:
        """Remove an entry if possible; for a process that reads it, it vanishes as a whole."""
        aside = self._aside()
        with contextlib.suppress(OSError):
            (self.root / key).rename(aside)
        remove_tree(aside)

    def damaged(self) -> dict[str, str]:
        """Return key -> problem of entries whose manifest cannot be read; the next lookup removes them."""
        return {key: str(found) for key, found in self._manifests() if not isinstance(found, CacheManifest)}

    def entries(self) -> Iterator[CacheEntry]:
        """Yield every entry whose manifest can be read."""
        for key, manifest in self._manifests():
            if isinstance(manifest, CacheManifest):
                with contextlib.suppress(OSError):
                    uses = self.root / key / _USES
                    status = uses.stat() if uses.exists() else None
                    made = (self.root / key / _MANIFEST).stat().st_mtime
                    yield CacheEntry(manifest, status.st_size if status else 0, status.st_mtime if status else made)

    def shrink(self, max_bytes: int) -> list[CacheEntry]:
        """Remove the least recently used entries until the rest is within `max_bytes`, and return them."""
        entries = sorted(self.entries(), key=lambda entry: entry.last_used)
        total = sum(entry.manifest.num_bytes for entry in entries)
        removed = []
        while entries and total > max_bytes:
            removed.append(entries.pop(0))
            self.remove(removed[-1].manifest.key)
            total -= removed[-1].manifest.num_bytes
        return removed

    def _manifests(self) -> Iterator[tuple[str, CacheManifest | Exception]]:
        for path in sorted(self.root.iterdir()):
            if _KEY.fullmatch(path.name):
                try:
                    yield path.name, _known_manifest(path, (path / _MANIFEST).stat().st_mtime_ns)
                except (OSError, CorruptError) as error:
                    yield path.name, error

    def _aside(self) -> Path:
        return self.root / f".{os.getpid()}-{next(_serial)}-{time.time_ns():x}"

    def _remove_abandoned(self) -> None:
        for path in self.root.glob(".*-*-*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    remove_tree(path)


def _read_manifest(entry: Path) -> CacheManifest:
    what = f"the manifest of cache entry {entry.name}"
    most = _MAX_MANIFEST_BYTES
    found = read_document(
        entry / _MANIFEST, CacheManifest, most=most, inside=entry.parent, what=what, version=SCHEMA_VERSION
    )
    if found.key != entry.name or digest(found.parts) != entry.name:
        raise CorruptError(f"cache entry {entry.name} is of another key", got=shown(found.key))
    return found


@functools.lru_cache(maxsize=4096)
def _known_manifest(entry: Path, changed_ns: int) -> CacheManifest:
    return _read_manifest(entry)


def _copied(source: Path, target: Path) -> tuple[str, int]:
    """Copy all files but links and the compiler's locks; return the digest of their names and bytes, and their size.

    Raises:
        CorruptError: There is a pipe, for one.
        OSError: A file cannot be written, or is gone.
    """
    digest, num_bytes = hashlib.sha256(), 0
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in sorted(source.rglob("*")):
        if path.is_symlink() or path.is_dir() or path.suffix == ".lock":
            continue
        name = path.relative_to(source)
        digest.update(f"{name.as_posix()}\0".encode())
        (target / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open_regular(path, inside=source) as file, (target / name).open("wb") as copy:
            while chunk := file.read(_CHUNK):
                num_bytes += copy.write(chunk)
                digest.update(chunk)
    return digest.hexdigest(), num_bytes
