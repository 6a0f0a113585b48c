"""What `meta.json` of a snapshot says: typed, bounded, and sealed by a checksum over all of it.

A stride, a key or a plain value that is changed would change the values of a replay in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from glassengine.errors import CorruptError
from glassengine.executable.snapshot import layout
from glassengine.reading.documents import Size, parsed
from glassengine.reading.files import read_bytes
from glassengine.writing.checksums import document_checksum

_FIRST_SEALED = 2
"""Version from which on a snapshot has a checksum."""


class _Entry(msgspec.Struct):
    name: str
    kind: str
    dtype: str
    shape: list[Size] = []
    stride: list[Size] = []
    device: str = ""
    requires_grad: bool = False
    is_mutated: bool = False
    file: str | None = None
    key: str | None = None
    crc32: Size | None = None
    value: int | float | bool | str | None = None
    left_out: str | None = None
    sha256: str | None = None
    statistics: dict[str, Any] | None = None


class _Meta(msgspec.Struct):
    schema_version: int
    name: str
    kind: str
    reason: str
    process: int
    executable: int
    device_index: int
    execution: int
    redacted: bool
    inputs: list[_Entry]
    outputs: list[_Entry] | None
    rng: dict[str, _Entry]
    output_names: list[str]
    graph_hash: str | None
    graph_file: Literal["graph.pt2", "graph.onnx"] = "graph.pt2"
    graph_crc32: Size | None = None
    origin: dict[str, Any] | None = None
    checksum: str | None = None


def read_meta(directory: Path) -> dict[str, Any]:
    """Return what the `meta.json` in a snapshot's directory says.

    Raises:
        CorruptError: It is damaged, not what was written, or of a newer version.
    """
    path = directory / layout.META
    return parsed_meta(read_bytes(path, most=layout.MAX_META_BYTES, inside=directory), path)


def parsed_meta(text: bytes | str, where: Path) -> dict[str, Any]:
    """Return what the text of a `meta.json` says; raises as `read_meta`."""
    what = f"the description of the snapshot {where.parent.name if where.name == layout.META else where.name}"
    typed = parsed(text, _Meta, where, what=what, version=layout.SCHEMA_VERSION)
    content = parsed(text, dict[str, Any], where, what=what)
    found = content.pop("checksum", None)
    if (found is not None or typed.schema_version >= _FIRST_SEALED) and found != document_checksum(content):
        raise CorruptError(
            f"{what} is not what was written",
            got=f"{where}: another checksum",
            hint="take the snapshot again, or copy it again from where it was taken",
        )
    return content


def sealed(content: Mapping[str, Any]) -> str:
    """Return the text of a `meta.json` that `parsed_meta` accepts.

    Raises:
        ValueError: A number in it is not finite.
    """
    text = json.dumps({**content, "schema_version": layout.SCHEMA_VERSION}, allow_nan=False)
    known = json.loads(text)
    known.pop("checksum", None)
    return json.dumps({**known, "checksum": document_checksum(known)}, indent=1) + "\n"
