"""A GGUF file, read within bounds: everything that it says is checked before anyone relies on it.

    magic "GGUF", version, number of tensors, number of settings      little-endian; strings have their length in front
    settings       name, kind, value; an array is a kind, a number and values
    tensors        name, number of dimensions, sizes (fastest first), type, offset of its bytes
    bytes          from the next multiple of `general.alignment` on

llama.cpp reads the same file in C. Sizes that do not fit the file, offsets outside of it, names that appear twice and
numbers that it divides by are refused here.
"""

from __future__ import annotations

import itertools
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from glassengine.errors import CorruptError, GlassError, UsageError
from glassengine.plugins.serving.ggml.types import TYPES, TensorType
from glassengine.reading.files import open_regular, shown

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_HEADER = 1 << 28
_MOST_TENSORS = 1 << 17
_MOST_SETTINGS = 1 << 16
_MOST_NAME = 1 << 16
_MOST_KEPT = 1 << 12
_MOST_ALIGNMENT = 1 << 20
_LONGEST_TENSOR_NAME = 63
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Many:
    """An array that is too long to be kept: the tokens of a vocabulary."""

    number: int


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file.

    Attributes:
        name: As llama.cpp knows it.
        shape: Sizes, the fastest last.
        type: How its numbers are stored.
        offset: Of its bytes in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) // self.type.block * self.type.block_bytes


class GgufFile:
    """Settings and tensors of a GGUF file.

    Attributes:
        settings: Name -> number, text, list, or `Many`.
        tensors: Name -> tensor, in the order of the file.

    Raises:
        UsageError: There is no such file.
        CorruptError: It is damaged, or says what cannot be.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with open_regular(self.path) as file:
            self.size = os.fstat(file.fileno()).st_size
            try:
                self.settings, self.tensors = _header(file, self.size)
            except GlassError:
                raise
            except (ValueError, struct.error, UnicodeDecodeError, OverflowError) as error:
                raise CorruptError(
                    "the GGUF file is damaged", got=f"{shown(self.path)}: {str(error)[:300]}", hint="convert it again"
                ) from error
        split = self.settings.get("split.count")
        if isinstance(split, int) and split > 1:
            raise UsageError(
                "the GGUF file is one of several",
                got=f"{shown(self.path)}: {split} files",
                hint="llama-gguf-split --merge",
            )

    @property
    def architecture(self) -> str:
        """What llama.cpp calls the kind of model."""
        return str(self.settings.get("general.architecture"))

    @property
    def encodes(self) -> bool:
        """Whether every token sees all others, and none follows."""
        return self.settings.get(f"{self.architecture}.attention.causal") is False

    def number(self, name: str) -> float | int | None:
        """Return a number among the settings of the architecture; of one for each layer the first."""
        found = self.settings.get(f"{self.architecture}.{name}")
        if isinstance(found, list):
            found = found[0] if found else None
        return found if isinstance(found, (int, float)) and not isinstance(found, bool) else None


class _Cursor:
    """Reads the header forwards, and never further than the file or the limit."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self.at = 0
        self.end = min(size, _MOST_HEADER)

    def take(self, number: int) -> bytes:
        if number < 0 or number > self.end - self.at:
            what = "ends" if self.end < _MOST_HEADER else f"goes on after {_MOST_HEADER >> 20} MB"
            raise ValueError(f"its header {what} in byte {self.at:,}, where {number:,} more are announced")
        self.at += number
        found = self._file.read(number)
        if len(found) != number:
            raise ValueError("it became shorter while it was read")
        return found

    def number(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        return struct.unpack(f"<{code}", self.take(size))[0]

    def text(self, most: int) -> str:
        length = self.number("Q")
        if length > most:
            raise ValueError(f"a text of {length:,} bytes in byte {self.at:,}")
        return self.take(length).decode("utf-8", "surrogateescape")

    def pass_texts(self, number: int) -> None:
        """Pass over the texts of an array: vocabularies have hundreds of thousands, of which none is kept."""
        read = self._file.read
        for _ in range(number):
            length = int.from_bytes(read(8), "little")
            self.at += 8 + length
            if self.at > self.end or len(read(length)) != length:
                raise ValueError(f"a text of {length:,} bytes in byte {self.at - length:,}")


def _header(file: BinaryIO, size: int) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    cursor = _Cursor(file, size)
    if (magic := cursor.take(min(4, size))) != _MAGIC:
        raise ValueError(f"it begins with {magic!r}, not {_MAGIC!r}")
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise ValueError(f"version {version}; versions {_VERSIONS} are read")
    num_tensors, num_settings = cursor.number("Q"), cursor.number("Q")
    if num_tensors > _MOST_TENSORS or num_settings > _MOST_SETTINGS:
        raise ValueError(f"{num_tensors:,} tensors and {num_settings:,} settings")
    settings: dict[str, Any] = {}
    for _ in range(num_settings):
        name = cursor.text(_MOST_NAME)
        if name in settings:
            raise ValueError(f"the setting {name!r} appears twice")
        settings[name] = _value(cursor, cursor.number("I"))
    _check(settings)
    found = [_tensor(cursor) for _ in range(num_tensors)]
    alignment = settings.get("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    return settings, _placed(found, start, alignment, size)


def _value(cursor: _Cursor, kind: int) -> Any:
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind])
    if kind == _STRING:
        return cursor.text(cursor.end)
    if kind != _ARRAY:
        raise ValueError(f"a setting of the unknown kind {kind}")
    kind, number = cursor.number("I"), cursor.number("Q")
    if kind == _STRING:
        if number > (cursor.end - cursor.at) // 8:
            raise ValueError(f"an array of {number:,} texts in byte {cursor.at:,}")
        if number <= _MOST_KEPT:
            return [cursor.text(cursor.end) for _ in range(number)]
        cursor.pass_texts(number)
        return Many(number)
    if kind not in _SCALARS:
        raise ValueError(f"an array of the kind {kind}")
    code = _SCALARS[kind]
    data = cursor.take(number * struct.calcsize(f"<{code}"))
    return list(struct.unpack(f"<{number}{code}", data)) if number <= _MOST_KEPT else Many(number)


