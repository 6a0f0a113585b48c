"""One protocol over everything that holds named tensors: recordings and foreign files.

A foreign kind is a row of `FORMATS`, or an entry point of another package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from glassengine import asked
from glassengine.blocks.arrays import ArrayValues
from glassengine.errors import CorruptError, GlassError, UnknownNameError, UsageError
from glassengine.extensions import FORMATS as REGISTERED
from glassengine.extensions import registered, remedy
from glassengine.reading.copies import here
from glassengine.recording.formats.debug_tree import is_tree, open_tree, open_trees
from glassengine.recording.formats.files import KINDS, SafetensorsObject
from glassengine.recording.formats.folders import (
    NpyFolder,
    StepFolder,
    holds_arrays,
    holds_step_files,
    open_dumped,
    open_passes,
    open_server_folder,
)
from glassengine.recording.formats.json_files import (
    JsonFile,
    ProbeDump,
    RunResults,
    is_probe_dump,
    is_run_results,
    open_probe_dumps,
)
from glassengine.recording.layout.entries import Entries, LeftOuts, Mapped
from glassengine.recording.layout.layout import MANIFEST, Entry, LeftOut
from glassengine.recording.layout.noise_floor import NoiseFloor
from glassengine.recording.reader import Recording, Shown
from glassengine.results import Skipped, Summary
from glassengine.sites import matches
from glassengine.stores.places import RemotePath, place

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
class SourceFormat:
    """A kind of file or directory that holds tensors.

    Attributes:
        expected: What it looks like, for who gave something else: "step files (step0.pt, ...)".
        opens: Returns the tensors of a path that exists, or None where it is of another kind.
        suffixes: Ends of the names of its files, in lower case; none for a kind of directory.
    """

    expected: str
    opens: Callable[[Path], TensorSource | None]
    suffixes: tuple[str, ...] = ()


def _json(path: Path) -> TensorSource | None:
    # Parsed once for the three: such a file may have gigabytes.
    file = JsonFile(path)
    if is_tree(file.document):
        return open_tree(file)
    if is_run_results(file.document):
        return RunResults(file)
    return ProbeDump(file.path, [(file, 0, 0)]) if is_probe_dump(file.document) else None


_JSON = "a call tree of transformers (_FULL_TENSORS.json), RunResults of Polygraphy or a dump.json of msprobe"
FORMATS: tuple[SourceFormat, ...] = (
    SourceFormat("a dump of transformers", open_trees),
    SourceFormat("a dump of msprobe", open_probe_dumps),
    SourceFormat("a dump of SGLang", open_dumped),
    SourceFormat("forwards of SGLang (TP0_PP0_Rank0_pid1/Pass00000.pt)", open_passes),
    SourceFormat("a folder of the plug-in in vLLM", open_server_folder),
    SourceFormat("step files (step0.pt, ...)", lambda path: StepFolder(path) if holds_step_files(path) else None),
    SourceFormat("arrays (<name>-step0.npy, ...)", lambda path: NpyFolder(path) if holds_arrays(path) else None),
    SourceFormat("a dumped file of SGLang", open_dumped, (".pt",)),
    *(SourceFormat(suffix, kind, (suffix,)) for suffix, kind in KINDS.items()),
    SourceFormat(_JSON, _json, (".json",)),
)
"""The built-in kinds; the first that knows a path opens it. Those of other packages are asked before them."""

_OF_MODELS = "it is a model: glass sites MODEL lists its tensors, glass check MODEL --candidate OTHER compares two"


def open_source(path: str | Path) -> TensorSource:
    """Open a recording directory, a file or a directory of files that hold tensors.

    Files: `.pt`, `.pth`, `.safetensors`, `.npz`, `.npy`; `.json` of the debugger of transformers, of Polygraphy and of
    msprobe, distinguished by their content. Directories: `rank{r}/` of recordings, `step{i}.pt`, `<name>-step<i>.npy`,
    and what these tools and the dumper of SGLang write. What other packages register (`extensions.FORMATS`).

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


def _formats() -> list[SourceFormat]:
    return [*_of_others(), *FORMATS]


def _of_others() -> list[SourceFormat]:
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

    def __init__(self, path: RemotePath, copy: TensorSource) -> None:
        self.path = path
        self.metadata, self.complete = copy.metadata, copy.complete
        self.entries, self.skipped = copy.entries, copy.skipped
        self.tensor = copy.tensor


def _first(formats: Sequence[SourceFormat], path: Path) -> TensorSource | None:
    """Return what the first format that knows `path` makes of it."""
    if isinstance(path, RemotePath):
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
    is_large = recordings and isinstance(path, RemotePath)  # of recordings no copies are made
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


_REQUESTS = 8
_RANK = re.compile(r"rank(\d{1,9})")
_STAGE = re.compile(r"stage(\d{1,5})")


