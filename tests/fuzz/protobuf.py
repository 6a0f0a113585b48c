"""Fields of a message of Protocol Buffers by their place, without its definition: one is changed, the rest is right.

A place is a list of indexes: of a field, then of a field of the message in it, and so on.
"""

from __future__ import annotations

import random
from typing import Any

Field = tuple[int, int, Any]
"""Number, wire type, and value: an int, or bytes."""

_FIXED = {1: 8, 5: 4}


def fields(data: bytes) -> list[Field]:
    """Return the fields of a message.

    Raises:
        ValueError: It is none.
    """
    found: list[Field] = []
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise ValueError("no number")
        if wire == 0:
            value, place = _varint(data, place)
            found.append((number, wire, value))
            continue
        length = _FIXED.get(wire)
        if wire == 2:
            length, place = _varint(data, place)
        if length is None or place + length > len(data):
            raise ValueError("no such kind, or too long")
        found.append((number, wire, data[place : place + length]))
        place += length
    return found


def written(message: list[Field]) -> bytes:
    """Return the bytes of a message."""
    found = bytearray()
    for number, wire, value in message:
        found += _written(number << 3 | wire)
        if wire == 0:
            found += _written(value)
            continue
        if wire == 2:
            found += _written(len(value))
        found += value
    return bytes(found)


def changed(data: bytes, path: list[int], how: str, value: Any) -> bytes:
    """Return a message with the field at `path` changed: "delete", "twice", "varint" or "bytes" (hex) as its value.

    Raises:
        ValueError: It is no message.
        IndexError: There is no such field.
    """
    message = fields(data)
    at, rest = path[0], path[1:]
    number, wire, old = message[at]
    if rest and not isinstance(old, bytes):
        raise IndexError("no message")
    if rest:
        message[at] = (number, wire, changed(old, rest, how, value))
    elif how == "delete":
        del message[at]
    elif how == "twice":
        message.insert(at, message[at])
    elif how == "varint":
        message[at] = (number, 0, value)
    else:
        text = value if isinstance(value, str) else value[0] * value[1]
        message[at] = (number, 2, bytes.fromhex(text))
    return written(message)


def some_field(data: bytes, chance: random.Random) -> tuple[list[int], int]:
    """Return the place and the wire type of a field that is chosen by chance, most often a deep one.

    Raises:
        ValueError: It is no message.
    """
    path: list[int] = []
    message = fields(data)
    while True:
        at = chance.randrange(len(message))
        path.append(at)
        _, wire, value = message[at]
        if wire != 2 or not value or len(value) > 1 << 20 or chance.random() < 0.1:
            return path, wire
        try:
            message = fields(value)
        except ValueError:
            return path, wire


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            break
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise ValueError("no varint")


def _written(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
