"""Brings recordings elsewhere: their tensors into a format that others read, or what is left of them to a store."""

from __future__ import annotations

import contextlib
import logging
import zipfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from glassengine.errors import GlassError, UnknownNameError, UsageError
from glassengine.recording.formats.files import save_pt
from glassengine.recording.layout import layout
from glassengine.recording.layout.layout import Entry
from glassengine.recording.reader import Recording
from glassengine.recording.recovery import recovered
from glassengine.recording.ring import journal
from glassengine.recording.source import TensorSource, open_source
from glassengine.recording.write.destination import Spool, directory_of, upload_rest, uploaded
from glassengine.results.recorded import Uploaded
from glassengine.sites import matches, patterns_of
from glassengine.stores import objects
from glassengine.stores.places import RemotePath, delivered, place
from glassengine.writing import aside

if TYPE_CHECKING:
    from torch import Tensor

Format = Literal["pt", "npz", "debug-tree"]
FORMATS: tuple[Format, ...] = ("pt", "npz", "debug-tree")

_BY_SUFFIX: dict[str, Format] = {".pt": "pt", ".pth": "pt", ".npz": "npz"}
_IN_NUMPY = frozenset(
    {"bool", "complex64", "complex128", "float16", "float32", "float64"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)


def export(
    source: str | Path | TensorSource,
    path: str | Path,
    *,
    format: Format | None = None,
    sites: Sequence[str] | None = None,
    step: int | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Write the tensors of `source` to `path` in another format and return the files to look at.

    "pt": a dict of tensors by site for `torch.load(weights_only=True)`. "npz": the same for `numpy.load`; types that
    numpy lacks (bfloat16, float8) as float32. "debug-tree": the pair of JSON files of transformers' debugger, with one
    `.safetensors` file per tensor. Where `path` names no file and the format is "pt" or "npz", it becomes a directory
    of `step{i}.pt`, other ranks in `rank{r}/`.

    Args:
        source: A recording, a dump, or a file of tensors; or one that is open.
        path: A file that ends in `.pt`, `.pth` or `.npz` for one step and rank, or a directory.
        format: By the end of `path` when None; of a directory "debug-tree".
        sites: Patterns of the sites to write (globs and `re:`); all when None.
        step: Write only this one.
        overwrite: Replace files that exist.

    Raises:
        UnknownNameError: A pattern matches nothing.
        UsageError: The format is unknown, several steps do not fit into one file, there is nothing to write, or the
            files exist or cannot be written.
        CorruptError: The source is damaged.
    """
    opened = open_source(source) if isinstance(source, str | Path) else source
    target = place(path)
    if isinstance(target, RemotePath):
        with delivered(target, overwrite=overwrite) as aside_of_it:
            made = export(opened, aside_of_it, format=format, sites=sites, step=step, overwrite=True)
            return [target / file.relative_to(aside_of_it) for file in made]
    kind = format or _BY_SUFFIX.get(target.suffix.lower(), "debug-tree")
    if kind not in FORMATS:
        raise UsageError("unknown format", got=str(kind), expected=FORMATS)
    names = dict.fromkeys(entry.site for entry in opened.entries)
    wanted = names if sites is None else _matching(patterns_of(sites, "sites"), names)
    parts: dict[tuple[int, int], list[Entry]] = {}
    for entry in opened.entries:
        if entry.site in wanted and step in (None, entry.step):
            parts.setdefault((entry.step, entry.rank), []).append(entry)
    if not parts:
        steps = sorted({entry.step for entry in opened.entries if entry.site in wanted})
        raise UsageError("there is nothing to export", got=f"step {step} of {opened.path}", expected=f"steps {steps}")
    if kind == "debug-tree":
        return _export_tree(opened, [entry for part in parts.values() for entry in part], target, overwrite)
    if target.suffix.lower() in _BY_SUFFIX:
        if len(parts) > 1:
            raise UsageError(
                "a file holds one step of one rank",
                got=f"{len(parts)} of them in {opened.path}",
                hint=f"--step N, or a directory: --export {target.with_suffix('')} --export-format {kind}",
            )
        files = {target: next(iter(parts.values()))}
    else:
        folders = {rank: target / f"rank{rank}" if rank else target for _, rank in parts}
        files = {folders[rank] / f"step{number}.{kind}": part for (number, rank), part in parts.items()}
    _refuse(files, overwrite)
    for file, part in files.items():
        with _written_into(file.parent), aside(file) as temporary:
            _WRITERS[kind](temporary, opened, part)
    return list(files)


@contextlib.contextmanager
def _written_into(folder: Path) -> Iterator[None]:
    """Make a directory for what the block writes; where that fails, what was made and is empty goes again.

    Raises:
        UsageError: It cannot be written.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        for place in made:
            with contextlib.suppress(OSError):
                place.rmdir()
        if not isinstance(error, OSError):
            raise
        reason = error.strerror
        got = f"{getattr(error, 'filename', None) or folder}: {reason or error}"
        raise UsageError("cannot write the file", got=got, hint="free some space, or name another place") from error


def _matching(patterns: Sequence[str], names: Collection[str]) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if matches(pattern, name)}
        if not matched:
            raise UnknownNameError("site", pattern, names)
        found |= matched
    return found


def _export_tree(source: TensorSource, entries: list[Entry], folder: Path, overwrite: bool) -> list[Path]:
    name = str(source.metadata.get("class") or "Model").rpartition(".")[2]
    if folder.is_dir():
        _refuse([item for item in folder.iterdir() if item.name.startswith(f"{name}_debug_tree")], overwrite)
    from glassengine.recording.formats.debug_tree_writer import TreeWriter  # torch, which uploading does without

    environment = source.metadata.get("environment")
    versions = environment.get("versions") if isinstance(environment, dict) else None
    with _written_into(folder):
        return TreeWriter(folder, name, use_repr=False, versions=versions).write(source, entries)


def _refuse(files: Iterable[Path], overwrite: bool) -> None:
    existing = [file for file in files if file.exists()]
    if existing and not overwrite:
        raise UsageError("the file exists already", got=str(existing[0]), hint="replace it with --overwrite")


def _write_pt(path: Path, source: TensorSource, entries: list[Entry]) -> None:
    save_pt({entry.site: _compact(source.tensor(entry)) for entry in entries}, path)


def _compact(tensor: Tensor) -> Tensor:
    """Return a tensor whose storage is not larger than itself: torch saves whole storages."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _write_npz(path: Path, source: TensorSource, entries: list[Entry]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for entry in entries:
            if "\0" in entry.site or any("\ud800" <= char <= "\udfff" for char in entry.site):
                raise UsageError("a name cannot be one in an .npz file", got=repr(entry.site)[:200], hint="use .pt")
            tensor = source.tensor(entry)
            array: Any = (tensor if entry.dtype in _IN_NUMPY else tensor.float()).contiguous().numpy()
            with archive.open(f"{entry.site}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


_WRITERS = {"pt": _write_pt, "npz": _write_npz}


_log = logging.getLogger(__name__)


def upload(source: str | Path, target: str | Path | None = None) -> Uploaded:
    """Bring a recording of this machine to a store, or the rest of one that was being recorded there.

    What is there already is left as it is, `recording.json` is written last, and nothing is removed here but what
    waited for that store.

    Args:
        source: The URL of a recording whose process was killed on this machine; or a directory, with `target`.
        target: Where the recording in a directory goes: a URL that nothing is at.

    Raises:
        UsageError: Nothing waits for that place here, the process that records still runs, or the store cannot be used.
    """
    if target is not None:
        there, directory = place(target), place(source)
        if (
            not isinstance(there, RemotePath)
            or isinstance(directory, RemotePath)
            or not (directory / layout.MANIFEST).is_file()
        ):
            got = f"{source} to {target}"
            raise UsageError("a recording of this machine goes to a store", got=got, expected="DIR URL")
        if objects.listed(str(there)):
            raise UsageError("there is something already", got=str(there), hint="name a place that is empty")
        recovered(directory)
        return _uploaded(there, upload_rest(directory, there, lambda function: function()))
    there = place(source)
    if not isinstance(there, RemotePath) or not directory_of(there).exists():
        raise UsageError(
            "nothing waits here to be uploaded to that place",
            got=str(there),
            hint="a recording of this machine goes there by: glass upload DIR URL",
        )
    spool = Spool(there)
    try:
        _recover(spool.directory, spool.target)
        num_files = upload_rest(spool.directory, spool.target, lambda function: function())
    except BaseException:
        spool.close(remove=False)
        raise
    is_left = (spool.directory / layout.RING).exists()
    spool.close(remove=not is_left)
    if is_left:
        _log.warning("steps that only the ring in %s holds were not recovered", spool.directory)
    return _uploaded(spool.target, num_files)


def _uploaded(target: RemotePath, num_files: int) -> Uploaded:
    opened = Recording.open(target)
    return Uploaded(str(target), num_files, len(opened.steps), opened.complete)


def _recover(directory: Path, target: RemotePath) -> None:
    """Recover the steps that only the ring holds; bytes of theirs may be in shards that were uploaded."""
    if not (directory / layout.RING).exists():
        return
    try:
        for name in _shards_of_open_steps(directory) & uploaded(directory):
            aside = directory / f"{name}.fetched"
            objects.fetch(str(target / name), aside)
            aside.replace(directory / name)
    except (GlassError, OSError, ValueError) as error:
        _log.warning("shards that steps in the ring of %s need cannot be fetched: %s", directory, error)
    recovered(directory)


def _shards_of_open_steps(directory: Path) -> set[str]:
    moved = journal.read_evicted(directory)
    places = [journal.PLACE.unpack(said) for _, kind, said in moved if kind == journal.AT]
    return {layout.shard_name(shard, sealed=True) for shard, *_ in places if shard <= layout.MAX_SHARD_NUMBER}
