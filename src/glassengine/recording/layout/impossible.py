"""Which record of an index is the first that cannot be: checks over columns, each as long as the index is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from glassengine.recording.layout.entries import Columns, Described, Measured
from glassengine.recording.layout.frames import Array
from glassengine.recording.layout.layout import ALIGNMENT, MAX_SHARD_NUMBER, LeftOut

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
    """Return the first block that is not on file, or has bytes of another step or part of those of another block.

    Args:
        blocks: All blocks.
        groups: What they are of.
        shard_bytes: Data bytes on file of each shard.
        most: Tensors at most.
    """
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
    """Return the first commit that does not fit the records since the one before it.

    Args:
        blocks: All blocks.
        commits: All commits.
        groups: What blocks are of.
        left_out: Record and tensors without values.
        most: Tensors without values at most.
    """
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
    is_wrong |= _others(blocks.columns.step, ends, commits.step)
    ends_left = np.searchsorted(records, commits.record)
    is_wrong |= _totals(num_left_out, ends_left) != commits.num_left_out
    is_wrong |= _others(of_left_out, ends_left, commits.step)
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


def _others(steps: Array, ends: Array, committed: Array) -> Array:
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
