"""How the joint graph of AOT autograd is cut into a forward and a backward graph.

The cut is torch's, which lets the backward graph recompute values rather than keep them. Where such a value is read
from a tensor that the forward graph writes to, like a counter or a running mean, that read would come after the write:
torch 2.13 gives wrong gradients then, in silence (pytorch/pytorch#197039). Here those values are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from glassengine.executable.graph.graph import mutated_placeholders


def partition(joint: GraphModule, joint_inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
    """Return the forward and the backward graph of a joint graph.

    Args:
        joint: The graph; what must be kept is marked in it.
        joint_inputs: Its inputs, fake.
        options: Further arguments of torch's own partitioner.
    """
    for written in mutated_placeholders(joint.graph):
        for reader in _readers(written):
            # What the user's checkpointing says of a value stands.
            reader.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    parts: tuple[GraphModule, GraphModule] = min_cut_rematerialization_partition(joint, joint_inputs, **options)
    return parts


def _readers(value: Node) -> Iterator[Node]:
    """Yield every node that computes something from `value`, through views of it, which are not copies."""
    for user in value.users:
        if not isinstance(user.target, torch._ops.OpOverload) or user.target._schema.is_mutable:
            continue
        if user.target.is_view:
            yield from _readers(user)
        else:
            yield user
