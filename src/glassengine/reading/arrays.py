"""Arrays of numpy: headers are bounded before they are parsed, and a small archive does not unfold to a large one."""

from __future__ import annotations

import io
import math
import struct
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from glassengine.errors import CorruptError
from glassengine.reading.files import open_regular, shown

# numpy itself refuses longer headers, but reads them first: a header may claim 4 GiB, and a deflated one deliver them.
_MAX_HEADER_BYTES = 10_000
_LENGTH_FORMATS = {1: "<H", 2: "<I", 3: "<I"}
_MAX_MEMBERS = 100_000
_PIECE_BYTES = 1 << 20
MAX_DIMENSIONS = 64
"""Of a tensor of torch, and of an array of numpy."""
_MOST_ELEMENTS = 1 << 58
MAX_UNFOLDED_BYTES = 1 << 29
"""Most bytes that the compressed members of an archive unfold to; members that are stored have their own size."""


def shape_from(sizes: Any) -> tuple[int, ...]:
    """Return the shape that a file claims.

    Raises:
        ValueError: No tensor has it.
    """
    if not isinstance(sizes, list | tuple) or not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes):
        raise ValueError("a shape is not a list of sizes")
    if len(sizes) > MAX_DIMENSIONS:
        raise ValueError(f"a shape has {len(sizes)} dimensions, and a tensor at most {MAX_DIMENSIONS}")
    # Steps from one element to the next are products of sizes, also where one of them is 0.
    if math.prod(max(size, 1) for size in sizes) > _MOST_ELEMENTS:
        raise ValueError(f"the shape {list(sizes)} is larger than a tensor can be")
    return tuple(sizes)


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an array: (shape, whether in Fortran order, dtype). Its bytes are bounded.

    Raises:
        ValueError: It is damaged.
    """
    version = np.lib.format.read_magic(file)
    form = _LENGTH_FORMATS.get(version[0])
    if form is None:
        raise ValueError(f"unknown version {version}")
    length = file.read(struct.calcsize(form))
    if len(length) < struct.calcsize(form):
        raise ValueError("the header is cut")
    claimed = struct.unpack(form, length)[0]
    if claimed > _MAX_HEADER_BYTES:
        raise ValueError(f"the header claims {claimed} bytes")
    whole = io.BytesIO(length + file.read(claimed))
    read = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
    try:
        shape, fortran, dtype = read(whole)
    except Exception as error:  # numpy parses a header as Python source, and lets out what its tokenizer raises
        raise ValueError(f"the header is damaged: {error}") from error
    return shape_from(shape), fortran, dtype


def read_npz(path: str | Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of an `.npz` file that the user named, by name.

    Raises:
        UsageError: There is no such file.
        CorruptError: It is damaged, holds objects (pickles), or unfolds to too much.
    """
    with open_regular(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                return _arrays(archive)
        except CorruptError:
            raise
        except Exception as error:  # a damaged archive makes zipfile raise anything
            raise CorruptError("not an .npz file", got=f"{shown(path)}: {shown(str(error))}") from error


def _arrays(archive: zipfile.ZipFile) -> dict[str, np.ndarray[Any, Any]]:
    members = archive.infolist()
    unfolded = sum(member.file_size for member in members if member.compress_type != zipfile.ZIP_STORED)
    if len(members) > _MAX_MEMBERS or unfolded > MAX_UNFOLDED_BYTES:
        raise ValueError(f"{len(members):,} entries unfold to {unfolded:,} bytes: save them uncompressed")
    found: dict[str, np.ndarray[Any, Any]] = {}
    for member in members:
        name = member.filename.removesuffix(".npy")
        with archive.open(member) as file:
            shape, fortran, dtype = read_header(file)
            claimed, there = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
            if dtype.hasobject:
                raise ValueError(f"{name!r} is an object array, a pickle, and reading it would run code")
            # A stored member may claim to be larger than its archive.
            if claimed != there or (member.compress_type == zipfile.ZIP_STORED and there > member.compress_size):
                raise ValueError(f"the header of {name!r} claims {claimed:,} bytes, the archive has {there:,}")
            data = bytearray(claimed)
            if _filled(data, file) != claimed or name in found:
                raise ValueError(f"{name!r} is cut, or there twice")
        array = np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")
        found[name] = array.astype(dtype.newbyteorder("="), copy=False)
    return found


def _filled(data: bytearray, file: IO[bytes]) -> int:
    """Read into `data`, a piece at a time, and return how much there was: the whole is in memory once."""
    view = memoryview(data)
    size = 0
    while piece := file.read(min(_PIECE_BYTES, len(data) - size)):
        view[size : size + len(piece)] = piece
        size += len(piece)
    return size
