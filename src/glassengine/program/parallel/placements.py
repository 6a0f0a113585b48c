"""Placements of a tensor among ranks, whole or cut along one axis, and one op on parts of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

TENSOR_GROUP = "tensor"
"""Name of the process group of the ranks that share one stage, in the graphs of their programs."""


@dataclass(frozen=True)
class Mesh:
    """Ranks by stage, then by their place within the stage.

    Attributes:
        tensor: Ranks that share each layer.
        pipeline: Stages, each with layers of its own.
    """

    tensor: int = 1
    pipeline: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline

    def stage(self, rank: int) -> int:
        """Return the stage of a rank."""
        return rank // self.tensor

    def place(self, rank: int) -> int:
        """Return the place of a rank within its stage."""
        return rank % self.tensor

    def __str__(self) -> str:
        names = ((self.tensor, "tensor"), (self.pipeline, "pipeline"))
        return " x ".join(f"{name} parallel {size}" for size, name in names if size > 1) or "one rank"


@dataclass(frozen=True)
class ShardPlacement:
    """Cut along one axis: of each block every rank has an equal part, and lays those of all blocks in a row.

    Attributes:
        axis: The axis, from 0.
        blocks: Sizes of the blocks that the axis consists of: one, or several where a weight is made of several.
    """

    axis: int
    blocks: tuple[int, ...]

    def __str__(self) -> str:
        blocks = "" if len(self.blocks) == 1 else f" in {len(self.blocks)} blocks"
        return f"cut along axis {self.axis}{blocks}"

    def fits(self, ranks: int) -> bool:
        """Whether each block can be divided among so many ranks."""
        return all(block % ranks == 0 and block for block in self.blocks)

    def spans(self, ranks: int, place: int) -> list[tuple[int, int]]:
        """Return (start, stop) along the axis of what one rank has of each block."""
        found, start = [], 0
        for block in self.blocks:
            part = block // ranks
            found.append((start + place * part, start + (place + 1) * part))
            start += block
        return found

    def on(self, axis: int, *, scale: int = 1, inner: int = 1) -> ShardPlacement:
        """Return the same cut on another axis, whose sizes are `scale` times and an `inner`-th of these."""
        return ShardPlacement(axis, tuple(block * scale // inner for block in self.blocks))


Placement = ShardPlacement | None
"""None: whole on every rank."""


def shard_of(whole: Tensor, shard: ShardPlacement, ranks: int, place: int) -> Tensor:
    """Return what one rank has of a tensor."""
    parts = [whole.narrow(shard.axis, start, stop - start) for start, stop in shard.spans(ranks, place)]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=shard.axis)


def whole_of(shards: list[Tensor], shard: ShardPlacement) -> Tensor:
    """Return the tensor that all ranks have parts of."""
    sizes = [block // len(shards) for block in shard.blocks]
    split = [torch.split(part, sizes, dim=shard.axis) for part in shards]
    return torch.cat([parts[block] for block in range(len(sizes)) for parts in split], dim=shard.axis)


@dataclass(frozen=True)
class Local:
    """How an op runs on parts.

    Attributes:
        out: Where its result lies; of several results, where each does.
        wants: Where each input must lie.
        args: Its arguments where they change (sizes, say), else None.
        partial: Whether each rank has a term of the result, which is their sum.
        addend: Index of the argument that is added after the sum, once.
        offset: Whether the first argument is a table of which each rank has rows, and the second says which rows.
    """

    out: Placement | tuple[Placement, ...]
    wants: Mapping[Node, Placement] = field(default_factory=dict)
    args: tuple[Any, ...] | None = None
    partial: bool = False
    addend: int | None = None
    offset: bool = False


Placed = Callable[[Node], Any]
Rule = Callable[[Node, Placed, int], Local | None]


def name_of(node: Node) -> str:
    """Return the base name of an op, e.g. "linear"."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._schema.name).rpartition("::")[2]
    return str(getattr(node.target, "__name__", node.target))


def args_of(node: Node) -> tuple[Any, ...]:
    """Return the positional arguments of a node, of whatever types."""
    return node.args


def shape_of(node: Any) -> list[Any]:
    """Return the sizes of a node's value."""
    return list(node.meta["val"].shape)
