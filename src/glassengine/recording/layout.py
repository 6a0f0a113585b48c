"""The layout of a recording on disk: names, numbers and the bytes of `index.log`. No file is touched here.

    recording.json            schema version, state (writing | complete | incomplete), metadata
    shard-NNNNN.part          HEADER_BYTES reserved, then raw tensor bytes, each start aligned to ALIGNMENT
    shard-NNNNN.safetensors   the same file sealed: the reserved bytes hold a safetensors header
    index.log                 frames: one per tensor, one per tensor whose values were left out, the token ids of the
                              step where there are any, then the commit of the step, after all its bytes

A frame is: payload length (u32), CRC-32 of the payload (u32), JSON payload; little-endian. The offset of a tensor
counts from the end of the shard's header. Shards are numbered, so that a site name never becomes a path.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, BinaryIO

import torch

SCHEMA_VERSION = 2
MANIFEST = "recording.json"
INDEX = "index.log"
ALIGNMENT = 64

# 8 length bytes and the header of the first shard. A shard is sealed before its header outgrows them, so nothing
# moves; every shard reserves twice as much as the one before, so that many small tensors do not make many files.
HEADER_BYTES = 1 << 18
MAX_HEADER_BYTES = 1 << 23
MAX_NAME_BYTES = 1 << 14
MAX_FRAME_BYTES = 1 << 20
MAX_MANIFEST_BYTES = 1 << 28
MAX_SHARD_NUMBER = 99_999
MAX_ROWS = 1 << 20
_TOKENS_PER_FRAME = 1 << 15

_FRAME = struct.Struct("<II")

# torch dtype name -> (safetensors code, torch dtype of the stored elements, stored elements per element)
STORED: dict[str, tuple[str, torch.dtype, int]] = {
    "bool": ("BOOL", torch.bool, 1),
    "uint8": ("U8", torch.uint8, 1),
    "int8": ("I8", torch.int8, 1),
    "uint16": ("U16", torch.uint16, 1),
    "int16": ("I16", torch.int16, 1),
    "uint32": ("U32", torch.uint32, 1),
    "int32": ("I32", torch.int32, 1),
    "uint64": ("U64", torch.uint64, 1),
    "int64": ("I64", torch.int64, 1),
    "float8_e4m3fn": ("F8_E4M3", torch.float8_e4m3fn, 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", torch.float8_e4m3fnuz, 1),
    "float8_e5m2": ("F8_E5M2", torch.float8_e5m2, 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", torch.float8_e5m2fnuz, 1),
    "float8_e8m0fnu": ("F8_E8M0", torch.float8_e8m0fnu, 1),
    "float16": ("F16", torch.float16, 1),
    "bfloat16": ("BF16", torch.bfloat16, 1),
    "float32": ("F32", torch.float32, 1),
    "float64": ("F64", torch.float64, 1),
    "complex64": ("C64", torch.complex64, 1),
    # safetensors has no such dtype: declared parts, a last dimension of (real, imaginary)
    "complex128": ("F64", torch.float64, 2),
}


@dataclass(frozen=True)
class Location:
    """Where the bytes of a tensor are: shard number, offset after the shard's header, CRC-32 of the bytes."""

    shard: int
    offset: int
    checksum: int


