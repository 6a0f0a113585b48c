"""A directory of one `.npy` file per tensor and step, `<name>-step<i>.npy`, as TensorRT-LLM dumps its buffers.

Its `tllm_debug/PP_x/TP_y/` are ranks, counted stage by stage from the lowest numbers that are there;
`iteration_<n>/` (the executor's dump) is step n, and a name without either is step 0. Where `npy-names.json` stands
beside the arrays (`glass run --debug-format npy`), it gives back the names and dtypes that a file cannot have. Only
headers are read until a tensor is asked for. Texts that accompany an array are passed over; everything else is listed
as skipped.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from glassengine.errors import CorruptError
from glassengine.reading.documents import read_document
from glassengine.recording.formats.npy_file import describe, map_array
from glassengine.recording.layout.layout import STORED, Entry
from glassengine.results import Skipped

if TYPE_CHECKING:
    from torch import Tensor

_STEP = re.compile(r"(.+)-step(\d{1,9})")
_FOLDER = re.compile(r"tllm_debug|(?P<kind>PP|TP|rank|iteration)_?(?P<number>\d{1,9})")
_EARLIER = re.compile(r"earlier-\d+")
_MAX_DEPTH = 4
_NAMES = "npy-names.json"
_MAX_NAMES_BYTES = 1 << 26


class NpyFolder:
    """Tensors of a directory of `.npy` files, sorted by step, rank and name: such a dump has no other order.

    Raises:
        CorruptError: A file is damaged.
    """

    complete = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._files: dict[tuple[int, int, str], Path] = {}
        entries: list[Entry] = []
        skipped: list[Skipped] = []
        arrays: list[tuple[Path, dict[str, int]]] = []
        for item, where, reason in _listing(path, {}, 0):
            if reason is None:
                arrays.append((item, where))
            else:
                skipped.append(Skipped(str(item.relative_to(path)), "both", reason))
        ranks = _ranks([where for _, where in arrays])
        known = {folder: _names(folder) for folder in {file.parent for file, _ in arrays}}
        for (file, where), rank in zip(arrays, ranks, strict=True):
            found = _STEP.fullmatch(file.stem)
            stem, step = (found[1], int(found[2])) if found else (file.stem, where.get("iteration", 0))
            site, dtype = known[file.parent].get(stem, (stem, ""))
            entry = describe(file, site, step=step, rank=rank)
            if isinstance(entry, Entry) and entry.dtype == "float32" and dtype in STORED:
                entry = dataclasses.replace(entry, dtype=dtype)
            if (step, rank, site) in self._files:
                entry = "two files have this name, step and rank"
            if isinstance(entry, str):
                skipped.append(Skipped(str(file.relative_to(path)), "both", entry, step=step))
                continue
            self._files[step, rank, site] = file
            entries.append(entry)
        self.entries = tuple(sorted(entries, key=lambda entry: (entry.step, entry.rank, _natural(entry.site))))
        self.skipped = tuple(skipped)

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`, mapped."""
        import torch

        file = self._files[entry.step, entry.rank, entry.site]
        stored = describe(file, entry.site, step=entry.step, rank=entry.rank)
        if isinstance(stored, str) or stored.shape != entry.shape:
            raise CorruptError("a file changed while it was being read", got=str(file))
        wanted: torch.dtype = getattr(torch, entry.dtype)
        return map_array(file, stored).to(wanted)


def holds_arrays(path: Path) -> bool:
    """Return whether `path` is a directory of `.npy` files."""
    return any(reason is None for _, _, reason in _listing(path, {}, 0))


def _listing(path: Path, where: dict[str, int], depth: int) -> Iterator[tuple[Path, dict[str, int], str | None]]:
    """Yield (item, numbers of the directories above it, why it is not an array or None), in order of the names."""
    for item in sorted(path.iterdir()):
        if item.is_symlink():
            yield item, where, "a link, which could leave the directory"
        elif item.is_dir():
            found = _FOLDER.fullmatch(item.name)
            if found is not None and depth < _MAX_DEPTH:
                numbers = {found["kind"]: int(found["number"])} if found["kind"] else {}
                yield from _listing(item, {**where, **numbers}, depth + 1)
            elif _EARLIER.fullmatch(item.name) is None:
                yield item, where, "a directory of another kind"
        elif item.is_file() and item.suffix.lower() == ".npy":
            yield item, where, None
        elif item.name != _NAMES and not (item.suffix.lower() == ".txt" and item.with_suffix(".npy").exists()):
            yield item, where, "not an .npy file"


class _ArrayName(msgspec.Struct):
    name: str
    dtype: str | None = None


class _ArrayNames(msgspec.Struct):
    files: dict[str, _ArrayName]


def _names(folder: Path) -> dict[str, tuple[str, str]]:
    """Return the content of `npy-names.json`, if it exists: stem of the files -> name of the tensor and its dtype."""
    if not (folder / _NAMES).exists():
        return {}
    told: dict[str, Any] = {"what": "the list of names of the arrays", "version": 1}
    document = read_document(folder / _NAMES, _ArrayNames, most=_MAX_NAMES_BYTES, inside=folder, **told)
    return {stem: (of.name, str(of.dtype)) for stem, of in document.files.items()}


def _ranks(places: list[dict[str, int]]) -> list[int]:
    """Return the rank of each place: stage by stage, since a stage holds all its tensor-parallel ranks."""
    first = {kind: min((place.get(kind, 0) for place in places), default=0) for kind in ("PP", "TP")}
    in_stage = max((place.get("TP", 0) - first["TP"] for place in places), default=0) + 1
    return [
        place["rank"]
        if "rank" in place
        else (place.get("PP", 0) - first["PP"]) * in_stage + place.get("TP", 0) - first["TP"]
        for place in places
    ]


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts "layers.10" after "layers.9"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
