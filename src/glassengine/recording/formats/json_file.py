"""JSON files of others, read within bounds: what a document may unfold to in memory is limited before it is parsed.

Strings that are longer than a name can be (an array in base64) stay in the file, so that a document of many gigabytes
of arrays costs no more than its structure.
"""

from __future__ import annotations

import json
import mmap
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glassengine.errors import CorruptError
from glassengine.reading.files import open_regular

MAX_BYTES = 1 << 28
MAX_ITEMS = 4_000_000
_MAX_SHORT_BYTES = 1 << 15
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


@dataclass(frozen=True)
class LongText:
    """A string that was left in the file: its first byte, without the quote, and its number of bytes as written."""

    offset: int
    num_bytes: int


class JsonFile:
    """A parsed JSON file.

    Attributes:
        path: The file.
        document: What it holds; one of more than 32 KiB is a `LongText`.

    Raises:
        CorruptError: It is not JSON, not a plain file, or holds more than can be read within bounds.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._long: list[LongText] = []
        # A string of the document itself cannot be taken for the mark of one that was left out.
        self._mark = secrets.token_hex(16)
        skeleton = self._skeleton()
        if sum(skeleton.count(char) for char in (b",", b"[", b"{")) > MAX_ITEMS:
            raise CorruptError("a JSON file holds too many items", got=str(path), expected=f"at most {MAX_ITEMS:,}")
        try:
            self.document = self._restored(json.loads(skeleton))
        except (ValueError, RecursionError) as error:
            raise CorruptError("not a JSON file", got=f"{path}: {error}") from error

    def read(self, text: LongText, first: int = 0, num_bytes: int | None = None) -> bytes:
        """Return bytes of a string that was left in the file, as they are written there.

        Args:
            text: The string.
            first: Number of the first byte.
            num_bytes: At most so many; all when None.
        """
        left = max(text.num_bytes - first, 0)
        with open_regular(self.path, inside=self.path.parent) as file:
            file.seek(text.offset + first)
            return file.read(left if num_bytes is None else min(num_bytes, left))

    def _skeleton(self) -> bytes:
        with open_regular(self.path, inside=self.path.parent) as file:
            try:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise CorruptError("not a JSON file", got=f"{self.path}: it is empty") from error
        with mapped:
            pieces: list[bytes] = []
            kept, end, start = 0, 0, mapped.find(b'"')
            while start >= 0:
                found = _STRING.match(mapped, start)
                if found is None:
                    raise CorruptError("not a JSON file", got=f"{self.path}: a string has no end")
                if found.end() - start > _MAX_SHORT_BYTES:
                    pieces += [mapped[end:start], f'"{self._mark}{len(self._long)}"'.encode()]
                    kept += start - end
                    self._long.append(LongText(start + 1, found.end() - start - 2))
                    end = found.end()
                if kept + found.end() - end > MAX_BYTES:
                    break
                start = mapped.find(b'"', found.end())
            if kept + len(mapped) - end > MAX_BYTES:
                got = f"{self.path}: more than {MAX_BYTES >> 20} MiB beside long strings"
                raise CorruptError("a JSON file is too large to be read", got=got)
            return b"".join([*pieces, mapped[end:]])

    def _restored(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {str(self._restored(key)): self._restored(child) for key, child in value.items()}
        if isinstance(value, list):
            return [self._restored(child) for child in value]
        if self._long and isinstance(value, str) and value.startswith(self._mark):
            return self._long[int(value.removeprefix(self._mark))]
        return value
