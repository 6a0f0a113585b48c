"""The traits of an op, found by its name or by what a node calls.

A row of `table` says what torch does not: nothing in an op's schema tells how its result is rounded. Where a row is
silent, and for ops without a row, torch's own tags decide whether an op is random and whether it is in place.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from glassengine.ops.row import NOTHING, OpTraits
from glassengine.ops.table import TABLE


@functools.lru_cache(maxsize=4096)  # asked for several times of each node that is judged
def base_name(target: Any) -> str:
    """Return the ATen base name of what a node calls: no overload, no trailing underscore."""
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.split("::")[-1]
        return name if name.endswith("__") else name.rstrip("_")
    return getattr(target, "__name__", str(target)).rstrip("_")


def named(name: str) -> OpTraits:
    """Return the traits of an op by its ATen base name, as far as they are those of all its overloads."""
    return TABLE.get(name, NOTHING)


def traits_of(node: Node) -> OpTraits:
    """Return the traits of what a node calls; those of nothing for inputs and constants."""
    return traits_of_target(node.target) if node.op == "call_function" else NOTHING


@functools.lru_cache(maxsize=4096)
def traits_of_target(target: Any) -> OpTraits:
    """Return the traits of an op, torch's tags included."""
    row = named(base_name(target))
    tags = target.tags if isinstance(target, torch._ops.OpOverload) else ()
    return replace(
        row,
        in_place=torch.Tag.pointwise in tags if row.in_place is None else row.in_place,
        is_random=torch.Tag.nondeterministic_seeded in tags if row.is_random is None else row.is_random,
    )