def _tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], TensorType, int]:
    name = cursor.text(_LONGEST_TENSOR_NAME)
    num_dims = cursor.number("I")
    if not 1 <= num_dims <= 4:
        raise ValueError(f"the tensor {name!r} has {num_dims} dimensions")
    sizes = [cursor.number("Q") for _ in range(num_dims)]
    kind, offset = cursor.number("I"), cursor.number("Q")
    if kind not in TYPES:
        raise ValueError(f"the tensor {name!r} is of the unknown type {kind}")
    if any(not 0 < one < 1 << 40 for one in sizes) or math.prod(sizes) >= 1 << 48:
        raise ValueError(f"the tensor {name!r} has the sizes {sizes}")
    if sizes[0] % TYPES[kind].block:
        raise ValueError(f"rows of {sizes[0]} of the tensor {name!r} are no blocks of {TYPES[kind].block}")
    return name, tuple(reversed(sizes)), TYPES[kind], offset


def _placed(
    tensors: list[tuple[str, tuple[int, ...], TensorType, int]], start: int, alignment: int, size: int
) -> dict[str, GgufTensor]:
    placed: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in tensors:
        if name in placed:
            raise ValueError(f"the tensor {name!r} appears twice")
        one = GgufTensor(name, shape, kind, start + offset)
        if offset % alignment or one.offset + one.num_bytes > size:
            raise ValueError(f"the bytes of the tensor {name!r} are not in the file: {offset:,} and {one.num_bytes:,}")
        placed[name] = one
    places = sorted(placed.values(), key=lambda one: one.offset)
    for one, following in itertools.pairwise(places):
        if one.offset + one.num_bytes > following.offset:
            raise ValueError(f"the tensors {one.name!r} and {following.name!r} share bytes")
    return placed


_LIMITS = {
    "block_count": 1 << 12,
    "context_length": 1 << 31,
    "embedding_length": 1 << 24,
    "feed_forward_length": 1 << 26,
    "attention.head_count": 1 << 16,
    "attention.head_count_kv": 1 << 16,
    "attention.key_length": 1 << 20,
    "attention.value_length": 1 << 20,
    "rope.dimension_count": 1 << 20,
    "vocab_size": 1 << 28,
}
"""Sizes that llama.cpp allocates by or divides by."""


def _check(settings: Mapping[str, Any]) -> None:
    alignment = settings.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
        raise ValueError(f"an alignment of {alignment!r}")
    kind = settings.get("general.architecture")
    if not isinstance(kind, str) or not kind.isascii() or not 0 < len(kind) < 64:
        raise ValueError(f"the architecture {kind!r}")
    for name, most in _LIMITS.items():
        value = settings.get(f"{kind}.{name}")
        for one in value if isinstance(value, list) else [value]:
            is_layer_without = isinstance(value, list) and one == 0
            if one is not None and (type(one) is not int or not (0 < one <= most or is_layer_without)):
                raise ValueError(f"{kind}.{name} is {one!r}")
    heads = settings.get(f"{kind}.attention.head_count")
    of_keys = settings.get(f"{kind}.attention.head_count_kv")
    if isinstance(heads, int) and isinstance(of_keys, int) and heads % of_keys:
        raise ValueError(f"{heads} heads share {of_keys} heads of keys")
    experts, used = (settings.get(f"{kind}.{name}") for name in ("expert_count", "expert_used_count"))
    if experts and (type(experts) is not int or type(used) is not int or not 0 < used <= experts <= 1 << 12):
        raise ValueError(f"{used!r} of {experts!r} experts")
