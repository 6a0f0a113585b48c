"""One protocol over everything that holds named tensors: recordings and foreign files.

A foreign kind is a row of `FORMATS`, or an entry point of another package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from glassengine import asked
from glassengine.errors import CorruptError, GlassError, UsageError
from glassengine.plugins import FORMATS as REGISTERED
from glassengine.plugins import registered, remedy
from glassengine.reading.copies import here
from glassengine.recording.formats.debugger_file import is_tree, open_tree, open_trees
from glassengine.recording.formats.dumper_folder import open_dumped
from glassengine.recording.formats.files import KINDS
from glassengine.recording.formats.json_file import JsonFile
from glassengine.recording.formats.npy_folder import NpyFolder, holds_arrays
from glassengine.recording.formats.pass_folder import open_passes
from glassengine.recording.formats.probe_dump import is_dump, open_dump, open_dumps
from glassengine.recording.formats.run_results import RunResults, is_run_results
from glassengine.recording.formats.safetensors_object import SafetensorsObject
from glassengine.recording.formats.server_folder import open_server_folder
from glassengine.recording.formats.step_files import StepFiles, holds_step_files
from glassengine.recording.layout.layout import MANIFEST, Entry
from glassengine.recording.read.ranks import RankRecordings, rank_directories
from glassengine.recording.read.reader import Recording
from glassengine.results import Skipped
from glassengine.stores.places import Remote, place

if TYPE_CHECKING:
    from torch import Tensor


class TensorSource(Protocol):
    """Named tensors that can be read one at a time.

    In a foreign file every tensor has step 0, rank 0 and its key as site; in a directory of such files, the step and
    rank that the names of file and directory say.
    """

    @property
    def path(self) -> Path:
        """Where it is."""

    @property
    def metadata(self) -> dict[str, Any]:
        """What is known about it; empty in most foreign files."""

    @property
    def complete(self) -> bool:
        """Whether everything that was meant to be in it is."""

    @property
    def entries(self) -> Sequence[Entry]:
        """The tensors in recorded order."""

    @property
    def skipped(self) -> Sequence[Skipped]:
        """What is in it and is not given as a tensor, with the reason; `side` is "both" until a side is known."""

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`."""


@dataclass(frozen=True)
class Format:
    """A kind of file or directory that holds tensors.

    Attributes:
        expected: What it looks like, for who gave something else: "step files (step0.pt, ...)".
        opens: Returns the tensors of a path that exists, or None where it is of another kind.
        suffixes: Ends of the names of its files, in lower case; none for a kind of directory.
    """

    expected: str
    opens: Callable[[Path], TensorSource | None]
    suffixes: tuple[str, ...] = ()


def _step_files(path: Path) -> StepFiles | None:
    return StepFiles(path) if holds_step_files(path) else None


def _arrays(path: Path) -> NpyFolder | None:
    return NpyFolder(path) if holds_arrays(path) else None


def _json(path: Path) -> TensorSource | None:
    # Parsed once for the three: such a file may have gigabytes.
    file = JsonFile(path)
    if is_tree(file.document):
        return open_tree(file)
    if is_run_results(file.document):
        return RunResults(file)
    return open_dump(file) if is_dump(file.document) else None


_JSON = "a call tree of transformers (_FULL_TENSORS.json), RunResults of Polygraphy or a dump.json of msprobe"
FORMATS: tuple[Format, ...] = (
    Format("a dump of transformers", open_trees),
    Format("a dump of msprobe", open_dumps),
    Format("a dump of SGLang", open_dumped),
    Format("forwards of SGLang (TP0_PP0_Rank0_pid1/Pass00000.pt)", open_passes),
    Format("a folder of the plug-in in vLLM", open_server_folder),
    Format("step files (step0.pt, ...)", _step_files),
    Format("arrays (<name>-step0.npy, ...)", _arrays),
    Format("a dumped file of SGLang", open_dumped, (".pt",)),
    *(Format(suffix, kind, (suffix,)) for suffix, kind in KINDS.items()),
    Format(_JSON, _json, (".json",)),
)
"""The built-in kinds; the first that knows a path opens it. Those of other packages are asked before them."""

_OF_MODELS = "it is a model: glass sites MODEL lists its tensors, glass check MODEL --candidate OTHER compares two"