class RankRecordings:
    """Tensors of the recordings `rank0/`, `rank1/`, ... in one directory.

    Attributes:
        path: The directory.
        metadata: That of the first rank; "token_ids" are the rows of all ranks, once of ranks that have the same, and
            "num_ranks" is how many recordings there are.
        complete: Whether each of them is, and none is missing from the first to the last.
        entries: The tensors in order of step and rank.
        left_out: What was seen and has no values.
        skipped: The same in the words of a comparison.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        directories = dict(sorted(rank_directories(path)))
        # In a store each of them is several requests; on a disk more threads would only wait for each other.
        with ThreadPoolExecutor(_REQUESTS if isinstance(path, RemotePath) else 1) as pool:
            self._recordings = dict(zip(directories, pool.map(Recording.open, directories.values()), strict=True))
        each = list(self._recordings.values())
        self.metadata: dict[str, Any] = {**each[0].metadata, "num_ranks": len(each)}
        rows = [recording.metadata.get("token_ids") for recording in each]
        # Ranks that split a batch have rows of their own; those that share the work on a row have the same.
        if all(isinstance(of_rank, list) for of_rank in rows) and any(of_rank != rows[0] for of_rank in rows):
            distinct = [of_rank for i, of_rank in enumerate(rows) if of_rank not in rows[:i]]
            self.metadata["token_ids"] = [row for of_rank in distinct for row in of_rank or ()]
        is_gapless = list(self._recordings) == list(range(len(each)))
        self.complete = is_gapless and all(recording.complete for recording in each)
        # A recording may have been made as rank 0 of a run that its process knew nothing about.
        self.entries = Entries.of_ranks({rank: recording.entries for rank, recording in self._recordings.items()})
        self.left_out = LeftOuts.of_ranks({rank: recording.left_out for rank, recording in self._recordings.items()})
        self.skipped: Sequence[Skipped] = Mapped(_skipped, self.left_out)

    def noise_floor(self) -> NoiseFloor | None:
        """Return the noise floors of all ranks; None where a rank has none."""
        floors = {rank: recording.noise_floor() for rank, recording in self._recordings.items()}
        known = {rank: floor for rank, floor in floors.items() if floor is not None}
        return NoiseFloor.of_ranks(known) if len(known) == len(floors) else None

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`."""
        return self._recordings[entry.rank].tensor(entry)

    def read_values(self, entry: Entry) -> ArrayValues:
        """Return the values of one of `entries`; see `Recording.read_values`."""
        return self._recordings[entry.rank].read_values(entry)

    def read_rows(self, entry: Entry, first: int, end: int) -> tuple[ArrayValues, int]:
        """Return some rows of one of `entries`; see `Recording.read_rows`."""
        return self._recordings[entry.rank].read_rows(entry, first, end)


def _skipped(item: LeftOut) -> Skipped:
    return Skipped(item.site, "both", f"{item.reason} (rank {item.rank})", item.step)


def rank_directories(path: Path) -> list[tuple[int, Path]]:
    """Return rank and directory of the recordings `rank<r>/` in `path`.

    Those of `stage<s>/rank<r>/`, where a rank has several stages of a pipeline, are numbered one after another.
    """
    own = _of_ranks(path)
    stages = {} if own else {int(found[1]): item for item in path.iterdir() if (found := _STAGE.fullmatch(item.name))}
    number = 0
    for stage in range(max(stages, default=-1) + 1):
        there = sorted(_of_ranks(stages[stage])) if stage in stages else []
        own += [(number + place, directory) for place, (_, directory) in enumerate(there)]
        number += max(1, len(there))  # one that is missing leaves a gap
    return own


def _of_ranks(path: Path) -> list[tuple[int, Path]]:
    numbered = [(int(found[1]), item) for item in path.iterdir() if (found := _RANK.fullmatch(item.name))]
    with ThreadPoolExecutor(_REQUESTS if isinstance(path, RemotePath) else 1) as pool:
        are_there = list(pool.map(lambda item: (item[1] / MANIFEST).is_file(), numbered))
    return [item for item, is_there in zip(numbered, are_there, strict=True) if is_there]


class Dump(Shown):
    """Tensors that are not in one recording, for reading; made by `glassengine.open`.

    Attributes:
        path: Where they are.
        metadata: What is known about them; empty in most foreign files.
        complete: Whether everything that was meant to be there is.
        incomplete_because: Why not, else None.
        steps: The steps that have tensors, ascending.
        entries: The tensors, in recorded order within ascending steps.
        left_out: What is there, or was seen, and has no values that can be read.
        stopped: Empty: no dump has it.
    """

    def __init__(self, source: TensorSource) -> None:
        self.path = source.path
        self.metadata = source.metadata
        self.complete = source.complete
        self.incomplete_because = None if source.complete else "a rank is missing, or its recording is incomplete"
        self.entries = source.entries
        self.left_out = (
            source.left_out
            if isinstance(source, RankRecordings)
            else tuple(LeftOut(item.site, item.step or 0, 0, item.reason) for item in source.skipped)
        )
        self.steps = sorted({entry.step for entry in self.entries} | {item.step for item in self.left_out})
        self.stopped: dict[int, str] = {}
        self._source = source

    def find(self, pattern: str) -> tuple[list[Entry], list[LeftOut]]:
        """Return the tensors, and those without values, whose name matches `pattern`.

        Raises:
            UnknownNameError: Nothing matches.
        """
        entries = [entry for entry in self.entries if matches(pattern, entry.site)]
        left_out = [item for item in self.left_out if matches(pattern, item.site)]
        if not entries and not left_out:
            raise UnknownNameError("site", pattern, [entry.site for entry in self.entries])
        return entries, left_out

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`.

        Raises:
            CorruptError: They are damaged.
        """
        return self._source.tensor(entry)

    def summary(self, entry: Entry) -> Summary:
        """Return the statistics of one of `entries`, computed each time."""
        from glassengine.recording.layout.tensors import summarize

        return summarize(self.tensor(entry))


def open(path: str | Path) -> Recording | Dump:
    """Open a recording, or anything else that `compare` reads: recordings of several ranks, dumps, files of tensors.

    Raises:
        UsageError: It does not exist or is of no known kind.
        CorruptError: It is damaged, would run code, or is written by a newer version.
    """
    there = place(path)
    if (there / MANIFEST).exists():
        return Recording.open(there)
    return Dump(open_source(there))
