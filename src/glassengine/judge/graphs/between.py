"""The ops between the tensors that two programs have in common."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping

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


def walk(
    start: Iterable[Node], following: Callable[[Node], Iterable[Node]], depth: int | None = None
) -> Iterator[Node]:
    """Yield the nodes that at most `depth` steps lead to, nearest first, each once, without those at the start."""
    layer = list(start)
    known = set(layer)
    while layer and depth != 0:
        layer = list(dict.fromkeys(other for node in layer for other in following(node) if other not in known))
        known.update(layer)
        yield from layer
        depth = None if depth is None else depth - 1


def up(node: Node, depth: int | None = None) -> Iterator[Node]:
    """Yield the nodes that `node` is made of, nearest first, up to `depth` steps above it; None for all."""
    return walk([node], lambda one: one.all_input_nodes, depth)


def down(start: Iterable[Node], within: Container[Node] | None = None, depth: int | None = None) -> Iterator[Node]:
    """Yield the nodes that are made of some nodes, nearest first, of a region only where one is given."""
    return walk(start, lambda one: (user for user in one.users if within is None or user in within), depth)


def ancestors(node: Node, depth: int | None = None) -> set[Node]:
    """Return the nodes that `node` is made of, up to `depth` steps above it; None for all."""
    return set(up(node, depth))


def passes_on(node: Node) -> bool:
    """Whether a node makes no values of its own: a cast, a view or a copy."""
    traits = traits_of(node)
    return traits.casts or traits.kind in ("copy", "reshape") or is_view(node)


def origin_of(node: Node, known: Collection[str] = ()) -> Node:
    """Return the node whose values a node passes on: itself, where it makes its own; nothing beyond what is `known`."""
    while passes_on(node) and node.args and isinstance(node.args[0], Node) and node.args[0].name not in known:
        node = node.args[0]
    return node


def readers_of(node: Node, is_passed: Callable[[Node], bool] | None = None) -> list[Node]:
    """Return the ops that read the values of a node: of what passes these on (`passes_on`), those that read that."""
    through = is_passed or passes_on
    below = walk([node], lambda one: one.users if one is node or through(one) else ())
    return [one for one in below if one.op == "call_function" and not through(one)]


def partners_of(node: Node) -> list[tuple[Node, Node]]:
    """Return the ops that read what a node makes, each with another node of which it reads what that makes."""
    found = [(op, origin_of(source)) for op in readers_of(node) for source in op.all_input_nodes]
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


def sibling_of(node: Node, counterparts: Mapping[str, str], theirs: Mapping[str, Node]) -> str | None:
    """Return the candidate's counterpart of one result of an op by that of another: indices beside the values chosen.

    Args:
        node: Of the baseline.
        counterparts: Node of the baseline -> counterpart.
        theirs: The candidate's nodes by name.
    """
    if op_name(node) != "getitem":
        return None
    op = node.all_input_nodes[0]
    for beside in op.users:
        known = theirs.get(counterparts.get(beside.name, ""))
        if known is None or op_name(known) != "getitem" or known.all_input_nodes[0].target != op.target:
            continue
        of_both = (user for user in known.all_input_nodes[0].users if op_name(user) == "getitem")
        return next((user.name for user in of_both if user.args[1] == node.args[1] and user.name in theirs), None)
    return None


def reads_the_same(
    ours: Node, theirs: Node, counterparts: Mapping[str, str], names: tuple[Mapping[str, str], Mapping[str, str]]
) -> bool:
    """Whether two nodes call one op on counterparts; weights count as such.

    Args:
        ours: Of the baseline.
        theirs: Of the candidate.
        counterparts: Node -> counterpart.
        names: Placeholder -> input, of both programs.
    """
    return ours.target == theirs.target and reads_counterparts(ours, theirs, counterparts, names)


def reads_counterparts(
    ours: Node, theirs: Node, counterparts: Mapping[str, str], names: tuple[Mapping[str, str], Mapping[str, str]]
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
        elif is_tensor_node(a) and counterparts.get(a.name) != b.name:
            return False
    return True
