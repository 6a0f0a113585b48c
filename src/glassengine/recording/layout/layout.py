"""The layout of a recording on disk: names, numbers, and what there is to know about a tensor.

    statistics.log            statistics and sketches that were computed on reading, kept for next time; may be removed
    recording.json            schema version, state (writing | complete | incomplete), metadata
    shard-NNNNN.part          HEADER_BYTES reserved, then raw tensor bytes, each start aligned to ALIGNMENT
    shard-NNNNN.safetensors   the same file sealed: the reserved bytes hold a safetensors header
    index.log                 frames: one per tensor, or per block of contiguous small tensors, of a
                              group that was described before and that says which of them have the bytes of another
                              and are not there; one per tensor, or per such block with statistics alone, whose values
                              were left out; the token ids of the step where there are any; then the commit of the step,
                              after all its bytes
    ring.part, ring.log       steps that have ended and are not in the index yet, while the recording is being written
                              and after its process was killed: see `ring_file`
    series.log                the statistics of every step of a watched run: see `series`
    recovered/                what was recovered of these: a recording in itself, whose shards are numbered on

A frame is: payload length (u32), CRC-32 of the payload (u32), payload; little-endian. The payload is JSON, or of
blocks, commits and single tokens the 32 bytes that `frames` describes (up to version 3 all were JSON, and a tensor
alone was described in every step). The offset of a tensor counts from the end of the shard's header. Shards are
numbered, so that a site name never becomes a path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

SCHEMA_VERSION = 5
MANIFEST = "recording.json"
INDEX = "index.log"
RING = "ring.part"
MOVED = "ring.log"
RECOVERED = "recovered"
STATISTICS = "statistics.log"
SERIES = "series.log"
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
MAX_GROUP_TENSORS = 512
ADDED, ADDED_AXIS = "+", "added"
"""End of the stored name, and name of the axis, of rows that a step adds to the tensor of the step before."""


class StoredDtype(NamedTuple):
    """How elements of a dtype are stored."""

    code: str
    element: str
    parts: int
    num_bytes: int


_CODES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}
STORED: dict[str, StoredDtype] = {
    **{name: StoredDtype(code, name, 1, num_bytes) for name, (code, num_bytes) in _CODES.items()},
    # safetensors has no such dtype: declared parts, a last dimension of (real, imaginary)
    "complex128": StoredDtype("F64", "float64", 2, 16),
}
"""By torch dtype name. torch itself is imported where values are: who plans from indices does without."""


@dataclass(frozen=True)
class Location:
    """Where the bytes of a tensor are.

    Attributes:
        shard: Number of the shard.
        offset: Behind the shard's header.
        checksum: CRC-32 of the bytes, or of the block.
        block: Offset and size of the block the tensor is part of, if it is part of one.
    """

    shard: int
    offset: int
    checksum: int
    block: tuple[int, int] | None = None


@dataclass(frozen=True)
class AddedRows:
    """Where the last rows of a tensor are; the others are those of the step before.

    Attributes:
        axis: Dimension along which they are added.
        shape: Sizes of the rows alone.
        rank: Process that had them.
        location: Where they are.
    """

    axis: int
    shape: tuple[int, ...]
    rank: int
    location: Location | None = None


@dataclass(frozen=True)
class Sharding:
    """How a tensor, of which an entry has the part of one process, is spread over a mesh of processes.

    Attributes:
        shape: Sizes of the whole.
        placements: For each dimension of the mesh, as torch writes it: "R" (the same in all), "S(0)" (cut along
            dimension 0), "P(sum)" (to be added up).
        mesh: Sizes of the mesh.
        names: Names of its dimensions, where they have any.
        coordinate: Where in the mesh the process is; empty where it has no part in it.
        ranks: The processes of the mesh, the last dimension fastest; empty where that was not recorded.
    """

    shape: tuple[int, ...]
    placements: tuple[str, ...]
    mesh: tuple[int, ...]
    names: tuple[str, ...] = ()
    coordinate: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return for example `shard S(0) of [4,2] on a mesh of [2]`."""
        whole, mesh = (",".join(map(str, sizes)) for sizes in (self.shape, self.mesh))
        return f"shard {' '.join(self.placements)} of [{whole}] on a mesh of [{mesh}]"


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
        added: Of a tensor that has no location because it grew: the rows that the step added.
        sharding: What the whole is, where this is one process's part of a distributed tensor, and `shape` the part's.
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
    sharding: Sharding | None = None
    added: AddedRows | None = None

    @property
    def place(self) -> tuple[str, int, int]:
        """Site, step and rank: what tells a tensor from all others of a source."""
        return self.site, self.step, self.rank

    def describe(self) -> str:
        """Return dtype and shape, as in `float32[2,3]`."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def have_same_bytes(entry: Entry, other: Entry) -> bool:
    """Whether both are recorded with the same dtype, shape and checksum, of themselves or of the block they are in.

    Of tensors that differ one in four thousand million has the same checksum, and of those of four bytes or less none.
    """
    x, y = entry.location, other.location
    if x is None or y is None or x.checksum != y.checksum or (entry.dtype, entry.shape) != (other.dtype, other.shape):
        return False
    if x.block is None or y.block is None:
        return x.block is y.block
    return x.block[1] == y.block[1] and x.offset - x.block[0] == y.offset - y.block[0]


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
class LightTable:
    """The light statistics of several tensors.

    Attributes:
        rows: float64[3, tensors]: minima, maxima (NaN where nothing finite is left) and norms.
        num_nonfinite: Index of a tensor -> its NaN and infinite elements, where it has any.
    """

    rows: np.typing.NDArray[np.float64]
    num_nonfinite: dict[int, int]


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


def shard_name(number: int, *, sealed: bool) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:05d}.{'safetensors' if sealed else 'part'}"


def shard_number(name: str, *, sealed: bool) -> int | None:
    """Return the number of the shard with this file name; None for any other name."""
    digits = name.partition(".")[0].removeprefix("shard-")
    is_ours = digits.isdecimal() and digits.isascii() and name == shard_name(int(digits), sealed=sealed)
    return int(digits) if is_ours else None


def aligned(size: int) -> int:
    """Return the next multiple of `ALIGNMENT` that is at least `size`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def block_starts(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where tensors of these sizes begin in a block, each aligned, and the size of the block."""
    starts, end = [], 0
    for size in sizes:
        starts.append(aligned(end))
        end = starts[-1] + size
    return starts, end


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the stored bytes of a tensor."""
    return math.prod(shape) * STORED[dtype].num_bytes