@dataclass(frozen=True)
class Entry:
    """One tensor of a source.

    Attributes:
        site: Site name, or the key in a foreign file.
        step: 0 is the prefill.
        rank: Process that had the tensor.
        dtype: torch dtype name, e.g. "float32".
        shape: Sizes.
        axes: Position of the "batch", "sequence" and "cache" dimensions, where known.
        node: Name of the graph node that made it, if known.
        nbytes: Bytes of the values.
        location: Where a recording has the bytes; None in foreign files. Sites that share it share the values.
    """

    site: str
    step: int
    rank: int
    dtype: str
    shape: tuple[int, ...]
    axes: dict[str, int] = field(default_factory=dict, hash=False)
    node: str | None = None
    nbytes: int = 0
    location: Location | None = None

    def describe(self) -> str:
        """Return dtype and shape, as in `float32[2,3]`."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class LightStatistics:
    """What is cheap enough to take of every tensor while the model runs; over the finite elements, in float64.

    Attributes:
        min: None when nothing finite is left.
        max: None when nothing finite is left.
        norm: Root of the sum of squares; of complex elements the magnitude counts.
        num_nonfinite: NaN and infinite elements.
    """

    min: float | None
    max: float | None
    norm: float
    num_nonfinite: int


@dataclass(frozen=True)
class LeftOut:
    """A tensor that was seen and whose values are not in the recording.

    Attributes:
        site: Site name.
        step: 0 is the prefill.
        rank: Process that had the tensor.
        reason: Why its values are not there.
        dtype: torch dtype name; None where it is not a plain tensor.
        shape: Sizes; None where unknown.
        statistics: What was taken in place of the values, if anything.
    """

    site: str
    step: int
    rank: int
    reason: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    statistics: LightStatistics | None = None


class Description:
    """What the records of one tensor have in common in every step: made once, because records are made in thousands.

    Attributes:
        site: Site name.
        dtype: torch dtype name.
        shape: Sizes.
        nbytes: Bytes of the values.
        site_json: The site as JSON text, without its quotes.
        header: Text of a safetensors header entry up to its offsets.
    """

    __slots__ = ("_fixed", "dtype", "header", "nbytes", "shape", "site", "site_json")

    def __init__(
        self, site: str, dtype: str, shape: tuple[int, ...], axes: Mapping[str, int] | None, node: str | None
    ) -> None:
        self.site = site
        self.dtype = dtype
        self.shape = shape
        self.nbytes = num_bytes(dtype, shape)
        self.site_json = json.dumps(site)[1:-1]
        code, _, parts = STORED[dtype]
        stored = [*shape, parts] if parts > 1 else list(shape)
        self.header = f'":{{"dtype":"{code}","shape":{json.dumps(stored, separators=(",", ":"))},"data_offsets":['
        fixed = {"dtype": dtype, "shape": shape, "axes": dict(axes or {}), "node": node, "nbytes": self.nbytes}
        text = json.dumps(fixed, separators=(",", ":"))
        self._fixed = f'{{"kind":"tensor","site":"{self.site_json}",{text[1:-1]},'

    def frame(self, step: int, rank: int, location: Location) -> bytes:
        """Return the index frame of the tensor."""
        return text_frame(
            f'{self._fixed}"step":{step},"rank":{rank},"shard":{location.shard},"offset":{location.offset},'
            f'"checksum":{location.checksum}}}'
        )


def shard_name(number: int, *, sealed: bool) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:05d}.{'safetensors' if sealed else 'part'}"


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the stored bytes of a tensor."""
    _, stored, parts = STORED[dtype]
    return math.prod(shape) * stored.itemsize * parts


def frame(payload: dict[str, Any]) -> bytes:
    """Return the bytes of one index frame."""
    return text_frame(json.dumps(payload, ensure_ascii=True, allow_nan=False, separators=(",", ":")))


def text_frame(text: str) -> bytes:
    """Return the bytes of one index frame, of a payload that is JSON text already."""
    data = text.encode()
    return _FRAME.pack(len(data), zlib.crc32(data)) + data


def read_frame(file: BinaryIO) -> dict[str, Any] | None:
    """Read the next frame; None at the end of the file.

    Raises:
        ValueError: The frame is cut, damaged or not a JSON object. At most `MAX_FRAME_BYTES` are read.
    """
    head = file.read(_FRAME.size)
    if not head:
        return None
    if len(head) < _FRAME.size:
        raise ValueError("the file ends inside a record")
    length, checksum = _FRAME.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a record claims {length} bytes")
    text = file.read(length)
    if len(text) < length:
        raise ValueError("the file ends inside a record")
    if zlib.crc32(text) != checksum:
        raise ValueError("the checksum of a record does not match")
    try:
        payload = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("a record is not JSON") from error
    if not isinstance(payload, dict):
        raise ValueError("a record is not an object")
    return payload


