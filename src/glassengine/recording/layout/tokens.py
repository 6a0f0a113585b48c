"""Token ids of each step, as frames of the index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from glassengine.recording.layout import frames
from glassengine.recording.layout.layout import (
    MAX_ROWS,
)
from glassengine.recording.layout.records import frame, is_size

_TOKENS_PER_FRAME = 1 << 15


# Frames of one token each take 40 bytes, and are read a hundred times as fast.
MAX_FIXED_ROWS = 8


def token_frames(step: int, rows: Sequence[Sequence[int]]) -> Iterator[bytes]:
    """Yield the index frames of a step's token ids: one for each of a few rows that were given one, as in decoding."""
    if len(rows) <= MAX_FIXED_ROWS and all(
        len(ids) == 1 and type(ids[0]) is int and 0 <= ids[0] < 1 << 62 for ids in rows
    ):
        yield from (frames.token_frame(row, step, ids[0]) for row, ids in enumerate(rows))
    else:
        yield from map(frame, _token_payloads(rows))


def _token_payloads(rows: Sequence[Sequence[int]]) -> Iterator[dict[str, Any]]:
    """Yield the payloads of frames with pieces of rows, each well below `MAX_FRAME_BYTES`."""
    pieces: list[tuple[int, list[int]]] = []
    room = _TOKENS_PER_FRAME
    for row, ids in enumerate(rows):
        left = list(ids)
        while left:
            pieces.append((row, left[:room]))
            left = left[room:]
            # One more, for the row's number and brackets.
            room -= len(pieces[-1][1]) + 1
            if room <= 0:
                yield {"kind": "tokens", "rows": pieces}
                pieces, room = [], _TOKENS_PER_FRAME
    if pieces:
        yield {"kind": "tokens", "rows": pieces}


def tokens_from(payload: dict[str, Any]) -> list[tuple[int, list[int]]]:
    """Inverse of one of `_token_payloads`, which trusts nothing.

    Raises:
        ValueError: It is not a list of rows of token ids.
    """
    pieces = payload.get("rows")
    if not isinstance(pieces, list):
        raise ValueError("token ids are not rows")
    for piece in pieces:
        if not isinstance(piece, list) or len(piece) != 2 or not is_size(piece[0]) or piece[0] >= MAX_ROWS:
            raise ValueError("token ids are not in a row")
        if not isinstance(piece[1], list) or not all(isinstance(token, int) for token in piece[1]):
            raise ValueError("a token id is not a number")
    return [(row, ids) for row, ids in pieces]


def append_tokens(rows: list[list[int]], pieces: Iterable[tuple[int, Sequence[int]]]) -> None:
    """Append each piece to its row of `rows`, which grows to hold it."""
    for row, ids in pieces:
        while len(rows) <= row:
            rows.append([])
        rows[row].extend(ids)
