"""CRC-32 as zlib computes it, ten times as fast by zlib-ng; and what JSON documents say of themselves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:  # where it was not installed along; the values are the same
    from zlib import crc32

__all__ = ["crc32", "crc32_joined", "crc32_of_small", "document_checksum"]

# Up to here neither library lets go of the interpreter lock.
_LOCKED_BYTES = 5 << 10


def crc32_of_small(data: memoryview, value: int = 0) -> int:
    """Return the CRC-32 of bytes, some hundred kilobytes at most, without letting go of the interpreter lock.

    Other threads that run Python wait a few microseconds; handing the lock over to it and back takes ten times as long.
    `value` is that of the bytes before.
    """
    for start in range(0, len(data), _LOCKED_BYTES):
        value = crc32(data[start : start + _LOCKED_BYTES], value)
    return value


def crc32_joined(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of bytes, of whose consecutive parts the CRC-32 and the number of bytes are given.

    Zeros behind a message multiply it by a power of x, modulo the polynomial of the checksum; what is initial and final
    in CRC-32 cancels out.
    """
    joined = 0
    for checksum, num_bytes in parts:
        joined = _times(_power_of_x(8 * num_bytes), joined) ^ checksum
    return joined


_POLYNOMIAL = 0xEDB88320  # the least significant bit is that of the largest power


def _times(a: int, b: int) -> int:
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        bit >>= 1
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _power_of_x(exponent: int) -> int:
    result, square = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            result = _times(square, result)
        square = _times(square, square)
        exponent >>= 1
    return result


def document_checksum(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON document, as it is after reading; its layout and the order of keys do not count."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
