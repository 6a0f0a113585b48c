"""Reads results back: the JSON documents that `--json=FILE` writes, their pairs one after the other.

Pairs are handed over as they are read: a comparison of 100 000 tensors in four steps is half a gigabyte of JSON.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

from glassengine.errors import CorruptError, UsageError
from glassengine.reading.documents import StreamedDocument, converted, refuse_newer
from glassengine.reading.files import open_regular, shown
from glassengine.results.backends import ArtifactComparison
from glassengine.results.comparison import SCHEMA_VERSION, Comparison, Comparisons, SeriesComparison
from glassengine.results.engines import SideBySide
from glassengine.results.pairs import Pair
from glassengine.results.recorded import Replayed

_MOST_BYTES = 1 << 30
"""Of a document whose pairs are held all at once."""
_WHAT = "a result of glass"
_VERSION = "schema_version"

Plain = dict[str, Any]
OnPair = Callable[[Pair, Plain], None]
"""Takes a pair, and the same as plain values."""
Takers = Callable[[int], OnPair]
"""Number of a comparison, from 0 -> what takes its pairs."""
Apart = SideBySide | ArtifactComparison | SeriesComparison
"""What is compared, and has no pairs of tensors."""

_APART: tuple[tuple[frozenset[str], type[Apart]], ...] = (
    (frozenset({"columns", "token_ids"}), SideBySide),
    (frozenset({"stages", "differences"}), ArtifactComparison),
    (frozenset({"partings", "num_series"}), SeriesComparison),
)
"""Keys that tell what a document is of."""


class Stored(NamedTuple):
    """One result, without its pairs.

    Attributes:
        comparison: Of tensors; None of a replay that judged nothing, and where `apart` is.
        replayed: Of a replay, what came of it, without the comparison.
        apart: Engines side by side, build artifacts, series of watched runs.
    """

    comparison: Comparison | None = None
    replayed: Replayed | None = None
    apart: Apart | None = None


def read_result(path: str | Path, takers: Takers) -> list[Stored]:
    """Hand over all pairs of a `--json` document, and return what it holds: of several candidates, one each.

    Args:
        path: What `glass check`, `check-training`, `compare` or `replay` wrote with `--json`.
        takers: What takes the pairs.

    Raises:
        UsageError: There is no such file, or it is the document of something else.
        CorruptError: It is damaged, or was written by a newer version.
    """
    with open_regular(path) as file:
        document = StreamedDocument(cast("Any", file), path, what=_WHAT)
        head, found = _members(document, path, takers, 0)
        document.end()
    if found:
        return found
    if isinstance(failed := head.get("error"), dict):
        raise UsageError(
            "the document is of a command that ended with an error",
            got=f"{shown(path)}: {shown(str(failed.get('what', '')))}",
            hint="run the command again",
        )
    if "comparison" in head and "snapshot" in head:
        inner = head.pop("comparison")
        replayed = converted(head, Replayed, path, what=_WHAT, words=True)
        return [Stored(None if inner is None else _of_plain(inner, path, takers(0)), replayed)]
    for keys, kind in _APART:
        if keys <= head.keys():
            return [Stored(apart=converted(head, kind, path, what=_WHAT, words=True))]
    return [Stored(_head(head, path))]


def read_comparisons(path: str | Path) -> tuple[Comparison, ...]:
    """Return what a command has compared, tensor by tensor, from its JSON document.

    Args:
        path: What `glass check`, `check-training`, `compare` (of tensors) or `replay --compare` wrote with `--json`.

    Raises:
        UsageError: There is no such file, or it is the document of something else.
        CorruptError: It is damaged, too large, or was written by a newer version.
    """
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > _MOST_BYTES:
            got = f"{shown(path)}: {size:,} bytes"
            raise CorruptError(f"{_WHAT} is too large", got=got, expected=f"at most {_MOST_BYTES:,}")
    pairs: dict[int, list[Pair]] = {}

    def taker(number: int) -> OnPair:
        own = pairs.setdefault(number, [])
        return lambda pair, _: own.append(pair)

    found = read_result(path, taker)
    comparisons = [one.comparison for one in found]
    if None in comparisons:
        raise _of_something_else(path, "")
    return tuple(
        dataclasses.replace(one, pairs=tuple(pairs.get(number, ())))
        for number, one in enumerate(comparisons)
        if one is not None
    )


def without_pairs(result: Comparison | Comparisons | Replayed | Apart, takers: Takers) -> list[Stored]:
    """Do with a result in memory what `read_result` does with its document."""
    if isinstance(result, Comparisons):
        return [_without_pairs(one, takers(number)) for number, one in enumerate(result.comparisons)]
    if isinstance(result, Comparison):
        return [_without_pairs(result, takers(0))]
    if isinstance(result, Replayed):
        inner = None if result.comparison is None else _without_pairs(result.comparison, takers(0)).comparison
        return [Stored(inner, dataclasses.replace(result, comparison=None))]
    return [Stored(apart=result)]


def _without_pairs(result: Comparison, take: OnPair) -> Stored:
    for pair in result.pairs:
        take(pair, pair.to_dict())
    return Stored(dataclasses.replace(result, pairs=()))


def _members(document: StreamedDocument, path: str | Path, takers: Takers, number: int) -> tuple[Plain, list[Stored]]:
    """Return the members of one object without its pairs, and the comparisons that it holds."""
    head: Plain = {}
    found: list[Stored] = []
    for key in document.members():
        if key == "pairs":
            take = takers(number)
            for element in document.elements():
                take(converted(element, Pair, path, what=_WHAT, words=True), element)
        elif key == "comparisons" and document.peek() == "[":
            found = [
                Stored(_head(_members(inner, path, takers, at)[0], path)) for at, inner in enumerate(document.objects())
            ]
        else:
            head[key] = document.value()
            if key == _VERSION:
                # At once: what a newer version writes may not fit.
                refuse_newer(head[key], SCHEMA_VERSION, path, _WHAT)
    return head, found


def _of_plain(value: Any, path: str | Path, take: OnPair) -> Comparison:
    pairs = value.pop("pairs", None) if isinstance(value, dict) else None
    if not isinstance(pairs, list):
        raise CorruptError(f"{_WHAT} is damaged", got=f"{shown(path)}: its comparison has no pairs")
    for element in pairs:
        take(converted(element, Pair, path, what=_WHAT, words=True), element)
    return _head(value, path)


def _head(head: Plain, path: str | Path) -> Comparison:
    if "counts" not in head or "first_divergence" not in head:
        raise _of_something_else(path, ", ".join(list(head)[:3]))
    return converted({**head, "pairs": []}, Comparison, path, what=_WHAT, words=True)


def _of_something_else(path: str | Path, keys: str) -> UsageError:
    return UsageError(
        "the document is not of a comparison",
        got=shown(path) + (f", with the keys {shown(keys)}" if keys else ""),
        expected="what check, check-training, compare or replay --compare writes with --json=FILE",
    )
