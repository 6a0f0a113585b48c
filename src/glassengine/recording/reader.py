"""Reads a recording: the index says what there is; of the shards only what is asked for is mapped into memory.

The directory may still be written to, or its writer may have been killed: what was committed is readable, and
`complete` is false. Reading changes nothing on disk but the statistics that are kept for the next time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np

from glassengine.blocks.arrays import ArrayValues, stored_values, values_of_bytes
from glassengine.errors import CorruptError, UnknownNameError, UsageError
from glassengine.reading.documents import parsed
from glassengine.reading.files import open_regular, read_bytes
from glassengine.recording.layout import layout
from glassengine.recording.layout.entries import Entries, LeftOuts, Mapped
from glassengine.recording.layout.index import IndexContents, read_index
from glassengine.recording.layout.layout import Entry, LeftOut, num_bytes
from glassengine.recording.layout.noise_floor import NoiseFloor, read_noise_floor
from glassengine.recording.layout.shard_files import ShardFiles, ShardObjects, Shards
from glassengine.recording.recovery import Recovered, recovered
from glassengine.recording.write.destination import is_left
from glassengine.results import Skipped, Summary
from glassengine.results.notebook import MAX_ROWS, card, needed
from glassengine.sites import matches
from glassengine.stores.objects import forget
from glassengine.stores.places import RemotePath, place, remote
from glassengine.writing import crc32

if TYPE_CHECKING:
    from torch import Tensor

    from glassengine.recording.layout.tensors import Sketch, StatisticsCache


_STATISTICS = ("min", "mean", "median", "max", "std", "num_nan", "num_inf")


class Shown:
    """A card for notebooks, and a data frame of the tensors, for what has these."""

    path: Path
    incomplete_because: str | None
    steps: list[int]
    entries: Sequence[Entry]
    left_out: Sequence[LeftOut]

    def summary(self, entry: Entry) -> Summary:
        """Return the statistics of one tensor."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the path, the steps, and the first tensors."""
        first = [self.entries[place] for place in range(min(MAX_ROWS, len(self.entries)))]
        steps = f"{len(self.steps):,}" + (f", {self.steps[0]} to {self.steps[-1]}" if self.steps else "")
        facts = {
            "path": self.path,
            "steps": steps,
            "tensors": f"{len(self.entries):,}, without values {len(self.left_out):,}",
            "incomplete": self.incomplete_because,
        }
        rows = [{"step": entry.step, "site": entry.site, "tensor": entry.describe()} for entry in first]
        return card(type(self).__name__, facts, rows, more=len(self.entries) - len(rows))

    def to_pandas(self, *, statistics: bool = False) -> Any:
        """Return a data frame with a row for each tensor.

        Args:
            statistics: Whether to add least, mean, median, largest value and so on, for which all values are read.

        Raises:
            UsageError: pandas is not installed (extra `notebook`).
            CorruptError: Values are damaged.
        """
        frame = needed("pandas").DataFrame
        rows = []
        for entry in self.entries:
            row: dict[str, Any] = {"step": entry.step, "rank": entry.rank, "site": entry.site, "dtype": entry.dtype}
            row |= {"shape": tuple(entry.shape), "nbytes": entry.nbytes}
            if statistics:
                found = self.summary(entry)
                row |= {name: getattr(found, name) for name in _STATISTICS}
            rows.append(row)
        return frame(rows, columns=None if rows else ["step", "rank", "site", "dtype", "shape", "nbytes"])


_log = logging.getLogger(__name__)

_MOST_GROWN_BYTES = 1 << 28

Bytes = np.typing.NDArray[np.uint8]


