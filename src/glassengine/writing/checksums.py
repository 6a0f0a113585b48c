"""CRC-32 as zlib computes it, ten times as fast by zlib-ng; and what JSON documents say of themselves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:  # where it was not installed along; the values are the same
    from zlib import crc32

__all__ = ["crc32", "crc32_of_small", "document_checksum"]

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


def document_checksum(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON document, as it is after reading; its layout and the order of keys do not count."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
