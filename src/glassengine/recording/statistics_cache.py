"""Statistics that were computed once for a recording: `statistics.log` beside its index, in frames like its own.

It is a convenience: what is damaged, belongs to other values or cannot be written is computed again.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from glassengine.errors import CorruptError
from glassengine.recording.layout import STATISTICS, Entry
from glassengine.recording.records import frame, read_frame
from glassengine.recording.recovery import open_regular
from glassengine.results import Summary

_MAX_BYTES = 1 << 28
_NUMBERS = ("min", "mean", "median", "max", "std")
_COUNTS = ("num_elements", "num_nan", "num_inf")


class StatisticsCache:
    """The statistics kept beside one recording.

    Args:
        directory: The recording's.
        writable: Whether what is new is written down; not while the recording is.
    """

    def __init__(self, directory: Path, *, writable: bool) -> None:
        self._path = directory / STATISTICS
        self._writable = writable
        self._found: dict[tuple[int, int, int, str], Summary] | None = None

    def get(self, entry: Entry) -> Summary | None:
        """Return the statistics of `entry`, if they are known."""
        if self._found is None:
            self._found = self._read() if self._path.exists() else {}
        found = self._found.get(_key(entry))
        return found if found is not None and (found.shape, found.dtype) == (entry.shape, entry.dtype) else None

    def put(self, entry: Entry, summary: Summary) -> None:
        """Keep statistics for the next time."""
        assert self._found is not None
        self._found[_key(entry)] = summary
        if not self._writable:
            return
        payload = {"key": _key(entry), **dataclasses.asdict(summary)}
        try:
            if self._path.is_symlink():
                raise OSError("a link may lead anywhere")
            with self._path.open("ab", buffering=0) as file:
                file.write(frame(payload))
        except OSError:
            self._writable = False

    def _read(self) -> dict[tuple[int, int, int, str], Summary]:
        found: dict[tuple[int, int, int, str], Summary] = {}
        with contextlib.suppress(ValueError, TypeError, CorruptError), open_regular(self._path) as file:
            while file.tell() < _MAX_BYTES and (payload := read_frame(file)) is not None:
                shard, offset, checksum, dtype = payload.get("key") or [None] * 4
                found[shard, offset, checksum, dtype] = _summary(payload)
        return found


def _key(entry: Entry) -> tuple[int, int, int, str]:
    """Return what tells the values of `entry` from all others: their place, their bytes and what these mean."""
    assert entry.location is not None
    return entry.location.shard, entry.location.offset, entry.location.checksum, entry.describe()


def _summary(payload: dict[str, Any]) -> Summary:
    numbers = {name: payload.get(name) for name in _NUMBERS}
    counts = {name: payload.get(name) for name in _COUNTS}
    shape, dtype = payload.get("shape"), payload.get("dtype")
    if not isinstance(shape, list) or not isinstance(dtype, str):
        raise ValueError("statistics of something else")
    if not all(value is None or isinstance(value, (int, float)) for value in numbers.values()):
        raise ValueError("statistics are not numbers")
    if not all(isinstance(value, int) for value in counts.values()):
        raise ValueError("counts are not numbers")
    return Summary(shape=tuple(shape), dtype=dtype, **numbers, **counts)  # type: ignore[arg-type]
