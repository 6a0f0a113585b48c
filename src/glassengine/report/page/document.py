"""The result that a page shows, from a `--json` document or from memory: a head, and its pairs one after the other.

Pairs are never held all at once: a comparison of 100 000 tensors in four steps is half a gigabyte of JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from glassengine.errors import CorruptError, UsageError
from glassengine.reading.documents import converted
from glassengine.reading.files import open_regular
from glassengine.reading.streamed import StreamedDocument
from glassengine.results import Comparison, Comparisons, Pair, Replayed
from glassengine.results.comparison import SCHEMA_VERSION

_WHAT = "a result of glass"
_OTHERS = ("error", "engines", "stages", "num_series", "tensors", "schemas")
"""Keys of documents that no page is made of."""

Plain = dict[str, Any]
OnPair = Callable[[Pair, Plain], None]
"""Takes a pair, and the same as plain values."""


@dataclass(frozen=True)
class Shown:
    """What one page shows.

    Attributes:
        comparison: Without its pairs; None of a replay that judged nothing.
        replayed: Of a replay, what came of it, without the comparison.
    """

    comparison: Comparison | None
    replayed: Replayed | None = None


Takers = Callable[[int], OnPair]
"""Number of a comparison, from 0 -> what takes its pairs."""


def from_memory(result: Comparison | Comparisons | Replayed, takers: Takers) -> list[Shown]:
    """Hand over all pairs of a result, and return what the pages show."""
    if isinstance(result, Comparisons):
        return [_one(one, takers(number)) for number, one in enumerate(result.comparisons)]
    if isinstance(result, Comparison):
        return [_one(result, takers(0))]
    inner = None if result.comparison is None else _one(result.comparison, takers(0)).comparison
    return [Shown(inner, _without(result, "comparison", None))]


def _one(result: Comparison, take: OnPair) -> Shown:
    for pair in result.pairs:
        take(pair, pair.to_dict())
    return Shown(_without(result, "pairs", ()))


def _without(result: Any, name: str, nothing: Any) -> Any:
    return dataclasses.replace(result, **{name: nothing})


def from_file(path: str | Path, takers: Takers) -> list[Shown]:
    """Hand over all pairs of a `--json` document, and return what the pages show.

    Raises:
        UsageError: There is no such file, or the document is of another kind.
        CorruptError: It is damaged, or of a newer version.
    """
    with open_regular(path) as file:
        document = StreamedDocument(cast(Any, file), path, what=_WHAT)
        head, found = _members(document, path, takers, 0)
        document.end()
    if (version := head.get("schema_version", SCHEMA_VERSION)) != SCHEMA_VERSION:
        raise CorruptError(
            f"{_WHAT} has another schema version",
            got=f"{path}: {version!r}"[:200],
            expected=str(SCHEMA_VERSION),
            hint="update Glass Engine",
        )
    if found:
        return found
    if "comparison" in head and "snapshot" in head:
        inner = head.pop("comparison")
        replayed = converted(head, Replayed, path, what=_WHAT, words=True)
        shown = None if inner is None else _of_plain(inner, path, takers(0))
        return [Shown(shown, replayed)]
    return [Shown(_head(head, path))]


def _members(document: StreamedDocument, path: str | Path, takers: Takers, number: int) -> tuple[Plain, list[Shown]]:
    """Return the members of one object without its pairs, and the comparisons that it holds."""
    head: Plain = {}
    found: list[Shown] = []
    for key in document.members():
        if key == "pairs":
            take = takers(number)
            for element in document.elements():
                take(converted(element, Pair, path, what=_WHAT, words=True), element)
        elif key == "comparisons" and document.peek() == "[":
            found = list(_several(document, path, takers))
        else:
            head[key] = document.value()
    return head, found


def _several(document: StreamedDocument, path: str | Path, takers: Takers) -> Iterator[Shown]:
    for number, inner in enumerate(document.objects()):
        head, _ = _members(inner, path, takers, number)
        yield Shown(_head(head, path))


def _of_plain(value: Any, path: str | Path, take: OnPair) -> Comparison:
    pairs = value.pop("pairs", None) if isinstance(value, dict) else None
    if not isinstance(pairs, list):
        raise CorruptError(f"{_WHAT} is damaged", got=f"{path}: its comparison has no pairs")
    for element in pairs:
        take(converted(element, Pair, path, what=_WHAT, words=True), element)
    return _head(value, path)


def _head(head: Plain, path: str | Path) -> Comparison:
    if "counts" not in head or "first_divergence" not in head:
        kind = next((name for name in _OTHERS if name in head), "")
        raise UsageError(
            "no report can be made of this document",
            got=f"{path}" + (f", with the key {kind!r}" if kind else ""),
            expected="what `--json` of check, check-training, compare (of tensors) or replay has written",
        )
    return converted({**head, "pairs": []}, Comparison, path, what=_WHAT, words=True)
