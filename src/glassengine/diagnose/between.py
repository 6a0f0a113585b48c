"""The ops between the tensors that two programs have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch.fx import Node

from glassengine.compare.operation import CASTS
from glassengine.compare.verdict import unit_roundoff
from glassengine.program.naming import op_name
from glassengine.program.outputs import is_view


def region_of(node: Node, found: Collection[str]) -> tuple[list[Node], list[Node]]:
    """Return the ops that `node` is made by from what has counterparts, itself last, and what these ops read of that.

    Args:
        node: An op.
        found: Names of nodes that have counterparts, `node` among them or not.
    """
    ops: list[Node] = []
    ends: list[Node] = []
    seen: set[Node] = set()
    waiting = [node]
    while waiting:
        known = waiting.pop()
        if known in seen or isinstance(known.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat)):
            continue
        seen.add(known)
        if known is not node and known.name in found:
            ends.append(known)
        elif known.op == "call_function":
            ops.append(known)
            waiting += reversed(known.all_input_nodes)
    return ops[::-1], ends


def passes_on(node: Node) -> bool:
    """Whether a node makes no values of its own: a cast, a view or a copy."""
    return op_name(node) in CASTS or op_name(node) == "clone" or is_view(node)


def origin_of(node: Node) -> Node:
    """Return the node whose values a node passes on: itself, where it makes its own."""
    while passes_on(node) and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def rounded_to(node: Node) -> set[torch.dtype]:
    """Return the coarser dtypes that a node's value is cast to."""
    own = node.meta["val"].dtype
    casts = {user.meta["val"].dtype for user in node.users if op_name(user) in CASTS}
    return {dtype for dtype in casts if dtype.is_floating_point and unit_roundoff(dtype) > unit_roundoff(own)}


def sibling_of(node: Node, found: Mapping[str, str], theirs: Mapping[str, Node]) -> str | None:
    """Return the candidate's counterpart of one result of an op by that of another: indices beside the values chosen.

    Args:
        node: Of the baseline.
        found: Node of the baseline -> counterpart.
        theirs: The candidate's nodes by name.
    """
    if op_name(node) != "getitem":
        return None
    op = node.all_input_nodes[0]
    for beside in op.users:
        known = theirs.get(found.get(beside.name, ""))
        if known is None or op_name(known) != "getitem" or known.all_input_nodes[0].target is not op.target:
            continue
        of_both = (user for user in known.all_input_nodes[0].users if op_name(user) == "getitem")
        return next((user.name for user in of_both if user.args[1] == node.args[1] and user.name in theirs), None)
    return None
