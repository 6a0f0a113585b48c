"""Reads `index.log` up to its last good record; what the bytes do not prove is not used.

What the index says is gathered in columns, a row for each block of tensors and for each commit, and then checked as
columns: which record is the first that is impossible. What is before it counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np

from glassengine.recording.layout.entries import Columns, Described, Entries, LeftOuts, Measured
from glassengine.recording.layout.layout import ALIGNMENT, MAX_ROWS, MAX_SHARD_NUMBER, Entry, LeftOut
from glassengine.recording.layout.records import (
    BLOCK,
    COMMIT,
    TOKEN,
    Array,
    append_tokens,
    decoded,
    entry_from,
    group_from,
    left_out_from,
    location_from,
    measured_from,
    read_frames,
    sizes_of,
    tokens_from,
)

Impossible = tuple[int, str] | None
"""Number of a record, and what is impossible about it."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of an index in its order; `record` is the number of their record."""

    record: Array
    columns: Columns

    def before(self, record: int) -> Blocks:
        """Return those before a record."""
        kept = slice(0, int(np.searchsorted(self.record, record)))
        return Blocks(self.record[kept], self.columns.at(kept))


@dataclass(frozen=True)
class Commits:
    """The commits of an index likewise."""

    record: Array
    step: Array
    num_tensors: Array
    num_left_out: Array

    def before(self, record: int) -> Commits:
        """Return those before a record."""
        kept = slice(0, int(np.searchsorted(self.record, record)))
        return Commits(self.record[kept], self.step[kept], self.num_tensors[kept], self.num_left_out[kept])


def impossible_blocks(
    blocks: Blocks, groups: Sequence[Described], shard_bytes: Mapping[int, int], most: int
) -> Impossible:
    """Return the first block that is not on file, or has bytes of another step or part of those of another block."""
    columns = blocks.columns
    if not len(columns.group):
        return None
    sizes = np.array([group.nbytes for group in groups], dtype=np.int64)[columns.group]
    counts = np.array([len(group.tensors) for group in groups], dtype=np.int64)[columns.group]
    on_file = np.full(MAX_SHARD_NUMBER + 1, -1, dtype=np.int64)
    for shard, num_bytes in shard_bytes.items():
        on_file[shard] = num_bytes
    is_impossible = columns.offset % ALIGNMENT != 0
    is_missing = columns.offset + sizes > on_file[columns.shard]
    is_many = np.cumsum(counts) > most
    first = _first(is_impossible | is_missing | is_many)
    if first is None and not _overlap(columns, sizes):
        return None
    if first is None or _overlap(columns.at(slice(0, first)), sizes[:first]):
        # Rare, so that it may take longer: in how many blocks from the first on is there none?
        low, high = 0, len(sizes) if first is None else first
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if _overlap(columns.at(slice(0, middle)), sizes[:middle]) else (middle, high)
        return int(blocks.record[low]), f"the bytes of {_named(groups, columns, low)} overlap another tensor's"
    if is_impossible[first]:
        return int(blocks.record[first]), "a location is impossible"
    if is_missing[first]:
        return int(blocks.record[first]), f"the bytes of {_named(groups, columns, first)} are not on file"
    return int(blocks.record[first]), f"more than {most} tensors"


def _named(groups: Sequence[Described], columns: Columns, place: int) -> str:
    tensors = groups[columns.group[place]].tensors
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f"{tensors[0].site[:200]!r}{more} (step {columns.step[place]})"


def _overlap(columns: Columns, sizes: Array) -> bool:
    """Whether ranges of bytes overlap; those of one step may be equal."""
    some = sizes > 0
    if not some.all():
        columns, sizes = columns.at(some), sizes[some]
    # Nearly all indices are in this order already.
    place = columns.offset
    if bool(((np.diff(columns.shard) < 0) | ((np.diff(columns.shard) == 0) & (np.diff(place) < 0))).any()):
        order = np.lexsort((columns.step, sizes, place, columns.shard))
        columns, sizes = columns.at(order), sizes[order]
        place = columns.offset
    ends = place + sizes
    is_same_shard = columns.shard[1:] == columns.shard[:-1]
    is_same = (place[1:] == place[:-1]) & (sizes[1:] == sizes[:-1])
    is_same &= (columns.step[1:] == columns.step[:-1]) & (columns.checksum[1:] == columns.checksum[:-1])
    return bool((is_same_shard & ~is_same & (place[1:] < ends[:-1])).any())


def impossible_rows(left_out: Mapping[int, LeftOut | Measured]) -> Impossible:
    """Return the first record of light statistics that holds impossible numbers."""
    measured = [(record, item) for record, item in left_out.items() if isinstance(item, Measured)]
    if not measured:
        return None
    counts = np.array([len(item) for _, item in measured], dtype=np.int64)
    rows = [np.frombuffer(item.rows, "<f8").reshape(3, -1) for _, item in measured]
    low, high, norm = np.concatenate(rows, axis=1)
    with np.errstate(all="ignore"):
        is_odd = ~((norm >= 0) & np.isfinite(norm)) | np.isinf(low) | np.isinf(high) | (np.isnan(low) != np.isnan(high))
    first = _first(is_odd)
    if first is None:
        return None
    return measured[int(np.searchsorted(np.cumsum(counts), first, "right"))][0], "statistics are impossible numbers"


