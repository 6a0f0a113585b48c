"""The tensors of every step as files, under the names of the reference documents: `step0.pt`, `step0.txt`, ...

A directory holds the files of one run: those of an earlier one are moved into `earlier-NNN/` before step 0 is written,
everything else in it is left alone, and a second run is refused while the first one is writing. Each file is written
aside, then renamed; a step's tensors are dropped once they are written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from glassengine import environment
from glassengine.errors import UsageError, logger
from glassengine.recording.formats.files import save_pt
from glassengine.recording.layout.tensors import summarize
from glassengine.sites import patterns_of
from glassengine.stores.places import delivered, place
from glassengine.writing import ASIDE, aside, held, put_away

if TYPE_CHECKING:
    from glassengine.engine.session.session import Session

FORMATS = ("pt", "txt", "npy")
NAMES = "npy-names.json"
"""Which tensor each .npy file holds."""

_OURS = re.compile(rf"step\d+\.(pt|txt)|.+-step\d+\.npy|{re.escape(NAMES)}|{ASIDE.pattern}")
_RANK = re.compile(r"rank(\d+)")
_EDGE = 8  # values shown of each end of a tensor
_MAX_STEM = 120  # characters of a name that become part of a file's


class StepFiles:
    """Writes `session.debug_buffers` of each step: an `on_step` callback and a context manager.

        with glass.compat.StepFiles("artifacts") as files:
            engine.generate(PROMPT, debug=True, on_step=files)

    A disk that fills up does not end the run: what is missing is raised as an error when the block ends.

    Args:
        directory: Where to write; made when it is missing. Ranks above 0 write into `rank<r>/` in it.
        formats: "pt": a dict of tensors that `torch.load(weights_only=True)` and `glass compare` read. "txt": shape,
            dtype, statistics and the values at both ends. "npy": one file per tensor,
            `<name with / as .>-step<i>.npy`, types that numpy lacks as float32; `npy-names.json` says which is which.

    Attributes:
        directory: Where this rank writes.
        num_steps: Steps written.

    Raises:
        UsageError: A format is unknown, or (on entering) the directory cannot be written, or another run writes to it.
    """

    def __init__(self, directory: str | Path, *, formats: Sequence[str] = ("pt", "txt")) -> None:
        formats = patterns_of(formats, "formats")
        unknown = [name for name in formats if name not in FORMATS]
        if unknown or not formats:
            raise UsageError(
                "unknown format of step files",
                got=", ".join(unknown) or "none",
                expected=FORMATS,
                hint="--debug-format pt",
            )
        rank = environment.rank()
        self._root = place(directory)
        self.directory = self._root / f"rank{rank}" if rank else self._root
        self.num_steps = 0
        self._formats = tuple(dict.fromkeys(formats))
        self._files: dict[str, dict[str, str]] = {}
        self._error: UsageError | None = None
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.directory = self._undo.enter_context(delivered(self.directory))
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                pass
        except OSError as error:
            raise self._cannot_write(error) from error
        try:
            self._undo.enter_context(held(self.directory))
        except BlockingIOError as error:
            raise UsageError(
                "another run is writing its tensors to this directory",
                got=str(self.directory),
                hint="give each run its own: --debug-dir DIRECTORY",
            ) from error
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        self._undo.close()
        self.directory = self._root
        if self._error is not None and error is None:
            raise self._error

    def __call__(self, session: Session) -> None:
        """Write the step that just ran.

        Raises:
            UsageError: The session keeps no tensors.
        """
        if not session.debug_buffers:
            raise UsageError("the session keeps no tensors to write", hint="generate(..., debug=True)")
        if self._error is not None:
            return
        try:
            if self.num_steps == 0:
                self._move_earlier_files()
            for name in self._formats:
                _WRITERS[name](self, session.step, session.debug_buffers)
        except OSError as error:
            self._error = self._cannot_write(error, session.step)
            logger.warning("the tensors of step %d cannot be written (%s); the run goes on", session.step, error)
            return
        self.num_steps += 1

    def _write_pt(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        with aside(self.directory / f"step{step}.pt") as path:
            save_pt(tensors, path)

    def _write_txt(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        with aside(self.directory / f"step{step}.txt") as path, path.open("w", encoding="utf-8") as file:
            for name, tensor in tensors.items():
                file.write(_describe(name, tensor))

    def _write_npy(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        named = {note["name"]: stem for stem, note in self._files.items()}
        stems = _file_stems(tensors, named)
        notes = {stems[name]: _note(name, tensor) for name, tensor in tensors.items() if name not in named}
        if notes:
            self._files |= notes
            with aside(self.directory / NAMES) as path:
                path.write_text(json.dumps({"schema_version": 1, "files": self._files}, indent=1), encoding="utf-8")
        for name, tensor in tensors.items():
            with aside(self.directory / f"{stems[name]}-step{step}.npy") as path, path.open("wb") as file:
                np.save(file, (tensor.float() if _lacks_numpy(tensor) else tensor).numpy(), allow_pickle=False)

    def _move_earlier_files(self) -> None:
        """Move the files of an earlier run, and nothing else, into a new directory beside the new ones."""
        num_ranks = environment.num_ranks()
        old = [path for path in self.directory.iterdir() if _OURS.fullmatch(path.name) and not path.is_dir()]
        if self.directory == self._root and num_ranks is not None:
            # Each rank moves its own files; only those of ranks that this run has not are left to rank 0.
            ranks = [(path, _RANK.fullmatch(path.name)) for path in self.directory.iterdir() if path.is_dir()]
            old += [path for path, found in ranks if found and int(found[1]) >= max(num_ranks, 1)]
        if not old:
            return
        target = put_away(self.directory, old)
        logger.warning("the files of an earlier run were moved to %s", target)

    def _cannot_write(self, error: OSError, step: int | None = None) -> UsageError:
        when = "" if step is None else f" from step {step} on"
        return UsageError(
            f"the tensors of the steps cannot be written{when}",
            got=f"{error.strerror or error} ({error.filename or self.directory})",
            expected=None if step is None else f"{self.num_steps} steps were written to {self.directory}",
            hint="name a directory on a disk that is writable and has room: --debug-dir DIRECTORY; "
            "or write fewer tensors: --debug PATTERN",
        )


_WRITERS: dict[str, Callable[[StepFiles, int, Mapping[str, torch.Tensor]], None]] = {
    "pt": StepFiles._write_pt,
    "txt": StepFiles._write_txt,
    "npy": StepFiles._write_npy,
}


def _describe(name: str, tensor: torch.Tensor) -> str:
    found = summarize(tensor)
    shown = name if name.isprintable() else repr(name)
    lines = [f"{shown}: {found.dtype} {list(found.shape)}"]
    statistics = {key: getattr(found, key) for key in ("min", "mean", "median", "max", "std")}
    numbers = "  ".join(f"{key} {'-' if value is None else f'{value:.6g}'}" for key, value in statistics.items())
    lines.append(f"  {numbers}  NaN {found.num_nan}  Inf {found.num_inf}")
    flat = tensor.reshape(-1)
    if flat.numel() > 2 * _EDGE:
        lines.append(f"  [{_values(flat[:_EDGE])}, ..., {_values(flat[-_EDGE:])}]")
    else:
        lines.append(f"  [{_values(flat)}]")
    return "\n".join(lines) + "\n"


def _values(flat: torch.Tensor) -> str:
    if flat.is_floating_point():
        return ", ".join(f"{value:.6g}" for value in flat.double().tolist())
    return ", ".join(map(str, flat.tolist()))


def _file_stems(names: Iterable[str], named: Mapping[str, str]) -> dict[str, str]:
    """Return name -> what its files are called: a plain, short word each, also where letter case does not count.

    Those of earlier steps stay what they are `named`.
    """
    stems = dict(named)
    taken = {stem.lower() for stem in named.values()}
    for name in names:
        if name in stems:
            continue
        stem = re.sub(r"[^A-Za-z0-9._-]", "_", name.replace("/", ".")).lstrip(".")
        if len(stem) > _MAX_STEM or not stem or stem.lower() in taken:
            stem = f"{stem[:_MAX_STEM]}.{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"
        taken.add(stem.lower())
        stems[name] = stem
    return stems


def _lacks_numpy(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64)


def _note(name: str, tensor: torch.Tensor) -> dict[str, str]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    entry = {"name": name, "dtype": dtype}
    if _lacks_numpy(tensor):
        entry["note"] = f"numpy has no {dtype}: stored as float32, which holds every value of it"
    return entry
