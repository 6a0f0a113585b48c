"""The ops between the tensors that two programs have in common."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.numerics.judgement import unit_roundoff
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import is_tensor_node, op_name
from glassengine.program.representation.outputs import is_view


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


def ancestors(node: Node, depth: int | None = None) -> set[Node]:
    """Return the nodes that `node` is made of, up to `depth` steps above it; None for all."""
    found: set[Node] = set()
    layer = {node}
    while layer and (depth is None or depth > 0):
        layer = {source for other in layer for source in other.all_input_nodes} - found
        found |= layer
        depth = None if depth is None else depth - 1
    return found


def passes_on(node: Node) -> bool:
    """Whether a node makes no values of its own: a cast, a view or a copy."""
    traits = traits_of(node)
    return traits.casts or traits.kind in ("copy", "reshape") or is_view(node)


def origin_of(node: Node, known: Collection[str] = ()) -> Node:
    """Return the node whose values a node passes on: itself, where it makes its own; nothing beyond what is `known`."""
    while passes_on(node) and node.args and isinstance(node.args[0], Node) and node.args[0].name not in known:
        node = node.args[0]
    return node


def partners_of(node: Node) -> list[tuple[Node, Node]]:
    """Return the ops that read what a node makes, each with another node of which it reads what that makes."""
    readers = list(node.users)
    for reader in readers:
        if passes_on(reader):
            readers += reader.users
    ops = dict.fromkeys(reader for reader in readers if reader.op == "call_function" and not passes_on(reader))
    found = [(op, origin_of(source)) for op in ops for source in op.all_input_nodes]
    return [(op, other) for op, other in dict.fromkeys(found) if other is not node and other.op == "call_function"]


def next_below(node: Node, order: Mapping[str, int], most: int) -> list[Node]:
    """Return the nearest ops below a node that read its values, in the order of the graph, at most so many."""
    found: list[Node] = []
    seen = {node.name}
    waiting: list[tuple[int, str]] = []
    named: dict[str, Node] = {}

    def push(of: Node) -> None:
        for user in of.users:
            is_op = user.op == "call_function" and "_assert" not in str(user.target)
            if is_op and user.name not in seen and not traits_of(user).reads_sizes:
                seen.add(user.name)
                named[user.name] = user
                heapq.heappush(waiting, (order[user.name], user.name))

    push(node)
    while waiting and len(found) < most:
        following = named[heapq.heappop(waiting)[1]]
        found.append(following)
        push(following)
    return found


def rounded_to(node: Node) -> set[torch.dtype]:
    """Return the coarser dtypes that a node's value is cast to."""
    own = node.meta["val"].dtype
    casts = {user.meta["val"].dtype for user in node.users if traits_of(user).casts}
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
        if known is None or op_name(known) != "getitem" or known.all_input_nodes[0].target != op.target:
            continue
        of_both = (user for user in known.all_input_nodes[0].users if op_name(user) == "getitem")
        return next((user.name for user in of_both if user.args[1] == node.args[1] and user.name in theirs), None)
    return None


def reads_the_same(
    ours: Node, theirs: Node, found: Mapping[str, str], names: tuple[Mapping[str, str], Mapping[str, str]]
) -> bool:
    """Whether two nodes call one op on counterparts; weights count as such.

    Args:
        ours: Of the baseline.
        theirs: Of the candidate.
        found: Node -> counterpart.
        names: Placeholder -> input, of both programs.
    """
    return ours.target == theirs.target and reads_counterparts(ours, theirs, found, names)


def reads_counterparts(
    ours: Node, theirs: Node, found: Mapping[str, str], names: tuple[Mapping[str, str], Mapping[str, str]]
) -> bool:
    """Whether two nodes read counterparts, with any results; for the arguments see `reads_the_same`."""
    sources = [
        [leaf for leaf in pytree.tree_leaves((node.args, dict(node.kwargs))) if isinstance(leaf, Node)]
        for node in (ours, theirs)
    ]
    if len(sources[0]) != len(sources[1]):
        return False
    for a, b in zip(*sources, strict=True):
        if a.op == "placeholder":
            if b.op != "placeholder" or names[0].get(a.name) != names[1].get(b.name):
                return False
        elif is_tensor_node(a) and found.get(a.name) != b.name:
            return False
    return True
