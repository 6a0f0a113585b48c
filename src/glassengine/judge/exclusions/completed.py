"""Caches of another length, brought to that of the program."""

from __future__ import annotations

import torch
from torch.fx import Node

from glassengine.numerics.verdict import Reference
from glassengine.program.representation.program import Program


def completed(tensor: torch.Tensor, reference: Reference, program: Program, node: Node, num_seen: int) -> torch.Tensor:
    """A cache that grows is shorter than the static one, and one that slides holds the newest slots only.

    Only the part that both have is compared.
    """
    axis = program.sites.by_node[node.name][0].axes.get("cache")
    native = reference.native
    if axis is None or tensor.dim() != native.dim() or tensor.shape[axis] >= native.shape[axis]:
        return tensor
    if any(tensor.shape[i] != native.shape[i] for i in range(native.dim()) if i != axis):
        return tensor
    start = max(0, num_seen - tensor.shape[axis])
    whole = native.to(tensor.dtype, copy=True)
    whole.narrow(axis, start, tensor.shape[axis]).copy_(tensor)
    return whole
