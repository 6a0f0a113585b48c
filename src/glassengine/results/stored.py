"""Reads results back: the JSON documents that `--json=FILE` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from glassengine.errors import UsageError
from glassengine.reading.documents import damaged, parsed
from glassengine.reading.files import read_bytes, shown
from glassengine.results.comparison import SCHEMA_VERSION, Comparison, Comparisons
from glassengine.results.failure import Failure
from glassengine.results.replay import Replayed

_MOST_BYTES = 1 << 30
_MOST_ITEMS = 100_000_000
_WHAT = "a JSON document of a result"
_ABSENT = msgspec.Raw()


class _Kind(msgspec.Struct):
    """The keys by which the documents differ."""

    error: msgspec.Raw = _ABSENT
    pairs: msgspec.Raw = _ABSENT
    comparisons: msgspec.Raw = _ABSENT
    executable: msgspec.Raw = _ABSENT


def read_comparisons(path: str | Path) -> tuple[Comparison, ...]:
    """Return what a command has compared, from its JSON document.

    Args:
        path: What `glass check`, `check-training`, `compare` (of tensors) or `replay --compare` wrote with `--json`.

    Raises:
        UsageError: There is no such file, or it is the document of something else.
        CorruptError: It is damaged, too large, or was written by a newer version.
    """
    data = read_bytes(path, most=_MOST_BYTES)
    kind = parsed(data, _Kind, path, what=_WHAT, version=SCHEMA_VERSION, items=_MOST_ITEMS)
    if kind.error is not _ABSENT:
        raise UsageError(
            "the document is of a command that ended with an error",
            got=f"{shown(path)}: {shown(_decoded(data, Failure, path).error.what)}",
            hint="run the command again",
        )
    if kind.comparisons is not _ABSENT:
        return tuple(_decoded(data, Comparisons, path).comparisons)
    if kind.pairs is not _ABSENT:
        return (_decoded(data, Comparison, path),)
    replayed = None if kind.executable is _ABSENT else _decoded(data, Replayed, path).comparison
    if replayed is None:
        raise UsageError(
            "the document is not of a comparison",
            got=shown(path),
            expected="what check, check-training, compare (of tensors) or replay --compare writes with --json=FILE",
        )
    return (replayed,)


def _decoded(data: bytes, kind: Any, path: str | Path) -> Any:
    try:
        # Numbers that are not finite stand as text.
        return msgspec.json.decode(data, type=kind, strict=False)
    except (ValueError, RecursionError, TypeError) as error:
        raise damaged(_WHAT, path, error) from error
