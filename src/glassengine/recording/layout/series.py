"""The file of a watched run, `series.log`: a few numbers of every site in every step, and what was recorded when.

Its frames are like those of the index: payload length (u32), CRC-32 of the payload (u32), payload; little-endian. A
payload is a JSON object, or a row:

    bytes       meaning
    0-3         2, 0, 0, 0
    4-7         first column of the row; a step with many columns has several rows
    8-15        step
    16-23       seconds since 1970 (float64)
    24-27       number of columns n
    28-31       0
    then        n states (u8, see `ABSENT` to `UNMEASURED`), then n values (float32)

JSON objects are: `{"columns": [[name, kind], ...]}`, which numbers on from the columns before, `kind` being "norm" or
"number"; `{"step", "nonfinite": [[column, count, norm of the others], ...]}` ahead of the rows of a step that has such
elements, with a count of -1 where it is not known; `{"event": step, "why", "recorded", "missing"}` for values that a
trigger has had recorded; `{"note": text}`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from glassengine.recording.layout.records import decoded, framed, read_payload

ABSENT, MEASURED, NONFINITE, UNMEASURED = range(4)
"""What a row says of a column: not in this step; a value; NaN or infinite elements; there, but not measured."""
ROW_COLUMNS = 1 << 16
"""A step with more columns has several rows."""
MAX_COLUMNS = 1 << 20

Array = np.typing.NDArray[Any]

_ROW = struct.Struct("<B3xIQdI4x")
_KIND = 2
_BYTES_OF_COLUMN = 5


def row_frames(step: int, time: float, states: Array, values: Array) -> list[bytes]:
    """Return the frames of one step.

    Args:
        step: Its number.
        time: Seconds since 1970.
        states: [columns], uint8.
        values: [columns], float32.
    """
    found = []
    for first in range(0, max(len(states), 1), ROW_COLUMNS):
        some = slice(first, first + ROW_COLUMNS)
        head = _ROW.pack(_KIND, first, step, time, len(states[some]))
        payload = head + states[some].tobytes() + values[some].tobytes()
        found.append(framed(payload))
    return found


def read_payloads(file: BinaryIO) -> Iterator[dict[str, Any] | tuple[int, int, float, Array, Array]]:
    """Yield what the frames of an open file hold, up to the first damaged one: objects, and rows.

    A row is (step, first column, time, states, values).

    Raises:
        ValueError: (On the way) the file is damaged; says how.
    """
    while (payload := read_payload(file)) is not None:
        yield _row(payload) if payload[:1] == bytes([_KIND]) else decoded(payload)


def _row(payload: bytes) -> tuple[int, int, float, Array, Array]:
    if len(payload) < _ROW.size:
        raise ValueError("a row without a head")
    _, first, step, time, count = _ROW.unpack_from(payload)
    if len(payload) != _ROW.size + _BYTES_OF_COLUMN * count or first + count > MAX_COLUMNS:
        raise ValueError("a row of another length than it claims")
    states = np.frombuffer(payload, np.uint8, count, _ROW.size)
    values = np.frombuffer(payload, "<f4", count, _ROW.size + count)
    if count and states.max() > UNMEASURED:
        raise ValueError("a row with an unknown state")
    return step, first, time, states, values
