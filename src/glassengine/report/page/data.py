"""The files beside a page, `data/<kind>-<number>.js`: scripts that hand over JSON, as a page on a disk may not fetch.

Every file is one call of `glassReport` with plain JSON in ASCII: no name in it is ever read as code or markup.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from glassengine.results.report import ReportFiles

FOLDER = "data"


class DataFolder:
    """Writes the files, and knows how many there are of each kind.

    Args:
        directory: Of the page; the folder `data` is made in it.
    """

    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        self.kinds: dict[str, ReportFiles] = {}

    def write(self, kind: str, number: int, items: Any) -> None:
        """Write one file of plain values."""
        self.path(kind, number).write_bytes(b'glassReport("%b",%d,%b);\n' % (kind.encode(), number, _ascii(items)))

    def path(self, kind: str, number: int) -> Path:
        """Return where a file is."""
        return self._folder / f"{kind}-{number}.js"

    def read(self, kind: str, number: int) -> Any:
        """Return what `write` was given."""
        text = self.path(kind, number).read_text(encoding="ascii")
        return json.loads(text[len(f'glassReport("{kind}",{number},') : -len(");\n")])

    def list(self, kind: str, *, num_items: int, items_per_file: int) -> None:
        """Note how many items of a kind there are in all."""
        self.kinds[kind] = ReportFiles(kind, num_items, items_per_file)


def _ascii(items: Any) -> bytes:
    """Return plain values as JSON in ASCII: half a million of them, so that the faster writer is asked first."""
    try:
        if (text := msgspec.json.encode(items)).isascii():
            return text
    except UnicodeEncodeError:  # half of a character, which JSON has an escape for
        pass
    return json.dumps(items, separators=(",", ":"), allow_nan=False).encode("ascii")


class ListFiles:
    """Items of one kind, written as soon as they fill a file.

    Args:
        folder: Where.
        kind: Which.
        items_per_file: How many.
    """

    def __init__(self, folder: DataFolder, kind: str, items_per_file: int) -> None:
        self._folder, self._kind, self._each = folder, kind, items_per_file
        self._items: list[Any] = []
        self.num_items = 0

    def add(self, item: Any) -> None:
        """Add an item of plain values."""
        self._items.append(item)
        self.num_items += 1
        if len(self._items) == self._each:
            self._write()

    def close(self) -> None:
        """Write the rest."""
        if self._items:
            self._write()
        self._folder.list(self._kind, num_items=self.num_items, items_per_file=self._each)

    def item(self, number: int) -> Any:
        """Return an item that was written; after `close`."""
        return self._folder.read(self._kind, number // self._each)[number % self._each]

    def _write(self) -> None:
        self._folder.write(self._kind, (self.num_items - 1) // self._each, self._items)
        self._items = []
