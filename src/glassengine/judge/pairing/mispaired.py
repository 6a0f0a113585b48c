"""Tensors that differ while their readers are right: they are not counterparts.

Two programs that compute the same in another order (keys before values, a root before its reciprocal) have ops in the
same place that are not the same op. What an op really gets wrong goes into what is made of it. Where every op that
should read a tensor is right and contradicts it (from that tensor it would have made something else), the candidate
reads another one there: the pairing was wrong, and not the op.
"""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Node


def walled_off(start: Node, contradicting: Collection[str], clean: Collection[str]) -> set[str] | None:
    """Return the nodes that `start` reaches, itself included, before one that contradicts on every path.

    Args:
        start: A node whose tensor is flagged.
        contradicting: Nodes whose tensors are right, and not what the op makes of the tensors paired with its inputs.
        clean: Nodes whose tensors are right.

    Returns:
        None where nothing contradicts, or where a path leads to a result or to a clean node that agrees with it.
    """
    found: set[str] = set()
    waiting = [start]
    has_wall = False
    while waiting:
        node = waiting.pop()
        if node.name in found:
            continue
        found.add(node.name)
        for user in node.users:
            if user.name in contradicting:
                has_wall = True
            elif user.op == "output" or user.name in clean:
                return None
            else:
                waiting.append(user)
    return found if has_wall else None