class Recording(Shown):
    """A recording that is open for reading; made by `Recording.open`.

    Attributes:
        path: Its directory.
        metadata: What the writer was given; "token_ids" are those of the completed steps.
        complete: Whether it was closed regularly and every step that was begun was completed.
        incomplete_because: Why not, else None.
        steps: The completed steps, ascending.
        entries: The tensors, in recorded order within ascending steps.
        left_out: Tensors that were seen and whose values are not in it.
        stopped: Steps that ended before they were through -> what stopped them.
        skipped: The same as `left_out`, in the words of a comparison.
    """

    entries: Entries
    left_out: LeftOuts

    def __init__(
        self,
        path: Path,
        manifest: dict[str, Any],
        contents: IndexContents,
        shards: Shards,
        more: Recovered | None = None,
    ) -> None:
        self.path = path
        self.metadata: dict[str, Any] = manifest["metadata"]
        if contents.token_ids:
            self.metadata["token_ids"] = contents.token_ids
        self.incomplete_because = _incomplete_because(manifest, contents)
        self.complete = self.incomplete_because is None
        self.steps: list[int] = sorted(contents.steps)
        self.entries = contents.entries
        self.left_out = contents.left_out
        self.stopped = contents.stopped
        self._damage = contents.damage
        self.skipped: Sequence[Skipped] = Mapped(
            lambda item: Skipped(item.site, "both", item.reason, item.step), self.left_out
        )
        self._shards = shards
        self._recovered = more  # which may be gone with this
        is_here = not isinstance(path, RemotePath)
        self._keeps_statistics = is_here and manifest["state"] != "writing"
        self._verified: set[tuple[int, int]] = set()
        self._kept: tuple[tuple[int, int], Any] | None = None
        # Name and rank of a tensor that grows -> a step, and its bytes there as `_rows_of` returns them.
        self._grown: dict[tuple[str, int], tuple[int, Bytes]] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open the recording directory `path`, here or in a store, or the only one in it.

        Raises:
            UsageError: No recording exists.
            CorruptError: It is damaged, or written by a newer version.
        """
        directory = place(path)
        if isinstance(directory, RemotePath):
            with contextlib.suppress(CorruptError):
                found = cls._opened(directory)
                if found._damage is None:
                    return found
            # What is kept of it may have been damaged on its way.
            forget(str(directory))
        return cls._opened(directory)

    @classmethod
    def _opened(cls, directory: Path) -> Self:
        if not (directory / layout.MANIFEST).exists():
            of_ranks = sorted(directory.glob(f"rank*/{layout.MANIFEST}"))
            inside = [] if of_ranks else sorted(directory.glob(f"*/{layout.MANIFEST}"))
            if len(inside) == 1:
                return cls.open(inside[0].parent)
            raise UsageError(
                "no recording found",
                got=str(directory),
                expected=f"a directory that holds {layout.MANIFEST}",
                hint=f"that of one rank: {of_ranks[0].parent}" if of_ranks else None,
            )
        manifest = _read_manifest(directory / layout.MANIFEST)
        # First: what a writer brings to the index meanwhile leaves its ring.
        more = recovered(directory)
        shards = _shards(directory, more)
        with open_regular(directory / layout.INDEX, inside=directory) as index:
            contents = read_index(index, shards.data_bytes)
        if more is not None:
            contents = more.added_to(contents, shards)
        if manifest["state"] == "writing" and isinstance(directory, RemotePath) and is_left(directory):
            _log.warning("a part of %s is on this machine and was not uploaded: glass upload %s", directory, directory)
        if manifest["state"] == "complete":
            found = f"{len(contents.steps)} steps, {len(contents.entries)} tensors"
            expected = f"{manifest['num_steps']} steps, {manifest['num_tensors']} tensors"
            if contents.damage is not None or found != expected:
                raise CorruptError(
                    "the recording is damaged",
                    got=f"{directory}: {contents.damage or 'the index is cut'}",
                    expected=f"{expected}; intact: {found}",
                    hint=f'to read what is intact, set "state" to "incomplete" in {directory / layout.MANIFEST}',
                )
        return cls(directory, manifest, contents, shards, more)

    @property
    def is_thread_safe(self) -> bool:
        """Whether several threads may read tensors at once."""
        return self._shards.keeps_still

    def entry(self, site: str, step: int, rank: int = 0) -> Entry:
        """Return the entry of one tensor.

        Raises:
            UnknownNameError: It is not recorded; carries the nearest names of that step.
        """
        found = self.entries.find(site, step, rank)
        if found is None:
            there = [entry.site for entry in self.entries.of_step(step) if entry.rank == rank]
            hint = None if there else f"rank {rank} has nothing in step {step}; completed steps: {self.steps}"
            raise UnknownNameError("site", site, there, hint=hint)
        return found

    def sites(self, step: int | None = None) -> list[str]:
        """Return the site names in recorded order, of one step or of all."""
        return self.entries.sites(step)

    def select(self, pattern: str) -> Entries:
        """Return the entries whose site matches `pattern` (a glob or `re:`, see `sites.matches`).

        Raises:
            UnknownNameError: Nothing matches.
        """
        found = self.entries.filtered(lambda site: matches(pattern, site))
        if not found:
            raise UnknownNameError("site", pattern, self.sites())
        return found

    def find(self, pattern: str) -> tuple[Entries, list[LeftOut]]:
        """Return the entries, and the tensors without values, whose site matches `pattern`.

        Raises:
            UnknownNameError: Nothing matches.
        """
        left_out = self.left_out.filtered(lambda site: matches(pattern, site))
        entries = self.entries.filtered(lambda site: matches(pattern, site)) if left_out else self.select(pattern)
        return entries, left_out

    def tensor(self, entry: Entry | str, step: int | None = None, rank: int = 0) -> Tensor:
        """Return the values of one tensor; a large one is mapped, not copied.

        Writing into the result changes this process's view only, never the file. The bytes are checked against their
        checksum the first time. What is not used any more takes no memory.

        Args:
            entry: An entry of this recording, or a site name.
            step: With a site name: the step; may be left out when only one step has the site.
            rank: With a site name: the rank.

        Raises:
            UnknownNameError: It is not recorded.
            UsageError: Several steps have the site and `step` is None.
            CorruptError: The bytes do not match their checksum.
        """
        if isinstance(entry, str):
            entry = self.entry(entry, self._only_step(entry, rank) if step is None else step, rank)
        if entry.nbytes == 0:
            return _empty(entry.shape, entry.dtype)
        return _tensor_of(self._bytes(entry), entry.dtype, entry.shape)

    def read_values(self, entry: Entry) -> ArrayValues:
        """Return the values of one of `entries` without torch; see `tensor`."""
        return values_of_bytes(self._bytes(entry) if entry.nbytes else b"", entry.dtype, entry.shape)

    def read_rows(self, entry: Entry, first: int, end: int) -> tuple[ArrayValues, int]:
        """Return some rows of a tensor that is in no block, see `stored_values`, and the CRC-32 of their bytes.

        Others are not read.
        """
        location, each = entry.location, entry.nbytes // max(1, entry.shape[0])
        assert location is not None and location.block is None
        shape = (end - first, *entry.shape[1:])
        if each == 0 or end <= first:
            return stored_values(b"", entry.dtype, shape), 0
        data = self._shards.read(location.shard, location.offset + first * each, (end - first) * each)
        return stored_values(data, entry.dtype, shape), crc32(data)

    def noise_floor(self) -> NoiseFloor | None:
        """Return the noise floor that was measured with the recording; None where none was.

        Raises:
            CorruptError: It is damaged.
        """
        return read_noise_floor(self.path)

    def summary(self, entry: Entry) -> Summary:
        """Return the statistics of one tensor, computed when they are first asked for."""
        from glassengine.recording.layout.tensors import summarize

        found = self._statistics.summary(entry)
        if found is None:
            found = summarize(self.tensor(entry))
            self._statistics.put(entry, found)
        return found

    def sketch(self, entry: Entry) -> Sketch:
        """Return the sketch of one tensor, computed when it is first asked for."""
        from glassengine.recording.layout.tensors import sketch

        found = self._statistics.sketch(entry)
        if found is None:
            found = sketch(self.tensor(entry))
            self._statistics.put(entry, found)
        return found

    @functools.cached_property
    def _statistics(self) -> StatisticsCache:
        from glassengine.recording.layout.tensors import StatisticsCache

        return StatisticsCache(self.path, writable=self._keeps_statistics)

    def _bytes(self, entry: Entry) -> Any:
        """Return the bytes of a tensor that has some; the first time they, or the block they are in, are verified."""
        if entry.added is not None:
            return self._joined(entry)
        location = entry.location
        assert location is not None
        offset, size = location.block or (location.offset, entry.nbytes)
        key, start = (location.shard, offset), location.offset - offset
        if self._shards.keeps_still and key in self._verified:
            return self._shards.read(location.shard, location.offset, entry.nbytes)
        kept = self._kept
        if kept is not None and kept[0] == key:
            return kept[1][start : start + entry.nbytes].copy()
        data = self._shards.read(location.shard, offset, size)
        if crc32(data) != location.checksum:
            data = self._shards.read_again(location.shard, offset, size)
        if crc32(data) != location.checksum:
            why = self._shards.damage(location.shard) or "the checksum does not match"
            raise CorruptError(
                "recorded values are damaged", got=f"{entry.site!r}, step {entry.step}, rank {entry.rank}: {why}"
            )
        if size == entry.nbytes:
            self._verified.add(key)
            return data
        if self._shards.keeps_still:
            self._verified.add(key)
            return self._shards.read(location.shard, location.offset, entry.nbytes)
        self._kept = (key, data)  # the next tensor of this block is read from here
        return data[start : start + entry.nbytes].copy()

    def _joined(self, entry: Entry) -> Any:
        """Return the bytes of a tensor that grew: those of the step before, and the rows that were added to them."""
        assert entry.added is not None
        name, axis, at = (entry.site, entry.added.rank), entry.added.axis, entry
        step, kept = self._grown.get(name, (-1, None))
        parts: list[Bytes] = []
        while at.added is not None and at.step != step:
            rows = dataclasses.replace(at, shape=at.added.shape, location=at.added.location, added=None)
            rows = dataclasses.replace(rows, nbytes=num_bytes(rows.dtype, rows.shape))
            if rows.nbytes:
                parts.append(_rows_of(rows, axis, self._bytes(rows)))
            before = self.entries.find(at.site, at.step - 1, at.added.rank)
            if before is None or (before.dtype, _without(before.shape, axis)) != (at.dtype, _without(at.shape, axis)):
                got = f"{entry.site!r}, step {at.step}, rank {entry.rank}"
                raise CorruptError(
                    "recorded values are damaged", got=got, expected="the step before has its first rows"
                )
            at = before
        parts.append(kept if at.added is not None and kept is not None else _rows_of(at, axis, self._bytes(at)))
        whole = np.concatenate(parts[::-1], axis=1)
        with self._lock:
            self._grown[name] = (entry.step, whole)
            while len(self._grown) > 1 and sum(rows.nbytes for _, rows in self._grown.values()) > _MOST_GROWN_BYTES:
                del self._grown[next(iter(self._grown))]
        return whole.reshape(-1).copy()

    def _only_step(self, site: str, rank: int) -> int:
        steps = self.entries.steps_of(site, rank)
        if not steps:
            raise UnknownNameError("site", site, self.sites())
        if len(steps) > 1:
            raise UsageError(f"several steps have the site {site!r}", got="no step", expected=list(map(str, steps)))
        return steps[0]


def _shards(directory: Path, more: Recovered | None) -> Shards:
    if isinstance(directory, RemotePath):
        return ShardObjects(directory, remote(more.path) if more is not None else None)
    return ShardFiles(directory, more.path if more is not None else None)


def _tensor_of(data: Any, dtype: str, shape: tuple[int, ...]) -> Tensor:
    import torch

    stored = layout.STORED[dtype]
    # Through the element type of the file: a view straight to a complex dtype is not defined for all of them.
    flat = torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, stored.element))
    return (flat if stored.parts == 1 else torch.view_as_complex(flat.view(-1, stored.parts))).reshape(shape)


def _rows_of(entry: Entry, axis: int, data: Any) -> Bytes:
    """Return the bytes of a tensor, those of its rows along `axis` one after another in dimension 1."""
    return np.frombuffer(data, np.uint8).reshape(math.prod(entry.shape[:axis]), -1)


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _empty(shape: tuple[int, ...], dtype: str) -> Tensor:
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype))


def _read_manifest(path: Path) -> dict[str, Any]:
    raw = read_bytes(path, most=layout.MAX_MANIFEST_BYTES, inside=path.parent)
    # What users write into the metadata may hold NaN.
    limits: dict[str, Any] = {"what": "the manifest of a recording", "nonfinite": True}
    parsed(raw, _Manifest, path, version=layout.SCHEMA_VERSION, **limits)
    return parsed(raw, dict[str, Any], path, **limits)


class _Manifest(msgspec.Struct):
    state: str
    metadata: dict[str, Any]
    num_steps: int
    num_tensors: int


def _incomplete_because(manifest: dict[str, Any], contents: IndexContents) -> str | None:
    if manifest["state"] == "complete":
        return None
    reasons: Sequence[object] = (manifest.get("reason"), contents.damage, "it was never closed")
    return str(next(reason for reason in reasons if reason))
