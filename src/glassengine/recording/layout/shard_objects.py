"""The bytes of shards that are in a store: ranges of objects, a few requests at a time."""

from __future__ import annotations

from typing import Any

from glassengine.recording.layout import layout
from glassengine.recording.layout.layout import shard_name, shard_number
from glassengine.stores import objects
from glassengine.stores.objects import Found
from glassengine.stores.places import Remote
from glassengine.stores.ranges import changed, forget, in_parallel, read_range


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
        self._starts = dict(zip(self._found, in_parallel().map(_header_bytes, self._found.values()), strict=True))
        sizes = {number: found.size for number, (_, found) in self._found.items()}
        self.data_bytes = {number: max(0, size - self._starts[number]) for number, size in sizes.items()}

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
        url, found = self._found[shard]
        return read_range(url, found, self._starts[shard] + offset, num_bytes)

    def read_again(self, shard: int, offset: int, num_bytes: int) -> Any:
        """Do what `read` does, and fetch the bytes again: they may have been damaged on their way."""
        forget(self._found[shard][0])
        return self.read(shard, offset, num_bytes)

    def damage(self, shard: int) -> str | None:
        """Return how a shard differs from what it was when this was made, or None."""
        url, found = self._found[shard]
        difference = changed(url, found)
        return None if difference is None else f"{url} has changed since it was opened: {difference}"


def _find(directory: Remote) -> dict[int, tuple[str, Found]]:
    """Return the shards by number; of a shard that is there twice, the sealed one."""
    found: dict[int, tuple[str, Found]] = {}
    there = [item for item in objects.listed(str(directory)) if not item.is_directory and item.size >= 8]
    for sealed in (False, True):
        for item in there:
            number = shard_number(item.name, sealed=sealed)
            if number is not None:
                found[number] = (str(directory / shard_name(number, sealed=sealed)), item)
    return found


def _header_bytes(shard: tuple[str, Found]) -> int:
    """Return where the data of a shard begins."""
    return 8 + (int.from_bytes(objects.read(shard[0], 0, 8), "little") or layout.HEADER_BYTES - 8)
