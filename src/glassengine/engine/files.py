"""Files of an engine: listed and hashed, written aside then renamed; weights with shared tensors stored once."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import io
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from glassengine.engine.manifest import FILE, REBUILD, FileEntry, Manifest
from glassengine.errors import CorruptError, GlassError, UsageError
from glassengine.reading.documents import parsed
from glassengine.reading.files import open_regular, require_directory, shown
from glassengine.reading.tensors import open_safetensors, read_safetensors
from glassengine.stores.places import RemotePath, delivered
from glassengine.writing import exchange, remove_tree, save_safetensors

WEIGHTS = "weights.safetensors"
MAIN = "main"
"""Folder of the back-end's files."""
ENCODER = "encoder"
"""Folder of the engine of an encoder, whose results the engine around it decodes with."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
)


PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
"""What a model of images and text reads images with."""

Loaded = TypeVar("Loaded")
HASHED_AT_LOAD_BYTES = 16 << 20
"""Files up to this size are hashed at every load, larger ones only when asked to verify."""


def require_own_folders(engine: Path) -> None:
    """Refuse links instead of folders of an engine: their targets are not part of it.

    Raises:
        CorruptError: Names the folder.
    """
    for folder in (engine / MAIN, engine / ENCODER):
        if os.path.lexists(folder):
            require_directory(folder)


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse a target that exists, before any work is done.

    Raises:
        UsageError: It exists and `overwrite` is false, it holds something else than an engine, or it lies under a file.
    """
    if isinstance(target, RemotePath):
        _check_stored(target, overwrite=overwrite)
        return
    above = next(path for path in target.absolute().parents if path.exists())
    if not above.is_dir():
        raise UsageError(
            "cannot write the engine", got=f"{above} is not a directory", hint="name another directory: -o DIRECTORY"
        )
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.is_dir() and (target / FILE).is_file():
        if not overwrite:
            raise UsageError("the engine exists already", got=str(target), hint="replace it with --overwrite")
    elif target.exists() or target.is_symlink():
        raise UsageError(
            "the output directory holds other files", got=str(target), hint="name a new or empty directory"
        )


def _check_stored(target: RemotePath, *, overwrite: bool) -> None:
    there = [item.name for item in target.iterdir()]
    if there and FILE not in there:
        raise UsageError("the output directory holds other files", got=str(target), hint="name a new or empty one")
    if there and not overwrite:
        raise UsageError("the engine exists already", got=str(target), hint="replace it with --overwrite")


