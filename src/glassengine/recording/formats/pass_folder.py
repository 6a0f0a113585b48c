"""What SGLang writes with `--debug-tensor-dump-output-folder`: a folder for each process, a `.pt` file a forward.

`TP0_PP0_Rank0_pid123/Pass00000.pt` is a dict, module -> what it returned, a tensor or a list of them. It is written
when the decoder ends, so what is called behind it, scores above all, is in the next one: here it is in its own step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassengine.errors import CorruptError, UsageError
from glassengine.reading.tensors import read_torch
from glassengine.recording.formats.torch_file import why_not_a_tensor
from glassengine.recording.layout.layout import Entry
from glassengine.results import Skipped

if TYPE_CHECKING:
    from torch import Tensor

_PROCESS = re.compile(r"TP(\d{1,6})_PP(\d{1,6})_Rank(\d{1,6})_pid(\d{1,10})")
_PASS = re.compile(r"Pass(\d{1,9})\.pt")
_BEHIND = ("model", "logits_processor", "lm_head", "pooler")
"""Modules that are called, or end, when the file of their forward has been written."""
_MOST_VALUES = 400_000


class PassFolder:
    """Tensors of the forwards of each process.

    Raises:
        CorruptError: A file is damaged or would run code.
        UsageError: Two processes were of one rank: of two servers, one after the other.
    """

    complete = True

    def __init__(self, path: Path, processes: Sequence[tuple[int, Path]]) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {"kind": "model", "layout": "sglang", "as_deployed": True}
        self._files: dict[Entry, tuple[Path, str, int | None]] = {}
        ranks: dict[int, Path] = {}
        skipped: list[Skipped] = []
        for rank, folder in processes:
            if rank in ranks:
                raise UsageError(
                    "the dump is of two servers",
                    got=f"{path}: {ranks[rank].name} and {folder.name}",
                    expected="one process for each rank",
                    hint=f"name one of them: {folder}",
                )
            ranks[rank] = folder
            for step, file in _passes(folder):
                if file.is_symlink():
                    skipped.append(Skipped(file.name, "both", "a link, which could leave the directory", step=step))
                    continue
                for name, place, value in _values(file):
                    own = step - 1 if name in _BEHIND else step
                    site = name if place is None else f"{name}:out[{place}]"
                    reason = "of a forward before the first" if own < 0 else why_not_a_tensor(value)
                    if reason is not None:
                        skipped.append(Skipped(site, "both", reason, step=step))
                        continue
                    dtype = str(value.dtype).removeprefix("torch.")
                    entry = Entry(site, own, rank, dtype, tuple(value.shape), nbytes=value.numel() * value.itemsize)
                    self._files[entry] = (file, name, place)
        self.entries: Sequence[Entry] = sorted(self._files, key=lambda entry: (entry.step, entry.rank))
        self.skipped: Sequence[Skipped] = tuple(skipped)
        self._open: tuple[Path, Mapping[tuple[str, int | None], Tensor]] | None = None

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`, mapped."""
        import torch

        file, name, place = self._files[entry]
        if self._open is None or self._open[0] != file:
            self._open = (file, {(one, at): value for one, at, value in _values(file)})
        value = self._open[1].get((name, place))
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != entry.shape:
            raise CorruptError("a file changed while it was being read", got=str(file))
        return value


def open_passes(path: Path) -> PassFolder | None:
    """Open what SGLang wrote, of all processes or of one; None where something else did."""
    if not path.is_dir():
        return None
    own = _PROCESS.fullmatch(path.name)
    folders = [path] if own else sorted(item for item in path.iterdir() if _PROCESS.fullmatch(item.name))
    found = []
    for folder in folders:
        named = _PROCESS.fullmatch(folder.name)
        if named is not None and folder.is_dir() and not folder.is_symlink() and next(_passes(folder), None):
            found.append((int(named[3]), folder))
    return PassFolder(path, found) if found else None


def _passes(folder: Path) -> Iterator[tuple[int, Path]]:
    for item in sorted(folder.iterdir()):
        named = _PASS.fullmatch(item.name)
        if named is not None:
            yield int(named[1]), item


def _values(file: Path) -> Iterator[tuple[str, int | None, Any]]:
    """Yield module, place among several results, and value."""
    document = read_torch(file)
    if not isinstance(document, Mapping) or len(document) > _MOST_VALUES:
        raise CorruptError("not a forward of SGLang", got=f"{file}: {type(document).__name__}", expected="a dict")
    count = 0
    for name, value in document.items():
        parts = list(enumerate(value)) if isinstance(value, list | tuple) else [(None, value)]
        count += len(parts)
        if count > _MOST_VALUES:
            raise CorruptError("the file holds too much", got=str(file), expected=f"at most {_MOST_VALUES} tensors")
        for place, part in parts:
            yield str(name), place, part
