"""`.npz` files, one array at a time; object arrays (pickles) are never read."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glassengine.errors import CorruptError
from glassengine.reading.arrays import read_header
from glassengine.reading.files import open_regular
from glassengine.recording.formats.npy_file import why_not
from glassengine.recording.layout.layout import Entry
from glassengine.results import Skipped

if TYPE_CHECKING:
    from torch import Tensor

# A deflated member of a few megabytes can claim and deliver gigabytes.
_MAX_ARRAY_BYTES = 1 << 34
_MAX_UNFOLDED_BYTES = 1 << 28
_MAX_RATIO = 100
_MAX_MEMBERS = 100_000


class NumpyFile:
    """Arrays of a `.npz` file; each is read, not mapped, when it is asked for.

    Raises:
        CorruptError: The file or an array's header is damaged.
    """

    complete = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._members: dict[str, zipfile.ZipInfo] = {}
        entries: list[Entry] = []
        skipped: list[Skipped] = []
        try:
            open_regular(path).close()
            self._archive = zipfile.ZipFile(path)
            members = self._archive.infolist()
            if len(members) > _MAX_MEMBERS:
                raise CorruptError("an .npz file has too many entries", got=f"{path}: {len(members)}")
            for member in members:
                name = member.filename.removesuffix(".npy")
                with self._archive.open(member) as file:
                    try:
                        shape, _, dtype = read_header(file)
                    except ValueError as error:
                        skipped.append(Skipped(name, "both", f"not an array: {error}", step=0))
                        continue
                    header_bytes = file.tell()
                reason = _why_not(dtype, shape, member, header_bytes)
                if name in self._members:
                    reason = "two entries have this name"
                if reason is not None:
                    skipped.append(Skipped(name, "both", reason, step=0))
                    continue
                nbytes = math.prod(shape) * dtype.itemsize
                self._members[name] = member
                entries.append(Entry(name, 0, 0, dtype.newbyteorder("=").name, shape, nbytes=nbytes))
        except CorruptError:
            raise
        except Exception as error:  # a damaged archive makes zipfile raise anything
            hint = "save it again: numpy.savez(FILE, **tensors)"
            raise CorruptError("not an .npz file", got=f"{path}: {error}", hint=hint) from error
        self.entries = tuple(entries)
        self.skipped = tuple(skipped)

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`, in memory of their own.

        Raises:
            CorruptError: The member is cut or damaged.
        """
        import torch

        try:
            with self._archive.open(self._members[entry.site]) as file:
                shape, fortran, dtype = read_header(file)
                data = bytearray(file.read(entry.nbytes))
        except Exception as error:  # as above
            raise CorruptError("an array cannot be read", got=f"{entry.site!r} in {self.path}: {error}") from error
        if len(data) != entry.nbytes:
            raise CorruptError("an array is cut", got=f"{entry.site!r} in {self.path}: {len(data)} bytes")
        array = np.frombuffer(data, dtype=dtype).reshape(shape, order="F" if fortran else "C")
        return torch.from_numpy(array.astype(dtype.newbyteorder("="), copy=False))


def _why_not(dtype: np.dtype[Any], shape: tuple[int, ...], member: zipfile.ZipInfo, header_bytes: int) -> str | None:
    """Return why an array is not given as a tensor, or None."""
    reason = why_not(dtype)
    if reason is not None:
        return reason
    claimed = math.prod(shape) * dtype.itemsize
    if claimed != member.file_size - header_bytes:
        return f"the header claims {claimed} bytes, the file has {member.file_size - header_bytes}"
    if claimed > _MAX_UNFOLDED_BYTES and claimed > _MAX_RATIO * member.compress_size:
        return f"{member.compress_size} bytes unfold to {claimed}: save it uncompressed"
    if claimed > _MAX_ARRAY_BYTES:
        return f"{claimed} bytes are more than this format is read for: save it as .safetensors"
    return None
