"""Reads `index.log` up to its last good record; what the bytes do not prove is not used.

What the index says is gathered in columns, a row for each block of tensors and for each commit, and then checked as
columns: which record is the first that is impossible. What is before it counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from glassengine.recording.layout.entries import Columns, Described, Entries, LeftOuts, Measured
from glassengine.recording.layout.frames import BLOCK, COMMIT, TOKEN, Array, read_frames
from glassengine.recording.layout.impossible import (
    Blocks,
    Commits,
    impossible_blocks,
    impossible_commits,
    impossible_rows,
)
from glassengine.recording.layout.layout import MAX_ROWS, MAX_SHARD_NUMBER, Entry, LeftOut
from glassengine.recording.layout.records import (
    decoded,
    entry_from,
    group_from,
    left_out_from,
    location_from,
    measured_from,
    sizes_of,
)
from glassengine.recording.layout.tokens import append_tokens, tokens_from

# Entries are made when they are asked for; who asks for all of those of a hostile index must come to an end.
MAX_ENTRIES = 1 << 28


# What records of a fixed size say: field -> type of its column.
_OF_BLOCKS = {"group": np.uint32, "step": np.int64, "place": np.int64, "low": np.int32, "high": np.uint32}
_OF_COMMITS = {"step": np.int64, "place": np.int64, "low": np.uint32}
_OF_TOKENS = {"group": np.int32, "place": np.int64}


@dataclass(frozen=True)
class IndexContents:
    """What an index proves.

    Attributes:
        steps: Completed steps in order of commit.
        entries: Their tensors, ascending by step.
        left_out: Their tensors without values, ascending by step.
        stopped: Steps that ended before they were through -> what stopped them.
        token_ids: Of the completed steps, by row of the batch.
        damage: Why reading stopped early.
    """

    steps: list[int]
    entries: Entries
    left_out: LeftOuts
    stopped: dict[int, str]
    token_ids: list[list[int]]
    damage: str | None


def read_index(file: BinaryIO, shard_bytes: Mapping[int, int]) -> IndexContents:
    """Read the index up to the first record that is damaged, impossible, or whose bytes are not there.

    Args:
        file: The open index.
        shard_bytes: Data bytes on file of each shard.
    """
    found = _Found()
    for frames in read_frames(file):
        found.add_fixed(frames.numbers, frames.fixed)
        for number, text in frames.texts:
            try:
                found.add(number, decoded(text))
            except ValueError as error:
                found.fail(number, str(error))
                break
        if frames.damage is not None:
            found.fail(frames.first + frames.count, frames.damage)
        if found.damage is not None:
            break
    blocks, commits = found.columns()
    found.note(impossible_blocks(blocks, found.groups, shard_bytes, MAX_ENTRIES))
    found.note(impossible_rows(found.left_out))
    left_out = [(record, found.left_out[record]) for record in sorted(found.left_out)]
    found.note(impossible_commits(blocks, commits, found.groups, left_out, MAX_ENTRIES))
    return _contents(blocks, commits, left_out, found)


def _contents(
    blocks: Blocks, commits: Commits, left_out: Sequence[tuple[int, LeftOut | Measured]], found: _Found
) -> IndexContents:
    """Return what is before the first record that is impossible, as far as it is committed."""
    commits = commits.before(found.end)
    last = int(commits.record[-1]) if len(commits.record) else -1
    kept = int(np.searchsorted(blocks.record, last))
    columns, damage = blocks.columns, found.damage
    if damage is None and kept < len(blocks.record):
        damage = f"step {columns.step[kept]} was not completed"
    columns = columns.at(slice(0, kept))
    if kept and bool((np.diff(columns.step) < 0).any()):
        columns = columns.at(np.argsort(columns.step, kind="stable"))
    stopped = {}
    for record, reason in found.stopped.items():
        if record <= last:
            stopped[int(commits.step[np.searchsorted(commits.record, record)])] = reason
    return IndexContents(
        commits.step.tolist(),
        Entries(found.groups, columns),
        LeftOuts(sorted((item for record, item in left_out if record < last), key=lambda item: item.step)),
        stopped,
        found.tokens_before(last),
        damage,
    )


class _Found:
    """What the records of an index say, before it is known to be possible.

    Attributes:
        groups: Each group that is described, and each tensor alone, whose record is a group and its block.
        described: Record that describes each of them.
        left_out: Record -> tensors without values.
        tokens: Record -> pieces of rows.
        stopped: Record of a commit -> what stopped its step.
        damage: Why what is before record `end` is all there is.
    """

    def __init__(self) -> None:
        self.groups: list[Described] = []
        self.described: list[int] = []
        self.left_out: dict[int, LeftOut | Measured] = {}
        self.tokens: dict[int, list[tuple[int, list[int]]]] = {}
        self.stopped: dict[int, str] = {}
        self.damage: str | None = None
        self.end = 1 << 62
        self._numbers: dict[int, int] = {}
        self._alone: dict[object, int] = {}
        self._fixed_blocks: list[list[Array]] = []
        self._fixed_commits: list[list[Array]] = []
        self._fixed_tokens: list[list[Array]] = []
        self._blocks: list[tuple[int, ...]] = []
        self._commits: list[tuple[int, int, int, int]] = []

    def fail(self, record: int, reason: str) -> None:
        """Note that nothing counts from a record on."""
        if record < self.end:
            self.end, self.damage = record, reason

    def note(self, found: tuple[int, str] | None) -> None:
        """Note a record that is impossible, if there is one."""
        if found is not None:
            self.fail(*found)

    def add_fixed(self, records: Array, fixed: Array) -> None:
        """Add records of a fixed size."""
        if not len(records):
            return
        is_block, is_commit, is_token = (fixed["kind"] == kind for kind in (BLOCK, COMMIT, TOKEN))
        large = ((fixed["step"] | fixed["place"]) >> np.uint64(62)) > 0
        large |= is_block & (fixed["low"] > MAX_SHARD_NUMBER)
        large |= is_commit & (fixed["group"] != 0) | ~is_block & (fixed["high"] != 0)
        large |= is_token & ((fixed["group"] >= MAX_ROWS) | (fixed["low"] != 0))
        odd = np.flatnonzero(large)
        if odd.size:
            self.fail(int(records[odd[0]]), "a number is too large")
        for parts, kinds, which in (
            (self._fixed_blocks, _OF_BLOCKS, is_block),
            (self._fixed_commits, _OF_COMMITS, is_commit),
            (self._fixed_tokens, _OF_TOKENS, is_token),
        ):
            some = fixed[which]
            parts.append([records[which], *(some[name].astype(dtype) for name, dtype in kinds.items())])

    def add(self, record: int, payload: dict[str, Any]) -> None:
        """Add any other record.

        Raises:
            ValueError: It is impossible.
        """
        kind = payload.get("kind")
        if kind == "tensor":
            entry = entry_from(payload)
            place = entry.location
            assert place is not None
            self._blocks.append(
                (record, self._alone_as(record, entry), entry.step, place.offset, place.shard, place.checksum)
            )
        elif kind == "commit":
            step, num_tensors = sizes_of(payload, "step", "num_tensors")
            (num_left_out,) = sizes_of({"count": payload.get("num_left_out", 0)}, "count")
            self._commits.append((record, step, num_tensors, num_left_out))
            if payload.get("stopped") is not None:
                self.stopped[record] = str(payload["stopped"])
        elif kind == "group":
            (number,) = sizes_of(payload, "group")
            if number in self._numbers:
                raise ValueError(f"group {number} is described twice")
            self._numbers[number] = self._new(record, Described.of(group_from(payload)))
        elif kind == "block":
            number, step = sizes_of(payload, "group", "step")
            place = location_from(payload)
            self._blocks.append((record, self._known(number), step, place.offset, place.shard, place.checksum))
        elif kind == "left_out":
            self.left_out[record] = left_out_from(payload)
        elif kind == "measured":
            (number,) = sizes_of(payload, "group")
            self.left_out[record] = measured_from(payload, self.groups[self._known(number)].tensors)
        elif kind == "tokens":
            self.tokens[record] = tokens_from(payload)
        else:
            raise ValueError(f"unknown kind of record {kind!r}")

    def columns(self) -> tuple[Blocks, Commits]:
        """Return the records of blocks and of commits, in order and before the one that failed."""
        record, number, step, offset, shard, checksum = _joined(self._fixed_blocks, _OF_BLOCKS)
        parts = [record, self._indices(record, number), step, offset, shard, checksum]
        record, group, step, offset, shard, checksum = self._in_order(parts, self._blocks)
        commits = self._in_order(_joined(self._fixed_commits, _OF_COMMITS), self._commits)
        return Blocks(record, Columns(group, step, shard, offset, checksum)), Commits(*commits)

    def tokens_before(self, last: int) -> list[list[int]]:
        """Return the tokens of the records before `last`, by row of the batch."""
        rows: list[list[int]] = []
        record, row, token = _joined(self._fixed_tokens, _OF_TOKENS)
        done = 0
        for number in [*(number for number in self.tokens if number < last), last]:
            until = int(np.searchsorted(record, number))
            if until > done:
                there = row[done:until]
                order = np.argsort(there, kind="stable")
                which, starts = np.unique(there[order], return_index=True)
                pieces = np.split(token[done:until][order], starts[1:])
                append_tokens(rows, ((int(one), piece.tolist()) for one, piece in zip(which, pieces, strict=True)))
                done = until
            if number < last:
                append_tokens(rows, self.tokens[number])
        return rows

    def _in_order(self, parts: list[Array], rows: Sequence[tuple[int, ...]]) -> list[Array]:
        """Return columns, and the JSON values, in order of their record, up to the one that failed."""
        if rows:
            columns = np.array(rows, dtype=np.int64).T
            parts = [np.concatenate([part, some.astype(part.dtype)]) for part, some in zip(parts, columns, strict=True)]
            order = np.argsort(parts[0], kind="stable")
            parts = [part[order] for part in parts]
        kept = int(np.searchsorted(parts[0], self.end))
        return [part[:kept] for part in parts]

    def _indices(self, records: Array, numbers: Array) -> Array:
        """Return which of `groups` the group of each number is."""
        known = np.array(sorted(self._numbers), dtype=np.int64)
        if not len(numbers):
            return numbers.astype(np.int32)
        indices = np.array([self._numbers[number] for number in known.tolist()] or [0], dtype=np.int32)
        places = np.minimum(np.searchsorted(known, numbers), max(len(known) - 1, 0))
        is_known = known[places] == numbers if len(known) else np.zeros(len(numbers), dtype=bool)
        found: Array = indices[places]
        later = is_known & (np.array(self.described or [0])[found] > records)
        unknown = np.flatnonzero(~is_known | later)
        if unknown.size:
            self.fail(int(records[unknown[0]]), f"group {numbers[unknown[0]]} is not described")
        return found

    def _known(self, number: int) -> int:
        if number not in self._numbers:
            raise ValueError(f"group {number} is not described")
        return self._numbers[number]

    def _alone_as(self, record: int, entry: Entry) -> int:
        """Return the group of a tensor that was described with its place."""
        key = (entry.site, entry.rank, entry.dtype, entry.shape, tuple(entry.axes.items()), entry.node, entry.sharding)
        index = self._alone.get(key)
        if index is None:
            index = self._alone[key] = self._new(
                record, Described((dataclasses.replace(entry, step=0, location=None),), entry.nbytes)
            )
        return index

    def _new(self, record: int, group: Described) -> int:
        self.groups.append(group)
        self.described.append(record)
        return len(self.groups) - 1


def _joined(parts: Sequence[Sequence[Array]], kinds: Mapping[str, type]) -> list[Array]:
    """Return the columns of all parts, the number of the record first."""
    empty: list[Array] = [np.empty(0, dtype=dtype) for dtype in (np.int64, *kinds.values())]
    return [np.concatenate(columns) for columns in zip(empty, *parts, strict=True)]
