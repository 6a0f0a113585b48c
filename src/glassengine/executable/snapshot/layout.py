"""The layout of a snapshot on disk: one execution of one executable, described by a sealed `meta.json`.

    meta.json                what ran, on what, and an entry for every input and output; a checksum over all of it,
                             since another stride, key or plain value would change a replay in silence
    graph.pt2                the captured graph without values; a hard link where a snapshot beside it has the same one
    graph.onnx               in its place, where the graph is an ONNX file
    inputs.safetensors       values of the inputs before the run
    weights-N.safetensors    values of parameters, buffers and constants; hard links where they have not changed
    rng.safetensors          states of the random number generators before the run
    outputs.safetensors      values of the outputs

What was not kept is absent, and `meta.json` says why. A packed snapshot is one safetensors file with all of that: its
tensors are called `<file>/<key>`, its metadata has `meta.json`, and the bytes of the graph are a tensor, too.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from glassengine.errors import CorruptError
from glassengine.reading.documents import Size, parsed
from glassengine.reading.files import read_bytes
from glassengine.writing import document_checksum

SCHEMA_VERSION = 2
META = "meta.json"
GRAPH = "graph.pt2"
ONNX_GRAPH = "graph.onnx"
INPUTS = "inputs.safetensors"
OUTPUTS = "outputs.safetensors"
RNG = "rng.safetensors"
TENSOR_FILE = re.compile(r"(inputs|outputs|rng|weights-\d{1,3})\.safetensors")
MAX_META_BYTES = 64 << 20

_LONGEST_NAME = 100
_PLAIN = {"int": int, "float": float, "bool": bool, "str": str}
_FIRST_SEALED = 2
"""Version from which on a snapshot has a checksum."""


def weights_file(number: int) -> str:
    """Return the name of the file of weights with this number."""
    return f"weights-{number}.safetensors"


def directory_name(name: str, process: int, executable: int, device: int, execution: int) -> str:
    """Return what the snapshot of an execution is called; any name of an executable becomes a safe one."""
    safe = re.sub(r"[^\w.+=@-]+", ".", name, flags=re.ASCII).strip(".")[:_LONGEST_NAME] or "executable"
    return f"{safe}-process{process:06d}-executable{executable:06d}-device{device:06d}-execution{execution:06d}"


@dataclass(frozen=True)
class SnapshotEntry:
    """One input or output.

    Attributes:
        name: Unique among the inputs, or among the outputs.
        kind: What it is to the graph: "parameter", "buffer", "constant", "input", "size", "saved", "tangent", "other";
            "output" for an output.
        dtype: torch dtype name of a tensor; "int", "float", "bool", "str" or "NoneType" for a plain value.
        shape: Sizes of a tensor.
        stride: Steps in elements.
        device: Where it was; "" for a plain value.
        requires_grad: Whether it takes part in autograd.
        is_mutated: Whether the graph writes to it.
        file: Where its values are; None where they were not kept.
        key: Its key there.
        crc32: Of its bytes.
        value: Of a plain value; a float that is not finite is text.
        left_out: Why the value is missing.
        sha256: Of its bytes, where a redacted snapshot has no value.
        statistics: `results.Summary` as a dict, where a redacted snapshot has no value.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[Size, ...] = ()
    stride: tuple[Size, ...] = ()
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

    def __post_init__(self) -> None:
        if self.file is not None and not (TENSOR_FILE.fullmatch(self.file) and self.key is not None):
            raise ValueError(f"values in {self.file!r}")

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor; a plain value or something else otherwise."""
        return bool(self.device)

    def describe(self) -> str:
        """Return dtype and shape, as in `float32[2,3]`, or the plain value."""
        if self.is_tensor:
            return f"{self.dtype}[{','.join(map(str, self.shape))}]"
        return self.dtype if self.left_out or self.value is None else f"{self.dtype} {self.value}"

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `meta.json`: everything that is not the default."""
        document = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.default is dataclasses.MISSING or value != field.default:
                document[field.name] = list(value) if isinstance(value, tuple) else value
        return document


def plain_entry(name: str, kind: str, value: Any) -> SnapshotEntry:
    """Return the entry of an input or output that is not a tensor."""
    if value is None:
        return SnapshotEntry(name, kind, "NoneType")
    dtype = type(value).__name__
    if type(value) not in _PLAIN.values():
        return SnapshotEntry(name, kind, dtype, left_out=f"a {dtype} has no values to keep")
    if isinstance(value, float) and not math.isfinite(value):
        value = str(value)
    return SnapshotEntry(name, kind, dtype, value=value)


def plain_value(entry: SnapshotEntry) -> int | float | bool | str | None:
    """Return the value of a non-tensor entry that was not left out."""
    if entry.dtype == "NoneType" or entry.value is None:
        return None
    return _PLAIN[entry.dtype](entry.value)  # type: ignore[no-any-return]


class Meta(msgspec.Struct):
    """The part of a `meta.json` that a reader depends on."""

    schema_version: int
    name: str
    kind: str
    reason: str
    process: int
    executable: int
    device_index: int
    execution: int
    redacted: bool
    inputs: tuple[SnapshotEntry, ...]
    outputs: tuple[SnapshotEntry, ...] | None
    rng: dict[str, SnapshotEntry]
    output_names: tuple[str, ...]
    graph_hash: str | None
    graph_file: Literal["graph.pt2", "graph.onnx"] = "graph.pt2"
    graph_crc32: Size | None = None
    origin: dict[str, Any] | None = None
    checksum: str | None = None


def read_meta(directory: Path) -> tuple[Meta, dict[str, Any]]:
    """Return the `meta.json` in a snapshot's directory, typed and as it is.

    Raises:
        CorruptError: It is damaged, not what was written, or of a newer version.
    """
    path = directory / META
    return parsed_meta(read_bytes(path, most=MAX_META_BYTES, inside=directory), path)


def parsed_meta(text: bytes | str, where: Path) -> tuple[Meta, dict[str, Any]]:
    """Return the text of a `meta.json`, typed and as it is; raises as `read_meta`."""
    what = f"the description of the snapshot {where.parent.name if where.name == META else where.name}"
    typed = parsed(text, Meta, where, what=what, version=SCHEMA_VERSION)
    content = parsed(text, dict[str, Any], where, what=what)
    found = content.pop("checksum", None)
    if (found is not None or typed.schema_version >= _FIRST_SEALED) and found != document_checksum(content):
        raise CorruptError(
            f"{what} is not what was written",
            got=f"{where}: another checksum",
            hint="take the snapshot again, or copy it again from where it was taken",
        )
    return typed, content


def sealed(content: Mapping[str, Any]) -> str:
    """Return the text of a `meta.json` that `parsed_meta` accepts.

    Raises:
        ValueError: A number in it is not finite.
    """
    text = json.dumps({**content, "schema_version": SCHEMA_VERSION}, allow_nan=False)
    known = json.loads(text)
    known.pop("checksum", None)
    return json.dumps({**known, "checksum": document_checksum(known)}, indent=1) + "\n"
