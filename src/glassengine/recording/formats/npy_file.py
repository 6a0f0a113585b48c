"""`.npy` files, mapped into memory; object arrays (pickles) are never read."""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glassengine.errors import CorruptError
from glassengine.reading.arrays import read_header
from glassengine.reading.files import open_regular
from glassengine.recording.layout.layout import STORED, Entry
from glassengine.results import Skipped

if TYPE_CHECKING:
    from torch import Tensor


class NpyFile:
    """The one tensor of a `.npy` file, called "tensor" as the one of a `.pt` file is.

    Raises:
        CorruptError: The file or its header is damaged.
    """

    complete = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        found = describe(path, "tensor")
        self.entries = (found,) if isinstance(found, Entry) else ()
        self.skipped = () if isinstance(found, Entry) else (Skipped("tensor", "both", found, step=0),)

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values, mapped."""
        return map_array(self.path, entry)


def describe(path: Path, site: str, *, step: int = 0, rank: int = 0) -> Entry | str:
    """Return the entry of the array in a `.npy` file, or why it is not given as a tensor. Only the header is read.

    Raises:
        CorruptError: The file or its header is damaged.
    """
    with open_regular(path, inside=path.parent) as file:
        try:
            shape, _, dtype = read_header(file)
        except ValueError as error:
            raise CorruptError("not an .npy file", got=f"{path}: {error}") from error
        num_bytes = path.stat().st_size - file.tell()
    reason = why_not(dtype)
    if reason is not None:
        return reason
    claimed = math.prod(shape) * dtype.itemsize
    if claimed != num_bytes:
        raise CorruptError("an .npy file is cut", got=f"{path}: {num_bytes} bytes", expected=f"{claimed} bytes")
    return Entry(site, step, rank, dtype.newbyteorder("=").name, shape, nbytes=claimed)


def map_array(path: Path, entry: Entry) -> Tensor:
    """Return the values of the array that `entry` describes, mapped where the byte order is that of this machine.

    Raises:
        CorruptError: The file is damaged, or not what it was when it was described.
    """
    import torch

    with open_regular(path, inside=path.parent) as file:
        try:
            shape, fortran, dtype = read_header(file)
            offset = file.tell()
            # Private and writable: torch cannot hold memory that is read-only.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            array = np.frombuffer(data, dtype, math.prod(shape), offset)
        except (ValueError, OSError) as error:
            raise CorruptError("an array cannot be read", got=f"{path}: {error}") from error
    if shape != entry.shape or dtype.newbyteorder("=").name != entry.dtype:
        raise CorruptError("a file changed while it was being read", got=str(path))
    array = array.reshape(shape, order="F" if fortran else "C")
    return torch.from_numpy(array.astype(dtype.newbyteorder("="), copy=False))


def why_not(dtype: np.dtype[Any]) -> str | None:
    """Return why arrays of `dtype` are not given as tensors, or None."""
    if dtype.hasobject:
        return "an object array is a pickle, and reading it would run code"
    if dtype.newbyteorder("=").name not in STORED:
        return f"no arithmetic for numpy dtype {dtype}: save it as float32"
    return None
