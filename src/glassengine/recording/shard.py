"""One shard being written: raw bytes behind a reserved header, sealed into a safetensors file.

safetensors refuses holes and trailing bytes, so every gap that alignment leaves becomes an explicit pad entry.
"""

from __future__ import annotations

import json
from io import FileIO
from pathlib import Path

from glassengine.recording.layout import ALIGNMENT, HEADER_BYTES, STORED, Entry, header_key, shard_name

PAD_PREFIX = "__pad__/"

# What one entry adds to a header besides its name and shape: dtype, offsets, quotes, and a pad entry before it.
_ENTRY_OVERHEAD = 220


class Shard:
    """An open `shard-NNNNN.part`. Bytes are in the file (the kernel's cache) when `append` returns.

    Attributes:
        number: The number in its name.
        size: Data bytes so far; pads included, the header not.
    """

    def __init__(self, directory: Path, number: int) -> None:
        self.number = number
        self.size = 0
        self._directory = directory
        self._header: dict[str, object] = {}
        self._aliases: dict[str, dict[str, object]] = {}
        self._header_bytes = 64
        self._file = (directory / shard_name(number, sealed=False)).open("xb", buffering=0)
        try:
            # Written, not skipped: a disk that fills up later must still be able to take the header.
            write_all(self._file, bytes(HEADER_BYTES))
        except OSError:
            self._file.close()
            raise

    def has_room(self, *entries: Entry) -> bool:
        """Return whether the header can take these as well."""
        return self._header_bytes + sum(map(_entry_bytes, entries)) <= HEADER_BYTES - 8

    def append(self, data: memoryview) -> int:
        """Write `data` at the next aligned offset and return that offset."""
        offset = -(-self.size // ALIGNMENT) * ALIGNMENT
        if offset > self.size:
            self._header[f"{PAD_PREFIX}{self.size}"] = _header_entry("U8", [offset - self.size], self.size, offset)
            write_all(self._file, bytes(offset - self.size))
            self.size = offset
        write_all(self._file, data)
        self.size = offset + data.nbytes
        return offset

    def add(self, entry: Entry) -> None:
        """Give the bytes at `entry.location`, just appended, their name in the header."""
        assert entry.location is not None
        code, shape = _stored_as(entry)
        start = entry.location.offset
        self._header[header_key(entry)] = _header_entry(code, shape, start, start + entry.nbytes)
        self._header_bytes += _entry_bytes(entry)

    def add_alias(self, entry: Entry, original: Entry) -> None:
        """Note in the header's metadata that `entry` has the bytes of `original`, which may be in an earlier shard."""
        assert original.location is not None
        code, shape = _stored_as(entry)
        file = shard_name(original.location.shard, sealed=True)
        self._aliases[header_key(entry)] = {"of": header_key(original), "file": file, "dtype": code, "shape": shape}
        self._header_bytes += _entry_bytes(entry) + _entry_bytes(original)

    def seal(self) -> None:
        """Write the header and rename the file; it then is a safetensors file."""
        metadata = {"format": "pt", "aliases": json.dumps(self._aliases)}
        text = json.dumps({"__metadata__": metadata, **self._header}, separators=(",", ":")).encode()
        room = HEADER_BYTES - 8
        assert len(text) <= room, "has_room underestimates the header"
        # What a failed write left behind the last good byte would make the file unreadable.
        self._file.truncate(HEADER_BYTES + self.size)
        self._file.seek(0)
        write_all(self._file, room.to_bytes(8, "little") + text.ljust(room))
        self._file.close()
        part = self._directory / shard_name(self.number, sealed=False)
        part.rename(self._directory / shard_name(self.number, sealed=True))

    def close(self) -> None:
        """Close the file without sealing it."""
        self._file.close()


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Write all of `data`: a raw write may be short near a full disk, and always above 2 GiB."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _stored_as(entry: Entry) -> tuple[str, list[int]]:
    code, _, parts = STORED[entry.dtype]
    return code, [*entry.shape, parts] if parts > 1 else list(entry.shape)


def _entry_bytes(entry: Entry) -> int:
    # Twice: the aliases are JSON within JSON, where each escape of a name grows once more.
    return 2 * len(json.dumps(header_key(entry))) + 22 * len(entry.shape) + _ENTRY_OVERHEAD


def _header_entry(code: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": code, "shape": shape, "data_offsets": [start, end]}