def impossible_commits(
    blocks: Blocks,
    commits: Commits,
    groups: Sequence[Described],
    left_out: Sequence[tuple[int, LeftOut | Measured]],
    most: int,
) -> Impossible:
    """Return the first commit that does not fit the records since the one before it."""
    count = len(commits.record)
    counts = np.array([len(group.tensors) for group in groups] or [0], dtype=np.int64)[blocks.columns.group]
    records = np.array([record for record, _ in left_out], dtype=np.int64)
    num_left_out = np.array([len(item) if isinstance(item, Measured) else 1 for _, item in left_out], dtype=np.int64)
    of_left_out = np.array([item.step for _, item in left_out], dtype=np.int64)
    too_many = _first(np.cumsum(num_left_out) > most)
    found = None if too_many is None else (int(records[too_many]), f"more than {most} tensors")
    if not count:
        return found
    ends = np.searchsorted(blocks.record, commits.record)
    is_wrong = _totals(counts, ends) != commits.num_tensors
    is_wrong |= _other_steps(blocks.columns.step, ends, commits.step)
    ends_left = np.searchsorted(records, commits.record)
    is_wrong |= _totals(num_left_out, ends_left) != commits.num_left_out
    is_wrong |= _other_steps(of_left_out, ends_left, commits.step)
    candidates = [found, _at(commits, is_wrong, "the records of step {} do not match its commit")]
    if bool((np.diff(commits.step) <= 0).any()):
        _, places = np.unique(commits.step, return_index=True)
        is_again = np.ones(count, dtype=bool)
        is_again[places] = False
        candidates.append(_at(commits, is_again, "impossible step {}"))
    candidates.append(_at(commits, _repeated(blocks, ends, groups), "step {} names a tensor twice"))
    return min((one for one in candidates if one is not None), default=None)


def _totals(counts: Array, ends: Array) -> Array:
    """Return the sum of `counts` since the commit before, for every commit."""
    sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])[ends]
    return np.diff(sums, prepend=0)


def _other_steps(steps: Array, ends: Array, committed: Array) -> Array:
    """Return which commits end records of other steps."""
    wrong = np.zeros(len(committed), dtype=bool)
    owners = np.repeat(np.arange(len(committed)), np.diff(ends, prepend=0))
    wrong[owners[steps[: len(owners)] != committed[owners]]] = True
    return wrong


def _repeated(blocks: Blocks, ends: Array, groups: Sequence[Described]) -> Array:
    """Return which commits end records that name a tensor twice; steps like the one before add nothing."""
    wrong = np.zeros(len(ends), dtype=bool)
    lengths = np.diff(ends, prepend=0)
    numbers = blocks.columns.group
    unlike = np.ones(len(ends), dtype=bool)
    for length in np.unique(lengths).tolist():
        mine = np.flatnonzero(lengths == length)
        if not length:
            unlike[mine] = False
            continue
        rows = numbers[(ends[mine] - length)[:, None] + np.arange(length)]
        unlike[mine[1:]] = (rows[1:] != rows[:-1]).any(axis=1)
    known: dict[bytes, bool] = {}
    for commit in np.flatnonzero(unlike).tolist():
        of_step = numbers[ends[commit] - lengths[commit] : ends[commit]]
        key = of_step.tobytes()
        if key not in known:
            names = [place for number in of_step.tolist() for place in groups[number].places]
            total = sum(len(groups[number].tensors) for number in of_step.tolist())
            known[key] = len(set(names)) != total
        wrong[commit] = known[key]
    return wrong


def _at(commits: Commits, wrong: Array, reason: str) -> Impossible:
    first = _first(wrong)
    return None if first is None else (int(commits.record[first]), reason.format(commits.step[first]))


def _first(which: Array) -> int | None:
    place = int(which.argmax()) if which.size else 0
    return place if which.size and bool(which[place]) else None


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
    """Read the index up to the first record that is damaged, impossible, or whose bytes are not there."""
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
        """Add any other record."""
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
            (num_left_out,) = sizes_of({"num_left_out": 0, **payload}, "num_left_out")
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
                record, Described((replace(entry, step=0, location=None),), entry.nbytes)
            )
        return index

    def _new(self, record: int, group: Described) -> int:
        self.groups.append(group.named())
        self.described.append(record)
        return len(self.groups) - 1


def _joined(parts: Sequence[Sequence[Array]], kinds: Mapping[str, type]) -> list[Array]:
    """Return the columns of all parts, the number of the record first."""
    empty: list[Array] = [np.empty(0, dtype=dtype) for dtype in (np.int64, *kinds.values())]
    return [np.concatenate(columns) for columns in zip(empty, *parts, strict=True)]
