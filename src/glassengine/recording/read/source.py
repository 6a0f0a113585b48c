"""One protocol over everything that holds named tensors: recordings and foreign files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from glassengine.errors import UsageError, nearest
from glassengine.recording.formats.debugger_file import is_tree, open_tree, open_trees
from glassengine.recording.formats.dumper_folder import open_dumped
from glassengine.recording.formats.files import KINDS
from glassengine.recording.formats.json_file import JsonFile
from glassengine.recording.formats.npy_folder import NpyFolder, holds_arrays
from glassengine.recording.formats.probe_dump import is_dump, open_dump, open_dumps
from glassengine.recording.formats.run_results import RunResults, is_run_results
from glassengine.recording.formats.step_files import StepFiles, holds_step_files
from glassengine.recording.layout.layout import MANIFEST, Entry
from glassengine.recording.read.ranks import RankRecordings, rank_directories
from glassengine.recording.read.reader import Recording
from glassengine.results import Skipped


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


_OF_MODELS = "it is a model: glass sites MODEL lists its tensors, glass check MODEL --candidate OTHER compares two"


def open_source(path: str | Path) -> TensorSource:
    """Open a recording directory, a file or a directory of files that hold tensors.

    Files: `.pt`, `.pth`, `.safetensors`, `.npz`, `.npy`; `.json` of the debugger of transformers, of Polygraphy and of
    msprobe, told apart by what is in them. Directories: `rank{r}/` of recordings, `step{i}.pt`, `<name>-step<i>.npy`,
    and what these tools and the dumper of SGLang write.

    Raises:
        UsageError: It does not exist or is of no known kind.
        CorruptError: It is damaged, would run code, or is written by a newer version.
    """
    source = Path(path)
    if not source.exists():
        there = [item.name for item in source.parent.iterdir()] if source.parent.is_dir() else []
        close = nearest(source.name, there)
        raise UsageError("there is no such file", got=str(source), expected=close or None)
    if source.is_dir():
        return _open_directory(source)
    if source.suffix.lower() == ".json" and source.is_file():
        return _open_json(source)
    kind = KINDS.get(source.suffix.lower())
    # A pipe or a device would block, or never end.
    if kind is None or not source.is_file():
        what = "the kind of file is not known" if kind is None else "not a plain file"
        hint = _OF_MODELS if source.suffix.lower() in (".onnx", ".pt2") else None
        raise UsageError(what, got=str(source), expected=["a recording directory", *KINDS, ".json"], hint=hint)
    return open_dumped(source) or kind(source)


def _open_json(path: Path) -> TensorSource:
    file = JsonFile(path)
    if is_tree(file.document):
        return open_tree(file)
    if is_run_results(file.document):
        return RunResults(file)
    if is_dump(file.document):
        return open_dump(file)
    raise UsageError(
        "the JSON file holds no tensors that can be read",
        got=str(path),
        expected="a call tree of transformers (_FULL_TENSORS.json), RunResults of Polygraphy or a dump.json of msprobe",
    )


def _is_recorded(path: Path) -> bool:
    return (path / MANIFEST).is_file() or bool(rank_directories(path))


def _open_directory(path: Path) -> TensorSource:
    if (path / MANIFEST).exists():
        return Recording.open(path)
    if rank_directories(path):
        return RankRecordings(path)
    if (foreign := open_trees(path) or open_dumps(path) or open_dumped(path)) is not None:
        return foreign
    if holds_step_files(path):
        return StepFiles(path)
    if holds_arrays(path):
        return NpyFolder(path)
    there = sorted(item.name for item in path.iterdir())
    recordings = [item for item in sorted(path.iterdir()) if item.is_dir() and _is_recorded(item)]
    if len(recordings) == 1:  # what a recorded script that calls one model leaves
        return _open_directory(recordings[0])
    raise UsageError(
        "the directory holds no tensors that can be read",
        got=f"{path}: {', '.join(there[:5]) or 'nothing'}{', ...' if len(there) > 5 else ''}",
        expected=f"a recording ({MANIFEST}), step files (step0.pt, ...), arrays (<name>-step0.npy, ...) or a dump of "
        "transformers, msprobe or SGLang",
        hint=f"one of the recordings in it: {', '.join(map(str, recordings[:8]))}" if recordings else None,
    )
