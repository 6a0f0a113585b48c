"""The bytes of shards that are in a store: ranges of objects, a few requests at a time."""

from __future__ import annotations

from typing import Any

from glassengine.recording.layout import layout
from glassengine.recording.layout.layout import shard_number
from glassengine.stores import objects
from glassengine.stores.objects import Found
from glassengine.stores.places import Remote
from glassengine.stores.ranges import forget, read_range


class ShardObjects:
    """The shards of a recording in a store.

    Args:
        directory: Of the recording.
        more: Another directory with shards of the same recording, whose numbers are others.

    Attributes:
        data_bytes: Bytes of tensors in each shard, by number, when this was made.
        keeps_still: False: an object may be replaced between two ranges.
    """

    keeps_still = False

    def __init__(self, directory: Remote, more: Remote | None = None) -> None:
        self._found = {**(_find(more) if more is not None else {}), **_find(directory)}
        starts = objects.in_parallel(_header_bytes, list(self._found.values()))
        self._starts = dict(zip(self._found, starts, strict=True))
        self.data_bytes = {number: max(0, found.size - self._starts[number]) for number, found in self._found.items()}

    def read(self, shard: int, offset: int, num_bytes: int) -> Any:
        """Return a writable buffer with bytes of a shard.

        Args:
            shard: Number of the shard.
            offset: Behind the shard's header.
            num_bytes: At least 1.

        Raises:
            UsageError: The store cannot be asked.
            CorruptError: The object is gone or does not have these bytes.
        """
        return read_range(self._found[shard], self._starts[shard] + offset, num_bytes)

    def read_again(self, shard: int, offset: int, num_bytes: int) -> Any:
        """Do what `read` does, and fetch the bytes again: they may have been damaged on their way."""
        forget(self._found[shard].url)
        return self.read(shard, offset, num_bytes)

    def damage(self, shard: int) -> str | None:
        """Return how a shard differs from what it was when this was made, or None."""
        difference = self._found[shard].change()
        return None if difference is None else f"{self._found[shard].url} has changed since it was opened: {difference}"


def _find(directory: Remote) -> dict[int, Found]:
    """Return the shards by number; of a shard that is there twice, the sealed one."""
    found: dict[int, Found] = {}
    there = [item for item in objects.listed(str(directory)) if not item.is_directory and item.size >= 8]
    for sealed in (False, True):
        numbers = [shard_number(item.name, sealed=sealed) for item in there]
        found |= {number: item for number, item in zip(numbers, there, strict=True) if number is not None}
    return found


def _header_bytes(shard: Found) -> int:
    """Return where the data of a shard begins."""
    return 8 + (int.from_bytes(objects.read(shard.url, 0, 8), "little") or layout.HEADER_BYTES - 8)
