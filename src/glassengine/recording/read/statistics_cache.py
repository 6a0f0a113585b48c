"""Statistics and sketches that were computed once for a recording, in `statistics.log` beside its index.

Its frames are like those of the index. It is a convenience: what is damaged, belongs to other values or cannot be
written is computed again.
"""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from pathlib import Path
from typing import Any

import msgspec

from glassengine.errors import CorruptError
from glassengine.reading.files import open_regular
from glassengine.recording.layout.layout import STATISTICS, Entry
from glassengine.recording.layout.records import frame, read_frame
from glassengine.recording.layout.statistics import LENGTH, NUM_QUANTILES, Sketch
from glassengine.results import Summary
from glassengine.writing import open_to_append, write_whole

_MAX_BYTES = 1 << 28
_Key = tuple[int, int, int, str]


class StatisticsCache:
    """The statistics and sketches kept beside one recording."""

    def __init__(self, directory: Path, *, writable: bool) -> None:
        self._path = directory / STATISTICS
        self._writable = writable
        self._is_read = False
        self._descriptor: int | None = None
        self._summaries: dict[_Key, Summary] = {}
        self._sketches: dict[_Key, Sketch] = {}

    def summary(self, entry: Entry) -> Summary | None:
        """Return the statistics of `entry`, if they are known."""
        self._read()
        found = self._summaries.get(_key(entry))
        return found if found is not None and (found.shape, found.dtype) == (entry.shape, entry.dtype) else None

    def sketch(self, entry: Entry) -> Sketch | None:
        """Return the sketch of `entry`, if it is known."""
        self._read()
        return self._sketches.get(_key(entry))

    def put(self, entry: Entry, found: Summary | Sketch) -> None:
        """Keep statistics or a sketch for the next time."""
        key = _key(entry)
        if isinstance(found, Sketch):
            self._sketches[key] = found
            fields = {"num_sampled": found.num_sampled, "quantiles": found.quantiles, "projection": found.projection}
        else:
            self._summaries[key] = found
            fields = vars(found)
        if not self._writable:
            return
        try:
            if self._descriptor is None:
                self._descriptor = open_to_append(self._path)
                weakref.finalize(self, _close, self._descriptor)
            write_whole(self._descriptor, frame({"key": key, **fields}))
        except OSError:
            self._writable = False
        except ValueError:
            # Sums of large numbers are infinite, which JSON does not know: they are computed again.
            return

    def _read(self) -> None:
        if self._is_read:
            return
        self._is_read = True
        if not self._path.exists():
            return
        with (
            contextlib.suppress(ValueError, TypeError, CorruptError),
            open_regular(self._path, inside=self._path.parent) as file,
        ):
            while file.tell() < _MAX_BYTES and (payload := read_frame(file)) is not None:
                shard, offset, checksum, dtype = payload.get("key") or [None] * 4
                if "quantiles" in payload:
                    self._sketches[shard, offset, checksum, dtype] = _sketch(payload)
                else:
                    self._summaries[shard, offset, checksum, dtype] = msgspec.convert(payload, Summary)


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _key(entry: Entry) -> _Key:
    """Return what tells the values of `entry` from all others: their place, their bytes and what these mean."""
    location = entry.location if entry.added is None else entry.added.location
    assert location is not None
    return location.shard, location.offset, location.checksum, entry.describe()


def _sketch(payload: dict[str, Any]) -> Sketch:
    found = msgspec.convert(payload, Sketch)
    if len(found.quantiles) not in (0, NUM_QUANTILES) or len(found.projection) != LENGTH:
        raise ValueError("a sketch of another kind")
    if not all(map(math.isfinite, (*found.quantiles, *found.projection))):
        raise ValueError("a sketch is not made of numbers")
    return found
