"""How finely the inside was judged: op by op, in regions and how large ones, or by the results alone.

A region is judged where it ends, from the candidate's own inputs of it. A mistake in a small one is nearly located;
one in a region of eighty ops is only known to be somewhere in it, and may be less than the rounding of all of them. So
a region of more than `MOST_OPS` ops counts as judged only where the results agree end to end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch.fx import Node

from glassengine.judge.replay.values import called
from glassengine.judge.sides.countable import float_nodes
from glassengine.judge.sides.protocol import Level
from glassengine.judge.verdict.score import Score
from glassengine.program.onnx.operators.control import ops_inside
from glassengine.program.representation.outputs import is_view
from glassengine.program.representation.program import Program
from glassengine.results import MOST_OPS, Fineness


def fineness(score: Score, program: Program) -> Fineness:
    """Return how finely the float-valued ops of `program` were judged by `score`."""
    inside = region_nodes(score, program)
    found = fineness_of(program, score.side.rung, score.judged_nodes, inside)
    if score.side.level is Level.RESULT:
        # Of what was judged there, nothing says how it came about.
        found = replace(found, op_by_op=0.0, results_only=found.op_by_op + found.results_only)
    return found


def fineness_of(program: Program, rung: str, judged: Collection[str], inside: Mapping[str, set[str]]) -> Fineness:
    """Return how finely the float-valued ops of `program` were judged.

    Args:
        program: The baseline's.
        rung: Where.
        judged: Nodes that were judged.
        inside: Nodes inside of regions -> judged nodes at which these end.
    """
    named = float_nodes(program, ("op",))
    if not named:
        return Fineness(rung, 0, 1.0, 0.0, 0.0, 0.0)
    ends = {end for found in inside.values() for end in found} & named
    sizes = _sizes(program, inside)
    for node in program.graph.nodes:
        # A branch or a loop is judged where it ends, too.
        num_inside = ops_inside(called(node)[0].target) if node.name in named & set(judged) else 0
        if num_inside > 1:
            sizes[node.name] = max(sizes[node.name], 1) + num_inside - 1
            ends.add(node.name)
    of_region = {node: min(sizes[end] for end in inside[node]) for node in named & inside.keys()}
    of_region |= {end: sizes[end] for end in ends}
    small = {node for node, size in of_region.items() if size <= MOST_OPS}
    alone = (named & set(judged)) - ends
    # The first of equals: a set has another order in every process.
    largest = max((node.name for node in program.graph.nodes if node.name in ends), key=sizes.__getitem__, default=None)
    num_large = len(of_region) - len(small)
    return Fineness(
        rung=rung,
        num_sites=len(named),
        op_by_op=len(alone) / len(named),
        in_regions=len(small) / len(named),
        in_large_regions=num_large / len(named),
        results_only=max(0, len(named) - len(alone) - len(of_region)) / len(named),
        largest_region=0 if largest is None else sizes[largest],
        largest_region_end=None if largest is None else program.sites.by_node[largest][0].name,
    )


def region_nodes(score: Score, program: Program) -> dict[str, set[str]]:
    """Return the ops inside of regions that were judged at their ends: node -> ends."""
    replay = score.side.replay
    # A region ends where the candidate has a tensor, though none of its elements counts.
    inside = {} if replay is None else replay.inside(score.judged_nodes | score.empty_nodes)
    return {node: ends for node, ends in inside.items() if ends <= score.judged_nodes}


def _sizes(program: Program, inside: Mapping[str, set[str]]) -> Counter[str]:
    """Return how many ops each region has that compute something, its end among them.

    What only makes positions or a mask for it is exact: rounding hides nothing there.
    """
    sizes: Counter[str] = Counter()
    for node in program.graph.nodes:
        if node.name in inside and not is_view(node) and not _is_exact(node):
            sizes.update(inside[node.name])
    for end in {end for found in inside.values() for end in found}:
        sizes[end] += 1
    return sizes


def _is_exact(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex()


def coverage(score: Score, program: Program, *, results_agree: bool) -> float:
    """Return the share that counts for `--min-coverage`.

    Of a side that was observed at modules or results alone, that is the share of those.
    """
    if score.side.level is Level.OP:
        found = fineness(score, program)
        return found.op_by_op + found.in_regions + (found.in_large_regions if results_agree else 0.0)
    named = score.side.countable(program)
    return len(named & score.judged_nodes) / len(named) if named else 1.0
