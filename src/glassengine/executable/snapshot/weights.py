"""Weights of snapshots, written once: a later snapshot links to the file of an earlier one where they are unchanged.

A tensor counts as unchanged when the same memory, at the same version, still has the checksum that was written. The
checksum alone finds writes through `.data`, which torch does not count.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from glassengine.executable.snapshot.layout import weights_file
from glassengine.executable.snapshot.tensors import file_key, write_tensors
from glassengine.recording.layout.values import bytes_of
from glassengine.writing.checksums import crc32

_MAX_FILES = 4  # of one snapshot; beyond that all of its weights are rewritten


@dataclass
class Home:
    """Where a snapshot is; None when it was given up."""

    path: Path | None


@dataclass(frozen=True)
class Place:
    """Where the values of a tensor are within a snapshot."""

    file: str
    key: str
    crc32: int


@dataclass(frozen=True)
class _Known:
    home: Home
    place: Place
    version: int


class SharedWeights:
    """What the files written so far have."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], _Known] = {}

    def is_known(self, tensor: Tensor) -> bool:
        """Return whether the values of a tensor are probably in a file already."""
        known = self._known.get(_identity(tensor))
        return known is not None and known.version == _version(tensor)

    def place(
        self, home: Home, tensors: Mapping[str, Tensor], weights: Container[str], constant: Container[str]
    ) -> dict[str, Place]:
        """Link and write files of weights into the snapshot at `home`; return which tensors they have, and where.

        Args:
            home: Of the snapshot that is being written.
            tensors: Tensors to store; one that is not a weight may share the memory of one.
            weights: Which of them are written if no file has them.
            constant: Which of them never change, and need no second look.

        Raises:
            OSError: A file cannot be written.
        """
        assert home.path is not None
        shared: dict[tuple[Path, str], dict[str, _Known]] = {}
        for name, tensor in tensors.items():
            known = self._known.get(_identity(tensor))
            if known is None or known.home.path is None or known.version != _version(tensor):
                continue
            if name in constant or crc32(bytes_of(tensor.detach())) == known.place.crc32:
                shared.setdefault((known.home.path, known.place.file), {})[name] = known
        found: dict[str, Place] = {}
        number = 0
        for (directory, file), names in shared.items() if len(shared) < _MAX_FILES else ():
            if link(directory / file, home.path / weights_file(number)):
                for name, known in names.items():
                    found[name] = Place(weights_file(number), known.place.key, known.place.crc32)
                number += 1
        rest = {name: tensor for name, tensor in tensors.items() if name in weights and name not in found}
        return found | self._write(home, weights_file(number), rest)

    def _write(self, home: Home, file: str, tensors: Mapping[str, Tensor]) -> dict[str, Place]:
        assert home.path is not None
        # Tied weights are one tensor under several names.
        first: dict[tuple[object, ...], str] = {}
        for name, tensor in tensors.items():
            first.setdefault(_identity(tensor), name)
        if not first:
            return {}
        checksums = write_tensors(home.path / file, {file_key(name): tensors[name] for name in first.values()})
        found = {}
        for name, tensor in tensors.items():
            key = file_key(first[_identity(tensor)])
            found[name] = Place(file, key, checksums[key])
            if tensor.numel():
                self._known[_identity(tensor)] = _Known(home, found[name], _version(tensor))
        return found


def link(source: Path, target: Path) -> bool:
    """Give an earlier file a second name, or copy it where the file system cannot; return whether it was there.

    Raises:
        OSError: The copy cannot be written.
    """
    with contextlib.suppress(OSError):
        os.link(source, target)
        return True
    try:
        shutil.copyfile(source, target)
    except FileNotFoundError:
        return False
    return True


def _identity(tensor: Tensor) -> tuple[object, ...]:
    return (str(tensor.device), tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
