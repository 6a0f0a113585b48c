"""Single files that hold tensors: `.pt`, `.safetensors`, `.npz`, `.npy`; read within bounds.

Reading one never runs code. Readers raise CorruptError for a file that is damaged or would run code.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError

from glassengine.blocks.arrays import ArrayValues, stored_values, values_of_bytes
from glassengine.errors import CorruptError
from glassengine.reading.copies import here
from glassengine.reading.documents import parsed
from glassengine.reading.files import open_regular
from glassengine.reading.tensors import open_safetensors, read_header, read_torch, shape_from
from glassengine.recording.layout.description import PAD_PREFIX
from glassengine.recording.layout.layout import STORED, Entry, num_bytes
from glassengine.recording.layout.shard_files import mapped
from glassengine.results import Skipped
from glassengine.stores import objects
from glassengine.stores.objects import read_range
from glassengine.stores.places import RemotePath
from glassengine.writing import open_for_torch

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = {one.code: dtype for dtype, one in STORED.items() if one.parts == 1}
_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors
# A deflated member of a few megabytes can claim and deliver gigabytes.
_MAX_ARRAY_BYTES = 1 << 34
_MAX_UNFOLDED_BYTES = 1 << 28
_MAX_RATIO = 100
_MAX_MEMBERS = 100_000
# A small .pt file can name one list many times over; these bound what it unfolds to.
_MAX_DEPTH = 64
_MAX_LEAVES = 400_000
_MAX_EXPANDED_BYTES = 1 << 34


class ForeignTensors:
    """What another program wrote, as a `TensorSource`; a reader adds the tensors one by one."""

    complete = True
    is_thread_safe = False
    _same_name = "two tensors have this name"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.entries: list[Entry] = []
        self.skipped: list[Skipped] = []
        # What the values of an entry are read from.
        self._values: dict[tuple[str, int, int], Any] = {}

    def _add(self, site: str, found: Entry | str, value: Any = None, *, step: int | None = 0) -> None:
        """Add a tensor, or why it is not given as one."""
        if isinstance(found, Entry) and found.place in self._values:
            found = self._same_name
        if isinstance(found, str):
            self.skipped.append(Skipped(site, "both", found, step=step))
        else:
            self.entries.append(found)
            self._values[found.place] = value

    def _sort(self) -> None:
        self.entries.sort(key=lambda entry: (entry.step, entry.rank))


class SafetensorsFile(ForeignTensors):
    """Tensors of a `.safetensors` file, mapped; its metadata are the file's `__metadata__`."""

    is_thread_safe = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            # Without torch, which takes longer to import than a gigabyte to compare.
            checked = open_safetensors(path, framework="numpy")
            self.metadata = dict(checked.metadata() or {})
            for name in checked.offset_keys():
                found = checked.get_slice(name)
                code, shape = found.get_dtype(), shape_from(found.get_shape())
                if name.startswith(PAD_PREFIX):
                    self._add(name, "alignment padding of a recording")
                elif code not in _NAMES:
                    self._add(name, f"no arithmetic for {code}")
                else:
                    dtype = _NAMES[code]
                    self._add(name, Entry(name, 0, 0, dtype, shape, nbytes=num_bytes(dtype, shape)))
            self._open(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise CorruptError("not a safetensors file", got=f"{path}: {error}") from error

    def _open(self, path: Path) -> None:
        with open_regular(here(path)) as file:
            size = os.fstat(file.fileno()).st_size
            self._mapping = memoryview(mapped(file.fileno(), 0, size)).cast("B")
        data = 8 + int.from_bytes(self._mapping[:8], "little")
        self._note_starts(bytes(self._mapping[8:data]), str(path))
        if any(self._starts[entry.site] + entry.nbytes > size for entry in self.entries):
            raise CorruptError("a file changed while it was being read", got=str(path))

    def _note_starts(self, header: bytes, where: str) -> None:
        fields = parsed(header, dict[str, dict[str, object]], where, what="the header", items=1 << 30)
        data = 8 + len(header)
        self._starts = {entry.site: data + _start(fields.get(entry.site, {}), where) for entry in self.entries}

    def _data(self, entry: Entry) -> Any:
        start = self._starts[entry.site]
        return self._mapping[start : start + entry.nbytes]

    def read_values(self, entry: Entry) -> ArrayValues:
        """Return the values of one of `entries` without torch, mapped."""
        return values_of_bytes(self._data(entry), entry.dtype, entry.shape)

    def read_rows(self, entry: Entry, first: int, end: int) -> tuple[ArrayValues, int]:
        """Return some rows of one of `entries`, see `stored_values`, and 0: the format has no checksums."""
        each = entry.nbytes // max(1, entry.shape[0])
        data = self._data(entry)[first * each : end * each]
        return stored_values(data, entry.dtype, (end - first, *entry.shape[1:])), 0

    def stored(self, entry: Entry) -> memoryview | None:
        """Return the bytes of one of `entries`, mapped; None where they would have to be fetched."""
        return memoryview(self._data(entry))

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`, mapped; writing into them changes this process's view only."""
        import torch

        dtype: torch.dtype = getattr(torch, entry.dtype)
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(self._data(entry), dtype=torch.uint8).view(dtype).reshape(entry.shape)


class SafetensorsObject(SafetensorsFile):
    """Tensors of a `.safetensors` file in a store: its header, and then the ranges that are asked for."""

    is_thread_safe = False

    def __init__(self, path: RemotePath) -> None:
        url = str(path)
        self._found = objects.require(url)
        size = int.from_bytes(objects.read(url, 0, min(8, self._found.size)), "little")
        if self._found.size < 8 or size > min(_MAX_HEADER_BYTES, self._found.size - 8):
            raise CorruptError("not a safetensors file", got=f"{url}: its header does not fit in it")
        header = objects.read(url, 0, 8 + size)
        # What the format demands of a header is checked by its own library, on a hollow file.
        with tempfile.NamedTemporaryFile(prefix="glassengine-", suffix=".safetensors") as file:
            file.write(header)
            file.truncate(self._found.size)
            file.flush()
            try:
                super().__init__(Path(file.name))
            except CorruptError as error:
                raise CorruptError(error.what, got=str(error.got).replace(file.name, url)) from error
        self._note_starts(header[8:], url)
        self.path = path

    def _open(self, path: Path) -> None:
        """Map nothing: the file is hollow."""

    def stored(self, entry: Entry) -> memoryview | None:
        """Return None."""
        return None

    def _data(self, entry: Entry) -> Any:
        if not entry.nbytes:
            return b""
        data = read_range(self._found, self._starts[entry.site], entry.nbytes)
        # Nothing else says whether these are the bytes that the header was of.
        difference = self._found.change()
        if difference is not None:
            raise CorruptError("a file has changed since it was opened", got=f"{self._found.url}: {difference}")
        return data


def _start(field: dict[str, object], url: str) -> int:
    offsets = field.get("data_offsets")
    if not isinstance(offsets, list) or not offsets or not isinstance(offsets[0], int) or offsets[0] < 0:
        raise CorruptError("not a safetensors file", got=f"{url}: {json.dumps(offsets)[:100]}")
    return offsets[0]


class NpyFile(ForeignTensors):
    """The one tensor of a `.npy` file, called "tensor" as the one of a `.pt` file is."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._add("tensor", describe(path, "tensor"))

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values, mapped."""
        return map_array(self.path, entry)


def describe(path: Path, site: str, *, step: int = 0, rank: int = 0) -> Entry | str:
    """Return the entry of the array in a `.npy` file, or why it is not given as a tensor. Only the header is read."""
    with open_regular(path, inside=path.parent) as file:
        try:
            shape, _, dtype = read_header(file)
        except ValueError as error:
            raise CorruptError("not an .npy file", got=f"{path}: {error}") from error
        there = path.stat().st_size - file.tell()
    claimed = math.prod(shape) * dtype.itemsize
    reason = why_not(dtype)
    if reason is None and claimed != there:
        raise CorruptError("an .npy file is cut", got=f"{path}: {there} bytes", expected=f"{claimed} bytes")
    return reason or Entry(site, step, rank, native_name(dtype), shape, nbytes=claimed)


def map_array(path: Path, entry: Entry) -> Tensor:
    """Return the values of the array that `entry` describes, mapped where the byte order is that of this machine."""
    with open_regular(path, inside=path.parent) as file:
        try:
            header = shape, _, dtype = read_header(file)
            # Private and writable: torch cannot hold memory that is read-only.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            found = array_of(header, data, file.tell())
        except (ValueError, OSError) as error:
            raise CorruptError("an array cannot be read", got=f"{path}: {error}") from error
    if shape != entry.shape or native_name(dtype) != entry.dtype:
        raise CorruptError("a file changed while it was being read", got=str(path))
    return found


def array_of(header: tuple[tuple[int, ...], bool, np.dtype[Any]], data: Any, offset: int = 0) -> Tensor:
    """Return the array that lies in writable memory, in the byte order of this machine."""
    import torch

    shape, fortran, dtype = header
    array = np.frombuffer(data, dtype, math.prod(shape), offset).reshape(shape, order="F" if fortran else "C")
    return torch.from_numpy(array.astype(dtype.newbyteorder("="), copy=False))


def native_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype in the byte order of this machine."""
    return dtype.newbyteorder("=").name


def why_not(dtype: np.dtype[Any]) -> str | None:
    """Return why arrays of `dtype` are not given as tensors, or None."""
    if dtype.hasobject:
        return "an object array is a pickle, and reading it would run code"
    if native_name(dtype) not in STORED:
        return f"no arithmetic for numpy dtype {dtype}: save it as float32"
    return None


class NpzFile(ForeignTensors):
    """Arrays of a `.npz` file; each is read, not mapped, when it is asked for."""

    _same_name = "two entries have this name"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            open_regular(path).close()
            self._archive = zipfile.ZipFile(path)
            members = self._archive.infolist()
            if len(members) > _MAX_MEMBERS:
                raise CorruptError("an .npz file has too many entries", got=f"{path}: {len(members)}")
            for member in members:
                name = member.filename.removesuffix(".npy")
                with self._archive.open(member) as file:
                    self._add(name, _member_entry(name, member, file), member)
        except CorruptError:
            raise
        except Exception as error:  # a damaged archive makes zipfile raise anything
            hint = "save it again: numpy.savez(FILE, **tensors)"
            raise CorruptError("not an .npz file", got=f"{path}: {error}", hint=hint) from error

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`, in memory of their own."""
        try:
            with self._archive.open(self._values[entry.place]) as file:
                header = read_header(file)
                data = bytearray(file.read(entry.nbytes))
        except Exception as error:  # as above
            raise CorruptError("an array cannot be read", got=f"{entry.site!r} in {self.path}: {error}") from error
        if len(data) != entry.nbytes:
            raise CorruptError("an array is cut", got=f"{entry.site!r} in {self.path}: {len(data)} bytes")
        return array_of(header, data)


def _member_entry(name: str, member: zipfile.ZipInfo, file: IO[bytes]) -> Entry | str:
    """Return the entry of an array of an archive, or why it is not given as a tensor."""
    try:
        shape, _, dtype = read_header(file)
    except ValueError as error:
        return f"not an array: {error}"
    claimed, there = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
    if (reason := why_not(dtype)) is not None:
        return reason
    if claimed != there:
        return f"the header claims {claimed} bytes, the file has {there}"
    if claimed > _MAX_UNFOLDED_BYTES and claimed > _MAX_RATIO * member.compress_size:
        return f"{member.compress_size} bytes unfold to {claimed}: save it uncompressed"
    if claimed > _MAX_ARRAY_BYTES:
        return f"{claimed} bytes are more than this format is read for: save it as .safetensors"
    return Entry(name, 0, 0, native_name(dtype), shape, nbytes=claimed)


class TorchFile(ForeignTensors):
    """Tensors of a `.pt` file, mapped; nested dicts, lists and tuples are flattened to dotted names."""

    is_thread_safe = True
    _same_name = "two entries have this name"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        for name, leaf in _leaves("", read_torch(path), 0, [0]):
            value = of_number(leaf)
            self._add(name, why_not_a_tensor(value) or torch_entry(name, value), value)

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`, mapped."""
        tensor: Tensor = self._values[entry.place]
        return tensor


def torch_entry(site: str, value: Tensor, step: int = 0, rank: int = 0) -> Entry:
    """Return the entry of a dense tensor."""
    dtype = str(value.dtype).removeprefix("torch.")
    return Entry(site, step, rank, dtype, tuple(value.shape), nbytes=value.numel() * value.element_size())


def save_pt(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a `.pt` file of a plain dict."""
    import torch

    with open_for_torch(path) as file:
        torch.save(dict(tensors), file)


def _leaves(name: str, value: Any, depth: int, count: list[int]) -> Iterator[tuple[str, Any]]:
    count[0] += 1
    if count[0] > _MAX_LEAVES or depth > _MAX_DEPTH:
        raise CorruptError("the file nests too deeply or holds too much", got=f"at {name[:200]!r}")
    children: list[tuple[Any, Any]]
    if isinstance(value, Mapping):
        children = list(value.items())
    elif isinstance(value, list | tuple):
        children = list(enumerate(value))
    else:
        yield name or "tensor", value
        return
    for key, child in children:
        yield from _leaves(f"{name}.{key}" if name else str(key), child, depth + 1, count)


def of_number(value: Any) -> Any:
    """Return a number as a tensor without dimensions, of float32 where that holds it: `item()` of such a tensor."""
    import torch

    if isinstance(value, float):
        found = torch.tensor(value, dtype=torch.float32)
        is_held = found.item() == value or math.isnan(value)
        return found if is_held else torch.tensor(value, dtype=torch.float64)
    is_whole = isinstance(value, int) and (value.bit_length() < 64)
    return torch.tensor(value) if is_whole or isinstance(value, complex) else value


def why_not_a_tensor(value: Any) -> str | None:
    """Return why `value` is not given as a tensor, or None."""
    import torch

    if not isinstance(value, torch.Tensor):
        return f"not a tensor: {type(value).__name__}"
    if value.is_quantized or value.is_meta or value.layout != torch.strided:
        kind = "quantized" if value.is_quantized else "meta" if value.is_meta else str(value.layout)
        return f"not a dense tensor: {kind}"
    if value.nbytes > max(value.untyped_storage().nbytes(), _MAX_EXPANDED_BYTES):
        return f"{value.untyped_storage().nbytes()} bytes that are expanded to {value.nbytes}"
    if str(value.dtype).removeprefix("torch.") not in STORED:
        return f"no arithmetic for {value.dtype}"
    return None


TensorFile = TorchFile | SafetensorsFile | NpzFile | NpyFile
KINDS: dict[str, type[TensorFile]] = {
    ".pt": TorchFile,
    ".pth": TorchFile,
    ".safetensors": SafetensorsFile,
    ".npz": NpzFile,
    ".npy": NpyFile,
}
"""The kinds of single files by the ends of their names."""


def why_not_a_file(folder: Path, name: str) -> str | None:
    """Return why `name`, which a dump says is a file in `folder`, is not opened, or None."""
    if Path(name).name != name or "\\" in name or "\0" in name or name in ("", ".", ".."):
        return "its file is outside of the directory"
    try:
        if folder.is_symlink() or (folder / name).is_symlink():
            return "its file is a link, which could leave the directory"
        return None if (folder / name).is_file() else "its file is not there"
    except OSError as error:
        return f"its file cannot be opened: {error.strerror}"
