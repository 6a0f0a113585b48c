"""Tensors of a snapshot on disk: written in one go, read back with their strides, and weights shared between snapshots.

A file holds values in row-major order; what else a compiled graph depends on (strides) stands in `meta.json`. A later
snapshot links to the file of weights of an earlier one where they are unchanged: the same memory, at the same version,
still has the checksum that was written. The checksum alone finds writes through `.data`, which torch does not count.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from glassengine.errors import CorruptError
from glassengine.executable.snapshot.layout import weights_file
from glassengine.reading.tensors import open_safetensors
from glassengine.recording.layout.layout import STORED
from glassengine.recording.layout.tensors import bytes_of, dtype_name, why_not
from glassengine.writing import crc32, write_all

_BATCH_BYTES = 8 << 20
_PADDING = 8
_MAX_FILES = 4  # of one snapshot; beyond that all of its weights are rewritten


def obstacle(value: Any) -> str | None:
    """Return why the values of an input or output cannot be stored, or None."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    if type(value) not in (Tensor, torch.nn.Parameter):
        return f"a {type(value).__name__}, which holds other tensors"
    return why_not(value)


def file_key(name: str) -> str:
    """Return what a tensor is called in a file: its name, unless safetensors cannot spell it."""
    key = name.encode(errors="backslashreplace").decode()
    return f"{key}_" if key == "__metadata__" else key


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Write tensors by key, one large sequential write after another.

    Memory: one tensor is copied where it is elsewhere or not contiguous.

    Returns:
        CRC-32 of the bytes of each.

    Raises:
        OSError: The file exists or cannot be written.
    """
    # The largest elements first, so that every tensor is aligned to its elements.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for key, tensor in ordered:
        code, _, parts, _ = STORED[dtype_name(tensor.dtype)]
        start, end = end, end + tensor.numel() * tensor.element_size()
        shape = [*tensor.shape, parts] if parts > 1 else list(tensor.shape)
        header[key] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _PADDING)
    checksums: dict[str, int] = {}
    with path.open("xb", buffering=0) as file:
        waiting: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
        size = 0
        for key, tensor in ordered:
            data = bytes_of(tensor.detach())
            checksums[key] = crc32(data)
            waiting.append(data)
            size += data.nbytes
            if size >= _BATCH_BYTES:
                write_all(file, waiting)
                waiting, size = [], 0
        write_all(file, waiting)
    return checksums


class TensorFile:
    """A safetensors file, mapped; tensors are read one by one.

    `inside` is as for `reading.files.open_regular`.

    Raises:
        CorruptError: The file is missing or damaged.
    """

    def __init__(self, path: Path, *, inside: Path | None = None) -> None:
        self.path = path
        self._file = open_safetensors(path, inside=inside)
        self.keys = frozenset(self._file.keys())
        self.metadata: dict[str, str] = dict(self._file.metadata() or {})

    def read(self, key: str) -> Tensor:
        """Return a tensor as it is stored, mapped.

        Raises:
            CorruptError: There is none of this key.
        """
        if key not in self.keys:
            raise CorruptError(f"{self.path.name} lacks the tensor {key!r}")
        return cast("Tensor", self._file.get_tensor(key))


def restored(stored: Tensor, dtype: str, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return a tensor of its own memory with the values of `stored`, and strides as they were where memory allows.

    Args:
        stored: Row-major values of `shape`; complex128 as pairs.
        dtype: torch dtype name.
        shape: Sizes.
        stride: Steps in elements; a dimension of step 0 is expanded again. Other overlapping memory becomes contiguous.

    Raises:
        CorruptError: The values do not fit.
    """
    expected = getattr(torch, dtype, None) if dtype in STORED else None
    if expected is torch.complex128 and stored.shape[-1:] == (2,):
        stored = torch.view_as_complex(stored)
    shape, stride = tuple(shape), tuple(stride)
    if stored.dtype != expected or tuple(stored.shape) != shape or len(stride) != len(shape):
        raise CorruptError(
            "a tensor of the snapshot is not what meta.json says",
            got=f"{dtype_name(stored.dtype)}{list(stored.shape)}",
            expected=f"{dtype}{list(shape)}",
        )
    return copied(stored, shape, stride)


def copied(tensor: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return a copy that autograd does not know, with the strides given where memory allows.

    A dimension of step 0 is expanded. Other overlapping memory becomes contiguous.
    """
    own = [1 if step == 0 else size for size, step in zip(shape, stride, strict=True)]
    with torch.inference_mode(False), torch.no_grad():
        if tensor.numel() and _is_dense(own, stride):
            room = torch.empty_strided(own, tuple(stride), dtype=tensor.dtype, device=tensor.device)
        else:
            own = list(shape)
            room = torch.empty(own, dtype=tensor.dtype, device=tensor.device)
        room.copy_(tensor[tuple(slice(0, size) for size in own)])
    return room.expand(tuple(shape))


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether no two elements share memory, and hardly any memory lies between them."""
    end = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if step < end:
            return False
        end = step * (size - 1) + end
    return end <= 4 * torch.Size(shape).numel() + 4096


@dataclass
class Home:
    """Where a snapshot is; None when it was given up."""

    path: Path | None


@dataclass(frozen=True)
class StoredPlace:
    """Where the values of a tensor are within a snapshot."""

    file: str
    key: str
    crc32: int


@dataclass(frozen=True)
class _Known:
    home: Home
    place: StoredPlace
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
    ) -> dict[str, StoredPlace]:
        """Link and write files of weights into the snapshot at `home`; return which tensors they have, and where.

        Only `weights` are written if no file has them; those in `constant` never change, and need no second
        look.

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
        places: dict[str, StoredPlace] = {}
        number = 0
        for (directory, file), names in shared.items() if len(shared) < _MAX_FILES else ():
            if link(directory / file, home.path / weights_file(number)):
                for name, known in names.items():
                    places[name] = StoredPlace(weights_file(number), known.place.key, known.place.crc32)
                number += 1
        rest = {name: tensor for name, tensor in tensors.items() if name in weights and name not in places}
        return places | self._write(home, weights_file(number), rest)

    def _write(self, home: Home, file: str, tensors: Mapping[str, Tensor]) -> dict[str, StoredPlace]:
        assert home.path is not None
        # Tied weights are one tensor under several names.
        first: dict[tuple[object, ...], str] = {}
        for name, tensor in tensors.items():
            first.setdefault(_identity(tensor), name)
        if not first:
            return {}
        checksums = write_tensors(home.path / file, {file_key(name): tensors[name] for name in first.values()})
        places = {}
        for name, tensor in tensors.items():
            key = file_key(first[_identity(tensor)])
            places[name] = StoredPlace(file, key, checksums[key])
            if tensor.numel():
                self._known[_identity(tensor)] = _Known(home, places[name], _version(tensor))
        return places


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
