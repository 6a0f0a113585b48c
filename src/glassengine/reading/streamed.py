"""One JSON document read piece by piece: members of objects and elements of arrays, so that long arrays take no memory.

What is asked for is read forward once: `members` of an object, `elements` of an array, or a whole `value`.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from glassengine.errors import CorruptError
from glassengine.reading.documents import damaged

_BLOCK = 4 << 20
_SPACE = " \t\r\n"
MOST_OF_A_VALUE = 256 << 20
"""Characters of a value that is taken whole."""


class StreamedDocument:
    """A JSON document in an open file, at the place up to which it was read.

    Args:
        file: Read forward only; the caller closes it.
        where: The place to name in an error.
        what: How to call the document in an error.
        most: Characters of a value that is taken whole, at most.
    """

    def __init__(
        self, file: BinaryIO, where: str | Path, *, what: str = "a JSON document", most: int = MOST_OF_A_VALUE
    ) -> None:
        self._file = file
        self._where = where
        self._what = what
        self._most = most
        self._decoder = json.JSONDecoder(parse_constant=_refuse)
        self._characters = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._at = 0
        self._passed = 0
        self._ended = False

    def members(self) -> Iterator[str]:
        """Yield the keys of the object that comes next; its value is read after each, or passed over.

        Raises:
            CorruptError: There is no object, or it is damaged.
        """
        self._expect("{")
        if self._peek() == "}":
            self._at += 1
            return
        while True:
            key = self.value()
            if not isinstance(key, str):
                raise self._damaged("a key is not a string")
            self._expect(":")
            self._peek()
            before = self._passed + self._at
            yield key
            if self._passed + self._at == before:
                self.value()
            if not self._goes_on("}"):
                return

    def elements(self) -> Iterator[Any]:
        """Yield the elements of the array that comes next, each a plain value.

        Raises:
            CorruptError: There is no array, or it is damaged.
        """
        for _ in self.objects():
            yield self.value()

    def objects(self) -> Iterator[StreamedDocument]:
        """Yield the document itself before each element of the array that comes next: read its `members` each time.

        Raises:
            CorruptError: There is no array, or it is damaged.
        """
        self._expect("[")
        if self._peek() == "]":
            self._at += 1
            return
        while True:
            yield self
            if not self._goes_on("]"):
                return

    def value(self) -> Any:
        """Return what comes next, whole.

        Raises:
            CorruptError: It is damaged, or too large.
        """
        self._peek()
        while True:
            try:
                found, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended:
                    raise self._damaged(error) from error
            except (ValueError, RecursionError, MemoryError) as error:
                raise self._damaged(error) from error
            else:
                # A number may go on in the next block: "1" as "1.5" or "1e-5".
                if end + 2 < len(self._text) or self._ended:
                    self._at = end
                    return found
            if len(self._text) - self._at > self._most:
                raise self._damaged(f"a value has more than {self._most:,} characters")
            self._more()

    def end(self) -> None:
        """Require that nothing follows.

        Raises:
            CorruptError: Something does.
        """
        if self._peek():
            raise self._damaged("something follows the document")

    def peek(self) -> str:
        """Return the first character of what comes next: "{" of an object, "[" of an array; "" at the end."""
        return self._peek()

    def _goes_on(self, last: str) -> bool:
        found = self._peek()
        if found not in (",", last) or not found:
            raise self._damaged(f"expected , or {last}")
        self._at += 1
        return found == ","

    def _expect(self, character: str) -> None:
        if self._peek() != character:
            raise self._damaged(f"expected {character}")
        self._at += 1

    def _peek(self) -> str:
        while True:
            text, at = self._text, self._at
            while at < len(text) and text[at] in _SPACE:
                at += 1
            self._at = at
            if at < len(text):
                return text[at]
            if self._ended:
                return ""
            self._more()

    def _more(self) -> None:
        # As much again as could not be decoded: a long value is tried a few times only.
        data = self._file.read(max(_BLOCK, len(self._text) - self._at))
        self._ended = not data
        try:
            new = self._characters.decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            raise self._damaged(error) from error
        self._text = self._text[self._at :] + new
        self._passed += self._at
        self._at = 0

    def _damaged(self, why: object) -> CorruptError:
        return damaged(self._what, self._where, why)


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")