def open_source(path: str | Path) -> TensorSource:
    """Open a recording directory, a file or a directory of files that hold tensors.

    Files: `.pt`, `.pth`, `.safetensors`, `.npz`, `.npy`; `.json` of the debugger of transformers, of Polygraphy and of
    msprobe, distinguished by their content. Directories: `rank{r}/` of recordings, `step{i}.pt`, `<name>-step<i>.npy`,
    and what these tools and the dumper of SGLang write. What other packages register (`plugins.FORMATS`).

    Raises:
        UsageError: It does not exist or is of no known kind.
        CorruptError: It is damaged, would run code, or is written by a newer version.
    """
    source = place(str(asked.existing(str(path))))
    if source.is_dir():
        return _open_directory(source)
    suffix = source.suffix.lower()
    # A pipe or a device would block, or never end.
    if suffix not in file_suffixes() or not source.is_file():
        what = "not a plain file" if suffix in file_suffixes() else "the kind of file is not known"
        hint = _OF_MODELS if suffix in (".onnx", ".pt2") else None
        raise UsageError(what, got=str(source), expected=["a recording directory", *file_suffixes()], hint=hint)
    formats = [found for found in _formats() if suffix in found.suffixes]
    return _first(formats, source) or _unknown(
        f"the {suffix.removeprefix('.').upper()} file holds no tensors that can be read",
        got=str(path),
        expected=", ".join(found.expected for found in formats),
        hint="save tensors by name as .npz, .safetensors or .pt",
    )


def file_suffixes() -> tuple[str, ...]:
    """Return the ends of the names of all files that can be opened."""
    return tuple(dict.fromkeys(suffix for known in (*FORMATS, *_of_others()) for suffix in known.suffixes))


def _formats() -> list[Format]:
    return [*_of_others(), *FORMATS]


def _of_others() -> list[Format]:
    found = []
    for entry in registered(REGISTERED).values():
        try:
            found.append(entry.load())
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise UsageError(f"format {entry.name!r} cannot be imported", got=reason, hint=remedy(entry)) from error
    return found


class _Copied:
    """Tensors of a copy of what is in a store, which is what it is called after."""

    def __init__(self, path: Remote, copy: TensorSource) -> None:
        self.path = path
        self.metadata, self.complete = copy.metadata, copy.complete
        self.entries, self.skipped = copy.entries, copy.skipped
        self.tensor = copy.tensor


def _first(formats: Sequence[Format], path: Path) -> TensorSource | None:
    """Return what the first format that knows `path` makes of it."""
    if isinstance(path, Remote):
        if path.suffix.lower() == ".safetensors" and path.is_file():
            return SafetensorsObject(path)
        copy = _first(formats, here(path))
        return None if copy is None else _Copied(path, copy)
    for one in formats:
        try:
            found = one.opens(path)
        except (GlassError, OSError):
            raise
        except Exception as error:
            if one in FORMATS:
                raise  # a bug of ours, and reported as one
            got = f"{path}: {type(error).__name__}: {error}"
            raise CorruptError(f"the reader of {one.expected} has failed", got=got) from error
        if found is not None:
            return found
    return None


def _unknown(what: str, *, got: str, expected: str, hint: str | None = None) -> TensorSource:
    raise UsageError(what, got=got, expected=expected, hint=hint)


def _is_recorded(path: Path) -> bool:
    return (path / MANIFEST).is_file() or bool(rank_directories(path))


def _open_directory(path: Path) -> TensorSource:
    if (path / MANIFEST).exists():
        return Recording.open(path)
    if rank_directories(path):
        return RankRecordings(path)
    recordings = [item for item in sorted(path.iterdir()) if item.is_dir() and _is_recorded(item)]
    is_large = recordings and isinstance(path, Remote)  # of recordings no copies are made
    formats = [found for found in _formats() if not found.suffixes and not is_large]
    if (foreign := _first(formats, path)) is not None:
        return foreign
    there = sorted(item.name for item in path.iterdir())
    if len(recordings) == 1:  # what a recorded script that calls one model leaves
        return _open_directory(recordings[0])
    return _unknown(
        "the directory holds no tensors that can be read",
        got=f"{path}: {', '.join(there[:5]) or 'nothing'}{', ...' if len(there) > 5 else ''}",
        expected=", ".join([f"a recording ({MANIFEST})", *(found.expected for found in formats)]),
        hint=f"one of the recordings in it: {', '.join(map(str, recordings[:8]))}" if recordings else None,
    )
