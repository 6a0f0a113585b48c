"""How one op runs on parts of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from glassengine.program.parallel.placements import Placement


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
