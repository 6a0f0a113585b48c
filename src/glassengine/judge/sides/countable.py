"""What coverage is counted over: the nodes of a program that a side could be judged at."""

from __future__ import annotations

from collections.abc import Sequence

from glassengine.judge.exclusions.unread import unread_nodes
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import is_tensor_node
from glassengine.program.representation.outputs import weight_only_nodes
from glassengine.program.representation.program import Program


def float_nodes(program: Program, kinds: Sequence[str], *, without: tuple[str, ...] = ()) -> set[str]:
    """Return the nodes of floating dtype with a site of one of `kinds`.

    Module inputs are left out (they are outputs of something else), so are names that start with one of `without`,
    nodes that depend on weights alone (they are taken from the weights, see `program.outputs`), random numbers, memory
    that nothing has written, and what no result reads: the last states of a recurrence, say.
    """
    constant = {node.name for node in weight_only_nodes(program)}
    counted = [s for s in program.sites if s.kind in kinds and ":in" not in s.name and not s.name.startswith(without)]
    named = {site.node for site in counted} - constant - unread_nodes(program)
    return {
        node.name
        for node in program.graph.nodes
        if node.name in named
        and is_tensor_node(node)
        and node.meta["val"].is_floating_point()
        and not traits_of(node).is_arbitrary
    }
