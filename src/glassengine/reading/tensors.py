"""Files of tensors: safetensors, `torch.save` with `weights_only=True`, and numpy. Reading one never runs code.

Headers of numpy are bounded before they are parsed, and a small archive does not unfold to a large one.
"""

from __future__ import annotations

import errno
import io
import math
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np

from glassengine.errors import CorruptError, GlassError
from glassengine.reading.files import open_regular, shown

if TYPE_CHECKING:
    from torch import Tensor


# torch searches its messages, which quote names, in time that grows with the square of their length.
_MAX_NAME_BYTES = 1 << 14
_MAX_PICKLE_BYTES = 1 << 28
# The order of bytes, versions and ids: a few letters each. torch quotes what it does not know, all of it.
_MAX_NOTE_BYTES = 1 << 12
_TENSOR_DATA = re.compile(r"[^/]+/data/\d+")
_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_OLD_PICKLES = 5
# A small file can name one list many times over; these bound what it unfolds to.
_MAX_DEPTH = 64
_MAX_LEAVES = 400_000  # each takes 2 KB until it is shown
MAX_EXPANDED_BYTES = 1 << 30
"""Most bytes of a tensor that repeats what it has in memory."""
# The number of the system's error, as torch and the library of safetensors end their messages.
_INTERRUPTED = re.compile(rf"\((os error )?{errno.EINTR}\)$")
_MOST_SIGNALS = 100

_T = TypeVar("_T")


def open_safetensors(path: str | Path, *, inside: str | Path | None = None, framework: str = "pt") -> Any:
    """Return an open safetensors file, mapped: `keys()`, `metadata()`, `get_tensor(key)`.

    Raises:
        UsageError: Without `inside`: there is no such file.
        CorruptError: With `inside`: the same. It is damaged.
    """
    from safetensors import SafetensorError, safe_open

    open_regular(path, inside=inside).close()
    path = _copied(path)
    try:
        return uninterrupted(lambda: safe_open(path, framework=framework))
    # The last two: it cannot be mapped.
    except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
        raise CorruptError("not a safetensors file", got=f"{shown(path)}: {shown(str(error))[:400]}") from error


def _copied(path: str | Path) -> Path:
    """Return a path of this machine, for libraries that map a file."""
    from glassengine.reading.copies import here

    return here(path)


def uninterrupted(read: Callable[[], _T]) -> _T:
    """Return what a library reads; again where a signal interrupts it, which Python handles in its own calls only."""
    for _ in range(_MOST_SIGNALS):
        try:
            return read()
        except Exception as error:
            if not _INTERRUPTED.search(str(error)):
                raise
    return read()


