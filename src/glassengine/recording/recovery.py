"""Reads `index.log` up to its last good record, believing nothing that the bytes do not prove."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from glassengine.recording.layout import Entry, LeftOut, Location
from glassengine.recording.records import (
    append_tokens,
    entry_from,
    group_from,
    left_out_from,
    location_from,
    measured_from,
    read_frame,
    sizes_of,
    tokens_from,
)

# A block record of a hundred bytes stands for up to 512 tensors; what they take in memory has a limit.
MAX_ENTRIES = 1 << 24


@dataclass(frozen=True)
class IndexContents:
    """What an index proves.

    Attributes:
        steps: Completed steps in order of commit.
        entries: Their tensors.
        left_out: Their tensors without values.
        stopped: Steps that ended before they were through -> what stopped them.
        token_ids: Of the completed steps, by row of the batch.
        damage: Why reading stopped early.
    """

    steps: tuple[int, ...]
    entries: tuple[Entry, ...]
    left_out: tuple[LeftOut, ...]
    stopped: dict[int, str]
    token_ids: list[list[int]]
    damage: str | None


def read_index(file: BinaryIO, shard_bytes: Mapping[int, int]) -> IndexContents:
    """Read the index up to the first record that is damaged, impossible, or whose bytes are not there.

    Args:
        file: The open index.
        shard_bytes: Data bytes on file of each shard.
    """
    steps: list[int] = []
    entries: list[Entry] = []
    left_out: list[LeftOut] = []
    stopped: dict[int, str] = {}
    groups: dict[int, list[Entry]] = {}
    pending: list[Entry] = []
    pending_left_out: list[LeftOut] = []
    tokens: list[list[int]] = []
    pending_tokens: list[tuple[int, list[int]]] = []
    extents = _Extents(shard_bytes)
    damage = None
    try:
        while (payload := read_frame(file)) is not None:
            kind = payload.get("kind")
            if kind == "tensor":
                entry = entry_from(payload)
                assert entry.location is not None
                extents.claim(entry.location, entry.nbytes, f"{entry.site[:200]!r} (step {entry.step})")
                pending.append(entry)
            elif kind == "commit":
                step = _committed(payload, pending, pending_left_out, steps)
                steps.append(step)
                if payload.get("stopped") is not None:
                    stopped[step] = str(payload["stopped"])
                entries += pending
                left_out += pending_left_out
                append_tokens(tokens, pending_tokens)
                pending, pending_left_out, pending_tokens = [], [], []
            elif kind == "group":
                (number,) = sizes_of(payload, "group")
                groups[number] = group_from(payload)
            elif kind == "block":
                pending += _block(payload, groups, extents)
                if len(entries) + len(pending) > MAX_ENTRIES:
                    raise ValueError(f"more than {MAX_ENTRIES} tensors")
            elif kind == "left_out":
                pending_left_out.append(left_out_from(payload))
            elif kind == "measured":
                pending_left_out += measured_from(payload, groups)
                if len(left_out) + len(pending_left_out) > MAX_ENTRIES:
                    raise ValueError(f"more than {MAX_ENTRIES} tensors")
            elif kind == "tokens":
                pending_tokens += tokens_from(payload)
            else:
                raise ValueError(f"unknown kind of record {kind!r}")
    except ValueError as error:
        damage = str(error)
    if damage is None and pending:
        damage = f"step {pending[0].step} was not completed"
    return IndexContents(tuple(steps), tuple(entries), tuple(left_out), stopped, tokens, damage)


def _committed(payload: dict[str, Any], pending: list[Entry], left_out: list[LeftOut], steps: list[int]) -> int:
    step = payload.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0 or step in steps:
        raise ValueError(f"impossible step {step!r}")
    counts = (payload.get("num_tensors"), payload.get("num_left_out", 0))
    if counts != (len(pending), len(left_out)) or any(
        other != step for other in [*(entry.step for entry in pending), *(item.step for item in left_out)]
    ):
        raise ValueError(f"the records of step {step} do not match its commit")
    if len({(entry.site, entry.rank) for entry in pending}) != len(pending):
        raise ValueError(f"step {step} names a tensor twice")
    return step


def _block(payload: dict[str, Any], groups: dict[int, list[Entry]], extents: _Extents) -> list[Entry]:
    """Return the tensors of a block."""
    number, step = sizes_of(payload, "group", "step")
    if number not in groups:
        raise ValueError(f"group {number} is not described")
    tensors = groups[number]
    place = location_from(payload)
    nbytes = max(tensor.location.offset + tensor.nbytes for tensor in tensors if tensor.location is not None)
    extents.claim(place, nbytes, f"group {number} (step {step})")
    block = (place.offset, nbytes)
    found = []
    for tensor in tensors:
        assert tensor.location is not None
        location = Location(place.shard, place.offset + tensor.location.offset, place.checksum, block)
        found.append(
            Entry(
                tensor.site,
                step,
                tensor.rank,
                tensor.dtype,
                tensor.shape,
                tensor.axes,
                tensor.node,
                tensor.nbytes,
                location,
                tensor.sharding,
            )
        )
    return found


class _Extents:
    """Which bytes of which shard belong to a tensor: ranges are equal (shared values) or apart, never overlapping."""

    def __init__(self, shard_bytes: Mapping[int, int]) -> None:
        self._shard_bytes = shard_bytes
        self._starts: dict[int, list[int]] = {}
        self._found: dict[tuple[int, int], tuple[int, int]] = {}

    def claim(self, location: Location, nbytes: int, what: str) -> None:
        shard, start, checksum = location.shard, location.offset, location.checksum
        end = start + nbytes
        if end > self._shard_bytes.get(shard, -1):
            raise ValueError(f"the bytes of {what} are not on file")
        if nbytes == 0 or self._found.get((shard, start)) == (end, checksum):
            return
        starts = self._starts.setdefault(shard, [])
        place = bisect.bisect_left(starts, start)
        if (place > 0 and self._found[shard, starts[place - 1]][0] > start) or (
            place < len(starts) and starts[place] < end
        ):
            raise ValueError(f"the bytes of {what} overlap another tensor's")
        starts.insert(place, start)
        self._found[shard, start] = (end, checksum)
