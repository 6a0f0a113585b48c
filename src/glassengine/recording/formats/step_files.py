"""A directory of one file per step, `step{i}.pt`, as Ditto and `glass run --debug-format pt` write it.

Subdirectories `rank{r}/` hold the steps of the other ranks. One file at a time is open. What an earlier run left in
`earlier-NNN/` and texts that accompany a step (`step{i}.txt`) are passed over; everything else is listed as skipped.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassengine.errors import CorruptError
from glassengine.recording.formats.files import KINDS, TensorFile
from glassengine.recording.layout.layout import Entry
from glassengine.results import Skipped

if TYPE_CHECKING:
    from torch import Tensor

_STEP = re.compile(r"step(\d{1,9})")
_RANK = re.compile(r"rank(\d{1,9})")
_EARLIER = re.compile(r"earlier-\d+")
_SUFFIXES = tuple(suffix for suffix in KINDS if suffix != ".npy")


class StepFiles:
    """Tensors of a directory of step files; step and rank are those of the names of file and directory.

    Attributes:
        complete: Whether every rank has every step from the first to the last.

    Raises:
        CorruptError: A file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._files: dict[tuple[int, int], Path] = {}
        self._open: tuple[Path, TensorFile, frozenset[Entry]] | None = None
        skipped: list[Skipped] = []
        num_arrays = 0
        for name, file, step, rank in _listing(path):
            taken = self._files.get((step, rank)) if step is not None else None
            if step is None and file.suffix.lower() == ".npy" and not file.is_symlink():
                num_arrays += 1
            elif step is None:
                skipped.append(Skipped(name, "both", _why_not(file)))
            elif taken is not None:
                skipped.append(Skipped(name, "both", f"step {step} is read from {taken.name}", step=step))
            else:
                self._files[step, rank] = file
        if num_arrays:
            # `--debug-format pt --debug-format npy` writes every tensor twice: one line reports it.
            reason = f"{num_arrays} arrays of their own: where there are files of whole steps, those are read"
            skipped.append(Skipped("*.npy", "both", reason))
        entries: list[Entry] = []
        for (step, rank), file in sorted(self._files.items()):
            source, _ = self._file(file)
            entries += [dataclasses.replace(entry, step=step, rank=rank) for entry in source.entries]
            skipped += [dataclasses.replace(item, step=step) for item in source.skipped]
        self.entries = tuple(entries)
        self.skipped = tuple(skipped)
        steps = {step for step, _ in self._files}
        ranks = {rank for _, rank in self._files}
        self.complete = len(self._files) == (max(steps) - min(steps) + 1) * len(ranks)

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`, mapped where the format allows."""
        file = self._files[entry.step, entry.rank]
        source, there = self._file(file)
        plain = dataclasses.replace(entry, step=0, rank=0)
        if plain not in there:
            raise CorruptError("a file changed while it was being read", got=str(file))
        return source.tensor(plain)

    def _file(self, path: Path) -> tuple[TensorFile, frozenset[Entry]]:
        # Tensors are asked for step by step: one open file bounds what is mapped, for any number of steps.
        if self._open is None or self._open[0] != path:
            if path.is_symlink() or not path.is_file():
                raise CorruptError("not a plain file", got=str(path))
            source = KINDS[path.suffix.lower()](path)
            self._open = path, source, frozenset(source.entries)
        return self._open[1:]


def holds_step_files(path: Path) -> bool:
    """Return whether `path` is a directory of step files."""
    return any(step is not None for _, _, step, _ in _listing(path))


def _listing(path: Path) -> Iterator[tuple[str, Path, int | None, int]]:
    """Yield (name inside `path`, file, step or None when it is not a step file, rank), in order of the names."""
    for item in sorted(path.iterdir()):
        found = _RANK.fullmatch(item.name)
        if found is not None and item.is_dir() and not item.is_symlink():
            for inner in sorted(item.iterdir()):
                yield from _one(inner, f"{item.name}/{inner.name}", int(found[1]))
        elif _EARLIER.fullmatch(item.name) is None:
            yield from _one(item, item.name, 0)


def _one(item: Path, name: str, rank: int) -> Iterator[tuple[str, Path, int | None, int]]:
    found = _STEP.fullmatch(item.stem)
    suffix = item.suffix.lower()
    if found is not None and suffix in _SUFFIXES and item.is_file() and not item.is_symlink():
        yield name, item, int(found[1]), rank
    elif not (found is not None and suffix == ".txt") and item.name != "npy-names.json":
        yield name, item, None, rank


def _why_not(item: Path) -> str:
    if item.is_symlink():
        return "a link, which could leave the directory"
    if item.is_dir():
        return "a directory of another kind"
    return "not a file of a step: step<i>.pt"