def entry_from(payload: dict[str, Any]) -> Entry:
    """Return the entry of a tensor's payload, trusting nothing.

    Raises:
        ValueError: A field is missing, of the wrong kind, or contradicts another.
    """
    shape = payload.get("shape")
    axes = payload.get("axes")
    site, node, dtype = payload.get("site"), payload.get("node"), payload.get("dtype")
    if not isinstance(site, str) or not (node is None or isinstance(node, str)):
        raise ValueError("a name is not text")
    if not isinstance(dtype, str) or dtype not in STORED:
        raise ValueError(f"unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(_is_size(size) for size in shape):
        raise ValueError("a shape is not a list of sizes")
    if not isinstance(axes, dict) or not all(_is_size(axis) and axis < len(shape) for axis in axes.values()):
        raise ValueError("axes do not name dimensions")
    numbers = [payload.get(key) for key in ("step", "rank", "nbytes", "shard", "offset", "checksum")]
    if not all(_is_size(number) for number in numbers):
        raise ValueError("a number is missing or negative")
    step, rank, nbytes, shard, offset, checksum = (int(str(number)) for number in numbers)
    if nbytes != num_bytes(dtype, tuple(shape)):
        raise ValueError(f"{nbytes} bytes do not hold {dtype}{shape}")
    if shard > MAX_SHARD_NUMBER or offset % ALIGNMENT:
        raise ValueError("a location is impossible")
    return Entry(site, step, rank, dtype, tuple(shape), axes, node, nbytes, Location(shard, offset, checksum))


def left_out_payload(item: LeftOut) -> dict[str, Any]:
    """Return the index payload of `item`."""
    return {"kind": "left_out", **dataclasses.asdict(item)}


def left_out_from(payload: dict[str, Any]) -> LeftOut:
    """Inverse of `left_out_payload`, which trusts nothing.

    Raises:
        ValueError: A field is missing or of the wrong kind.
    """
    site, reason, dtype = payload.get("site"), payload.get("reason"), payload.get("dtype")
    step, rank, shape, found = (payload.get(key) for key in ("step", "rank", "shape", "statistics"))
    if not isinstance(site, str) or not isinstance(reason, str) or not (dtype is None or isinstance(dtype, str)):
        raise ValueError("a name is not text")
    if not _is_size(step) or not _is_size(rank):
        raise ValueError("a number is missing or negative")
    if not (shape is None or (isinstance(shape, list) and all(map(_is_size, shape)))):
        raise ValueError("a shape is not a list of sizes")
    statistics = None
    if found is not None:
        low, high, norm, count = (found.get(key) for key in ("min", "max", "norm", "num_nonfinite"))
        if not all(isinstance(value, (float, int, NoneType)) for value in (low, high)) or not _is_size(count):
            raise ValueError("statistics are not numbers")
        statistics = LightStatistics(low, high, float(norm), count)
    sizes = None if shape is None else tuple(shape)
    return LeftOut(site, int(str(step)), int(str(rank)), reason, dtype, sizes, statistics)


def token_payloads(rows: Sequence[Sequence[int]]) -> Iterator[dict[str, Any]]:
    """Yield the index payloads of one step's token ids: pieces of rows, each payload well below `MAX_FRAME_BYTES`."""
    pieces: list[tuple[int, list[int]]] = []
    room = _TOKENS_PER_FRAME
    for row, ids in enumerate(rows):
        left = list(ids)
        while left:
            pieces.append((row, left[:room]))
            left = left[room:]
            # One more, for the row's number and brackets.
            room -= len(pieces[-1][1]) + 1
            if room <= 0:
                yield {"kind": "tokens", "rows": pieces}
                pieces, room = [], _TOKENS_PER_FRAME
    if pieces:
        yield {"kind": "tokens", "rows": pieces}


def tokens_from(payload: dict[str, Any]) -> list[tuple[int, list[int]]]:
    """Inverse of one of `token_payloads`, which trusts nothing.

    Raises:
        ValueError: It is not a list of rows of token ids.
    """
    pieces = payload.get("rows")
    if not isinstance(pieces, list):
        raise ValueError("token ids are not rows")
    for piece in pieces:
        if not isinstance(piece, list) or len(piece) != 2 or not _is_size(piece[0]) or piece[0] >= MAX_ROWS:
            raise ValueError("token ids are not in a row")
        if not isinstance(piece[1], list) or not all(isinstance(token, int) for token in piece[1]):
            raise ValueError("a token id is not a number")
    return [(row, ids) for row, ids in pieces]


def append_tokens(rows: list[list[int]], pieces: Iterable[tuple[int, Sequence[int]]]) -> None:
    """Append each piece to its row of `rows`, which grows to hold it."""
    for row, ids in pieces:
        while len(rows) <= row:
            rows.append([])
        rows[row].extend(ids)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
