"""`.pt` and `.pth` files, mapped into memory, with `weights_only=True`: reading one never runs code."""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glassengine.errors import CorruptError
from glassengine.recording.layout import MAX_NAME_BYTES, STORED, Entry
from glassengine.results import Skipped
from glassengine.writing import open_for_torch

# A small file can name one list many times over; these bound what it unfolds to.
_MAX_DEPTH = 64
_MAX_LEAVES = 1_000_000
_MAX_EXPANDED_BYTES = 1 << 34
_MAX_PICKLE_BYTES = 1 << 28


class TorchFile:
    """Tensors of a `.pt` file; nested dicts, lists and tuples are flattened to dotted names.

    Raises:
        CorruptError: The file is damaged, would run code, or cannot be mapped.
    """

    complete = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._tensors: dict[str, Tensor] = {}
        entries: list[Entry] = []
        skipped: list[Skipped] = []
        for name, value in _leaves("", load_torch(path, str(path)), 0, [0]):
            reason = "two entries have this name" if name in self._tensors else why_not_a_tensor(value)
            if reason is not None:
                skipped.append(Skipped(name, "both", reason, step=0))
                continue
            self._tensors[name] = value
            dtype = str(value.dtype).removeprefix("torch.")
            nbytes = value.numel() * value.element_size()
            entries.append(Entry(name, 0, 0, dtype, tuple(value.shape), nbytes=nbytes))
        self.entries = tuple(entries)
        self.skipped = tuple(skipped)

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`, mapped."""
        return self._tensors[entry.site]


def save_pt(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a `.pt` file of a plain dict.

    Raises:
        OSError: It cannot be written, for want of room, say.
    """
    with open_for_torch(path) as file:
        torch.save(dict(tensors), file)


def load_torch(file: Path | io.BytesIO, name: str) -> Any:
    """Return what `torch.save` wrote, tensors and plain values only; a file is mapped.

    Args:
        file: The file, or its bytes.
        name: What to call it in an error.

    Raises:
        CorruptError: It is damaged, would run code, or cannot be mapped.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            # torch.save stores; a compressed member could unfold to any size.
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise CorruptError("not a file that torch.save wrote", got=f"{name}: compressed members")
            _refuse_to_fill_memory(archive, name)
        if not isinstance(file, Path):
            file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, Path))
    except zipfile.BadZipFile as error:
        raise CorruptError(
            "not a file that torch.save wrote",
            got=f"{name}: {error}",
            hint="a file of torch 1.5 or older cannot be mapped: load it and save it again",
        ) from error
    except pickle.UnpicklingError as error:
        raise CorruptError(
            "the file holds more than tensors and plain values, and reading it would run code",
            got=f"{name}: {_refused(error)}",
            hint="save only tensors: torch.save({name: tensor}, path)",
        ) from error
    except CorruptError:
        raise
    except Exception as error:  # a hostile pickle can raise anything
        raise CorruptError("the file cannot be read", got=f"{name}: {error}") from error


def _refuse_to_fill_memory(archive: zipfile.ZipFile, name: str) -> None:
    """Refuse what torch lets through and what no tensor needs: `bytearray(10**12)` asks for that much memory.

    Raises:
        CorruptError: The pickle calls it, or is too large to be searched.
    """
    for member in archive.infolist():
        if member.filename.endswith(".pkl"):
            if member.file_size > _MAX_PICKLE_BYTES:
                raise CorruptError("the file describes too much", got=f"{name}: {member.file_size} bytes of pickle")
            data = archive.read(member)
            if b"\nbytearray\n" in data:
                raise CorruptError("the file holds more than tensors and plain values", got=f"{name}: a bytearray")
            # torch searches its message, which quotes such a text, in time that grows with the square of its length.
            if max(map(len, data.split()), default=0) > MAX_NAME_BYTES and _longest_text(data) > MAX_NAME_BYTES:
                raise CorruptError(
                    "a name in the file is too long", got=name, expected=f"at most {MAX_NAME_BYTES} bytes"
                )


def _longest_text(data: bytes) -> int:
    """Return the length of the longest text in a pickle, which is not run."""
    return max((len(arg) for _, arg, _ in pickletools.genops(data) if isinstance(arg, str | bytes)), default=0)


def _refused(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "WeightsUnpickler error" in line]
    return lines[0] if lines else str(error).splitlines()[0]


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


def why_not_a_tensor(value: Any) -> str | None:
    """Return why `value` is not given as a tensor, or None."""
    if not isinstance(value, Tensor):
        return f"not a tensor: {type(value).__name__}"
    if value.is_quantized or value.is_meta or value.layout != torch.strided:
        kind = "quantized" if value.is_quantized else "meta" if value.is_meta else str(value.layout)
        return f"not a dense tensor: {kind}"
    if value.nbytes > max(value.untyped_storage().nbytes(), _MAX_EXPANDED_BYTES):
        return f"{value.untyped_storage().nbytes()} bytes that are expanded to {value.nbytes}"
    if str(value.dtype).removeprefix("torch.") not in STORED:
        return f"no arithmetic for {value.dtype}"
    return None