@contextlib.contextmanager
def written_aside(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a new directory beside `target` that takes its place when the block ends well, and vanishes otherwise.

    SIGTERM ends the block as Ctrl-C does, so that nothing is left behind.

    Raises:
        UsageError: The target exists, or the disk is full or cannot be written.
    """
    target = target.absolute()
    check_target(target, overwrite=overwrite)
    if isinstance(target, RemotePath):
        with delivered(target, last=FILE, replace=overwrite) as here, written_aside(here, overwrite=False) as aside:
            yield aside
        return
    aside = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        with _sigterm_interrupts():
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                _remove_stale(target)
                aside.mkdir()
                yield aside
                _replace(aside, target, overwrite=overwrite)
            finally:
                remove_tree(aside)
    except OSError as error:
        raise UsageError(
            "cannot write the engine",
            got=f"{error.strerror or error} ({error.filename or target})",
            hint="name a directory on a disk that is writable and has room: -o DIRECTORY",
        ) from error


def _replace(aside: Path, target: Path, *, overwrite: bool) -> None:
    """Move a directory to its place, replacing an older one; other builds may do the same.

    Where the system can, the two change places in one step, so that there is an engine at any moment; else there is a
    moment without one, and a disk that refuses every rename from then on leaves the old one aside.
    """
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    while True:
        if overwrite:
            with contextlib.suppress(FileNotFoundError):
                if exchange(aside, target):
                    remove_tree(aside)
                    return
                target.rename(old)
        try:
            aside.rename(target)  # onto nothing, or an empty directory
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                # Another build was faster. Its engine is replaced in its turn, or left alone.
                check_target(target, overwrite=overwrite)
                remove_tree(old)
                continue
            _put_back(old, target)
            raise
        except BaseException:
            _put_back(old, target)
            raise
        remove_tree(old)
        return


def load_unless_replaced(target: Path, made: int, read: Callable[[], Loaded]) -> Loaded:
    """Return what `read` makes of an engine that was just built, unless another build has replaced it.

    `made` is the inode of its directory.

    Raises:
        UsageError: It is another one by now, and cannot be read.
    """
    try:
        return read()
    except GlassError as error:
        if target.is_dir() and target.stat().st_ino == made:
            raise
        what = "another build has replaced the engine before it could be loaded"
        hint = "build one after another, or each into a directory of its own"
        raise UsageError(what, got=str(target), hint=hint) from error


def _put_back(old: Path, target: Path) -> None:
    if old.exists() and not target.exists():
        old.rename(target)


def _remove_stale(target: Path) -> None:
    """Remove what killed builds of the same engine left: their process is gone.

    One that was killed while it replaced the engine has put it aside: it takes its place again.
    """
    for kind in ("old", "partial"):
        for path in target.parent.glob(f".{glob.escape(target.name)}.{kind}-*"):
            pid = path.name.rpartition("-")[2]
            if pid.isdecimal() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
                if kind == "old":
                    _put_back(path, target)
                remove_tree(path)


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, where this thread may install handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def save_weights(weights: Mapping[str, torch.Tensor], path: Path, *, same: Path | None = None) -> None:
    """Write tensors by name; tensors that are the same memory are stored once and loaded shared.

    Args:
        weights: The tensors.
        path: New file.
        same: File that has these tensors already, and that lives as long as the new one.
    """
    if same is not None:
        with contextlib.suppress(OSError):  # another file system, or one without links
            os.link(same, path)
            return
    first: dict[Any, str] = {}
    shared: dict[str, str] = {}
    kept: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in weights.items():
        tensor = tensor.detach()
        identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and identity in first:
            shared[name] = first[identity]
            continue
        first[identity] = name
        storage = tensor.untyped_storage()
        # Parts of one storage (a fused weight, a view) are written one by one.
        if storage.data_ptr() in storages or storage.nbytes() != tensor.nbytes or not tensor.is_contiguous():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        storages.add(storage.data_ptr())
        kept[name] = tensor
    save_safetensors(kept, path, {"shared": json.dumps(shared)})


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Map what `save_weights` wrote into memory.

    Raises:
        CorruptError: The file is damaged.
    """
    with open_safetensors(path, inside=path.parent) as file:
        text = (file.metadata() or {}).get("shared", "{}")
    shared = parsed(text, dict[str, str], path, what="the list of tensors that are stored once")
    weights = _shared(path, read_safetensors(path, inside=path.parent))
    missing = [original for original in shared.values() if original not in weights]
    if missing:
        raise CorruptError(f"{path.name} lacks a tensor that others share", got=shown(missing[0]))
    return weights | {name: weights[original] for name, original in shared.items()}


_mapped: WeakValueDictionary[tuple[object, ...], torch.Tensor] = WeakValueDictionary()
"""Tensors of files with several names, which are mapped once."""


def _shared(path: Path, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file; those that another name of the file has in memory already, where it has one."""
    found = path.stat()
    file = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    if found.st_nlink > 1:
        return {name: _mapped.setdefault((*file, name), tensor) for name, tensor in weights.items()}
    _mapped.update({(*file, name): tensor for name, tensor in weights.items()})
    return weights


def copy_model_files(module: torch.nn.Module, source: str | None, revision: str | None, directory: Path) -> bool:
    """Write configuration, tokenizer and processor of a Hugging Face model; return whether there is a tokenizer.

    `source` is the directory or hub id that it was loaded from; configurations are written as they are in memory.
    """
    for attribute in ("config", "generation_config"):
        config: Any = getattr(module, attribute, None)
        if hasattr(config, "to_json_file"):
            config.to_json_file(directory / f"{attribute}.json", use_diff=True)
    if source is None:
        return False
    from transformers.utils import cached_file

    for name in (*TOKENIZER_FILES, *PROCESSOR_FILES):
        found = cached_file(
            source,
            name,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if found is not None:
            shutil.copyfile(found, directory / name)
    return any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"))


def list_files(directory: Path) -> tuple[FileEntry, ...]:
    """Return every file below `directory` except the manifest, with size and hash, sorted by path."""
    found = []
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != FILE:
            relative = path.relative_to(directory).as_posix()
            found.append(FileEntry(relative, path.stat().st_size, hash_file(path)))
    return tuple(found)


def check_files(manifest: Manifest, directory: Path, *, verify: bool, always: Iterable[str] = ()) -> None:
    """Refuse an engine whose files are missing or changed.

    `verify` hashes files of every size, `always` those with such a prefix, else only small ones are hashed.

    Raises:
        CorruptError: Names the file and what is wrong with it.
    """
    for entry in manifest.files:
        problem = None
        try:
            with open_regular(directory / entry.path, inside=directory) as file:
                size = os.fstat(file.fileno()).st_size
                if size != entry.size:
                    problem = f"{size:,} bytes instead of {entry.size:,}"
                elif verify or size <= HASHED_AT_LOAD_BYTES or entry.path.startswith(tuple(always)):
                    problem = None if _hash(file) == entry.sha256 else "another checksum"
        except CorruptError as error:
            is_missing = not os.path.lexists(directory / entry.path.replace("\0", ""))
            problem = "it is missing" if is_missing else error.what
        except OSError as error:
            problem = str(error.strerror)
        if problem:
            raise CorruptError(f"the engine {manifest.name!r} is damaged", got=f"{entry.path}: {problem}", hint=REBUILD)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, read in pieces."""
    with open_regular(path, inside=path.parent) as file:
        return _hash(file)


def _hash(file: io.BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()
