"""JSON documents, each with a type: what does not fit is refused with the path of the field, before anyone uses it.

`StreamedDocument` reads one forward, piece by piece, so that long arrays take no memory.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypedDict, TypeVar, Unpack

import msgspec

from glassengine.errors import CorruptError
from glassengine.reading.files import read_bytes, shown

Document = TypeVar("Document")

Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""A number of things or bytes, or a place among them."""

# What people and programs write nests some ten levels.
MAX_DEPTH = 100
# An empty object takes 64 bytes of memory for its two on disk.
MAX_ITEMS = 4_000_000
_MAX_REASON = 400
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NO_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))
_ALIKE = bytes.maketrans(b"{}", b"[]")
_MARK = b"\xef\xbb\xbf"  # some editors begin a file with it


class _Version(msgspec.Struct):
    schema_version: int


class ParseOptions(TypedDict, total=False):
    """How a document is read; see `parsed`."""

    what: str
    version: int | None
    nonfinite: bool
    unique: bool
    items: int
    depth: int


def read_document(
    path: str | Path,
    schema: type[Document],
    *,
    most: int,
    inside: str | Path | None = None,
    **options: Unpack[ParseOptions],
) -> Document:
    """Return the JSON document in a plain file.

    Args:
        path: The file.
        schema: As for `parsed`.
        most: Bytes of the file at most.
        inside: As for `reading.files.open_regular`.
        options: As for `parsed`.

    Raises:
        UsageError: Without `inside`: there is no such file.
        CorruptError: With `inside`: the same. The document is too large, damaged or of a newer version.
    """
    return parsed(read_bytes(path, most=most, inside=inside), schema, path, **options)


def parsed(
    data: bytes | str,
    schema: type[Document],
    where: str | Path,
    *,
    what: str = "a JSON document",
    version: int | None = None,
    nonfinite: bool = False,
    unique: bool = False,
    items: int = MAX_ITEMS,
    depth: int = MAX_DEPTH,
) -> Document:
    """Return a JSON document from memory.

    Args:
        data: The document; its size is bounded by who read it.
        schema: A `msgspec.Struct`, or any type that msgspec decodes; fields that it does not name are tolerated.
        where: The place to name in an error.
        what: How to call the document in an error.
        version: The largest `schema_version` that is read; the document must say its own.
        nonfinite: Whether NaN and Infinity are numbers of it, as other programs write them.
        unique: Whether a key that appears twice is an error; otherwise the last one counts.
        items: Values that it holds at most.
        depth: Maximum nesting; a walk may recurse once per level.

    Raises:
        CorruptError: It is damaged, nests too deeply, or is of a newer version.
    """
    try:
        raw = (data.encode() if isinstance(data, str) else data).removeprefix(_MARK)
        if sum(raw.count(char) for char in (b",", b"[", b"{")) > items:
            raise ValueError(f"it holds more than {items:,} items")
        if _too_deep(raw, depth):
            raise ValueError(f"it nests more than {depth} levels")
        if version is not None:
            refuse_newer(_decoded(raw, _Version, nonfinite, unique=False).schema_version, version, where, what)
        return _decoded(raw, schema, nonfinite, unique)
    except (ValueError, RecursionError, TypeError, MemoryError) as error:
        raise damaged(what, where, error) from error


def converted(
    value: object, schema: type[Document], where: str | Path, *, what: str = "a JSON document", words: bool = False
) -> Document:
    """Return a value of plain lists, dicts and numbers as what `schema` says.

    Args:
        value: The value.
        schema: As for `parsed`; a dataclass, for one.
        where: The place to name in an error.
        what: How to call the document in an error.
        words: Whether numbers that are not finite are the words "nan", "inf" and "-inf", as results write them.

    Raises:
        CorruptError: It does not fit.
    """
    try:
        return msgspec.convert(value, schema, strict=not words)
    except (ValueError, RecursionError, TypeError) as error:
        raise damaged(what, where, error) from error


def objects_within(document: Any) -> Iterator[dict[str, Any]]:
    """Yield every object of a JSON document, itself too where it is one, however deep it lies."""
    waiting = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
            yield value


def damaged(what: str, where: str | Path, error: object) -> CorruptError:
    """Return the error for a document that cannot be used."""
    reason = shown(str(error))[:_MAX_REASON] or type(error).__name__
    return CorruptError(f"{what} is damaged", got=f"{shown(where)}: {reason}")


def refuse_newer(found: object, version: int, where: str | Path, what: str) -> None:
    """Refuse the schema version of a document that this version of the package does not know.

    Raises:
        CorruptError: It is a later one, or no version.
    """
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise damaged(what, where, f"schema version {found!r} - at `$.schema_version`")
    if found > version:
        raise CorruptError(
            f"{what} was written by a newer version of Glass Engine",
            got=f"{shown(where)}: schema version {found}",
            expected=f"at most {version}",
            hint="update Glass Engine",
        )


def _decoded(raw: bytes, schema: type[Document], nonfinite: bool, unique: bool) -> Document:
    if not nonfinite and not unique:
        return msgspec.json.decode(raw, type=schema)
    # msgspec's reader knows neither; Python's does, with less care about texts and numbers.
    number = None if nonfinite else _finite
    pairs = _without_repetition if unique else None
    value = json.loads(raw.decode(), parse_constant=number, parse_float=number, object_pairs_hook=pairs)
    _check_texts(value)
    return msgspec.convert(value, schema)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not a number of JSON")
    return number


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{counts.most_common(1)[0][0]!r} appears twice")
    return result


def _check_texts(value: object) -> None:
    """Refuse halves of a character: nothing could print or write them."""
    left: list[object] = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            if not item.isascii():
                item.encode()
        elif isinstance(item, dict):
            left += item.keys()
            left += item.values()
        elif isinstance(item, list):
            left += item


def _too_deep(raw: bytes, depth: int) -> bool:
    if raw.count(b"[") + raw.count(b"{") <= depth:
        return False
    brackets = _TEXT.sub(b"", raw).translate(_ALIKE, _NO_BRACKETS)
    for _ in range(depth):
        shorter = brackets.replace(b"[]", b"")  # takes one level away, the innermost pairs
        if not shorter:
            return False
        if shorter == brackets:  # they do not match: the decoder of the document reports it
            return False
        brackets = shorter
    return True


_BLOCK = 4 << 20
_SPACE = " \t\r\n"
MOST_OF_A_VALUE = 256 << 20
"""Characters of a value that is taken whole."""


class StreamedDocument:
    """A JSON document in an open file, at the place up to which it was read."""

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
        if self.peek() == "}":
            self._at += 1
            return
        while True:
            key = self.value()
            if not isinstance(key, str):
                raise self._damaged("a key is not a string")
            self._expect(":")
            self.peek()
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
        if self.peek() == "]":
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
        self.peek()
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
        if self.peek():
            raise self._damaged("something follows the document")

    def _goes_on(self, last: str) -> bool:
        found = self.peek()
        if found not in (",", last) or not found:
            raise self._damaged(f"expected , or {last}")
        self._at += 1
        return found == ","

    def _expect(self, character: str) -> None:
        if self.peek() != character:
            raise self._damaged(f"expected {character}")
        self._at += 1

    def peek(self) -> str:
        """Return the first character of what comes next: "{" of an object, "[" of an array; "" at the end."""
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