def read_safetensors(path: str | Path, *, inside: str | Path | None = None) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, mapped.

    Raises:
        UsageError: As for `open_safetensors`.
        CorruptError: As for `open_safetensors`.
    """
    from safetensors import SafetensorError

    with open_safetensors(path, inside=inside) as file:
        try:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise CorruptError("not a safetensors file", got=f"{shown(path)}: {shown(str(error))[:400]}") from error


def read_torch(
    file: str | Path | io.BytesIO, *, name: str | None = None, inside: str | Path | None = None, old: bool = False
) -> Any:
    """Return what `torch.save` wrote, tensors and plain values only; a file is mapped.

    Raises:
        UsageError: Without `inside`: there is no such file.
        CorruptError: It is damaged, would run code, or fills memory.
    """
    import torch

    where = shown(name if name is not None else str(file))
    try:
        if isinstance(file, io.BytesIO):
            _check_archive(file, where)
            file.seek(0)
            return _bare(torch.load(file, map_location="cpu", weights_only=True))
        copy = _copied(file)
        with open_regular(copy, inside=inside if copy == Path(file) else None) as opened:
            if old and opened.read(4) != b"PK\x03\x04":
                return _bare(_read_old(opened, where))
            opened.seek(0)
            _check_archive(opened, where)
        return _bare(uninterrupted(lambda: torch.load(copy, map_location="cpu", weights_only=True, mmap=True)))
    except zipfile.BadZipFile as error:
        raise CorruptError(
            "not a file that torch.save wrote",
            got=f"{where}: {shown(str(error))}",
            hint="a file of torch 1.5 or older cannot be mapped: load it and save it again",
        ) from error
    except pickle.UnpicklingError as error:
        raise CorruptError(
            "the file holds more than tensors and plain values, and reading it would run code",
            got=f"{where}: {_refused(error)}",
            hint="save only tensors: torch.save({name: tensor}, path)",
        ) from error
    except GlassError:
        raise
    except Exception as error:  # a hostile pickle can raise anything
        raise CorruptError("the file cannot be read", got=f"{where}: {shown(str(error))[:400]}") from error


def _bare(value: Any) -> Any:
    """Return what was read without attributes of tensors and dicts: one called "numel" or "items" hides the method."""
    import torch

    waiting, seen = [value], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, dict) or type(one) in (torch.Tensor, torch.nn.Parameter):
            getattr(one, "__dict__", {}).clear()
        if isinstance(one, torch.Tensor) and one._backward_hooks:
            one._backward_hooks = None
        held = one.values() if isinstance(one, dict) else one if isinstance(one, list | tuple) else ()
        waiting += [item for item in held if isinstance(item, dict | list | tuple | torch.Tensor)]
    return value


def check_unfolded(value: Any, where: str) -> None:
    """Refuse what a file unfolds to where that is out of proportion: depth, number of values, repeated elements.

    Raises:
        CorruptError: It nests too deeply or holds too much.
    """
    import torch

    waiting: list[tuple[Any, int]] = [(value, 0)]
    count = 0
    while waiting:
        item, depth = waiting.pop()
        count += 1
        if count > _MAX_LEAVES or depth > _MAX_DEPTH:
            raise CorruptError("the file nests too deeply or holds too much", got=shown(where))
        if isinstance(item, Mapping):
            waiting += [(child, depth + 1) for child in item.values()]
        elif isinstance(item, list | tuple):
            waiting += [(child, depth + 1) for child in item]
        elif isinstance(item, torch.Tensor) and item.layout is not torch.strided:
            raise CorruptError("a tensor of the file is not dense", got=f"{shown(where)}: {item.layout}")
        elif isinstance(item, torch.Tensor) and item.nbytes > max(item.untyped_storage().nbytes(), MAX_EXPANDED_BYTES):
            got = f"{shown(where)}: {item.untyped_storage().nbytes():,} bytes that are expanded to {item.nbytes:,}"
            raise CorruptError("a tensor of the file repeats too much", got=got)


def _read_old(file: io.BufferedReader, where: str) -> Any:
    """Read a file of the format before zip archives: pickles, and then the bytes of the tensors."""
    import torch

    file.seek(0)
    head = io.BytesIO(file.read(_MAX_PICKLE_BYTES))
    if not head.getvalue().startswith(_OLD):
        raise zipfile.BadZipFile("neither an archive nor of the format before archives")
    for _ in range(_OLD_PICKLES):  # their marks, what is stored, and the names of what follows
        names = [arg for _, arg, _ in pickletools.genops(head) if isinstance(arg, str)]
        if any(_is(name, "bytearray") for name in names):
            raise CorruptError("the file holds more than tensors and plain values", got=f"{where}: a bytearray")
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def _check_archive(file: Any, where: str) -> None:
    """Refuse what torch lets through and what no tensor needs: `bytearray(10**12)` asks for that much memory.

    Raises:
        CorruptError: The pickle calls it, or is too large to be searched; a member is compressed.
    """
    with zipfile.ZipFile(file) as archive:
        # torch.save stores; a compressed member could unfold to any size.
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise CorruptError("not a file that torch.save wrote", got=f"{where}: compressed members")
        for member in archive.infolist():
            is_note = not member.filename.endswith(".pkl") and not _TENSOR_DATA.fullmatch(member.filename)
            if is_note and member.file_size > _MAX_NOTE_BYTES:
                got = f"{where}: {member.file_size:,} bytes in {shown(member.filename)}"
                raise CorruptError("unsupported object in a .pt file", got=got)
            if not member.filename.endswith(".pkl"):
                continue
            if member.file_size > _MAX_PICKLE_BYTES:
                raise CorruptError("the file describes too much", got=f"{where}: {member.file_size} bytes of pickle")
            data = archive.read(member)
            if b"bytearray" in data and _names(data, "bytearray"):
                raise CorruptError("the file holds more than tensors and plain values", got=f"{where}: a bytearray")
            if max(map(len, data.split()), default=0) > _MAX_NAME_BYTES and _longest_text(data) > _MAX_NAME_BYTES:
                expected = f"at most {_MAX_NAME_BYTES} bytes"
                raise CorruptError("a name in the file is too long", got=where, expected=expected)


def _names(data: bytes, name: str) -> bool:
    """Say whether a pickle, which is not run, may look `name` up: as a global, or by a text of its own."""
    return any(isinstance(arg, str) and _is(arg, name) for _, arg, _ in pickletools.genops(data))


def _is(arg: str, name: str) -> bool:
    return arg == name or arg.endswith(f" {name}")


def _longest_text(data: bytes) -> int:
    """Return the length of the longest text in a pickle, which is not run."""
    return max((len(arg) for _, arg, _ in pickletools.genops(data) if isinstance(arg, str | bytes)), default=0)


def _refused(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "WeightsUnpickler error" in line]
    return shown(lines[0] if lines else (str(error).splitlines() or [type(error).__name__])[0])


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
    arrays: dict[str, np.ndarray[Any, Any]] = {}
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
            if _filled(data, file) != claimed or name in arrays:
                raise ValueError(f"{name!r} is cut, or there twice")
        array = np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")
        arrays[name] = array.astype(dtype.newbyteorder("="), copy=False)
    return arrays


def _filled(data: bytearray, file: IO[bytes]) -> int:
    """Read into `data`, a piece at a time, and return how much there was: the whole is in memory once."""
    view = memoryview(data)
    size = 0
    while piece := file.read(min(_PIECE_BYTES, len(data) - size)):
        view[size : size + len(piece)] = piece
        size += len(piece)
    return size
