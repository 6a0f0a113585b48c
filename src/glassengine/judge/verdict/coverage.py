"""Says how finely the inside was judged, and what was not judged: op by op, in regions, or by the results alone.

A region is judged where it ends, from the candidate's own inputs of it. A mistake in a small one is nearly located;
one in a region of eighty ops is only known to be somewhere in it, and may be less than the rounding of all of them. So
a region of more than `MOST_OPS` ops counts as judged only where the results agree end to end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from glassengine.errors import shortened
from glassengine.judge.end_to_end import RANDOM, Seeded
from glassengine.judge.replay.values import called
from glassengine.judge.sides.protocol import ObservedAt, Place, float_nodes
from glassengine.judge.verdict.score import Score
from glassengine.ops.traits import traits_of
from glassengine.program.onnx.control import never_run, ops_inside
from glassengine.program.onnx.function import is_of_runtime_alone
from glassengine.program.representation.naming import is_tensor_node
from glassengine.program.representation.outputs import is_view
from glassengine.program.representation.program import Program
from glassengine.results import MOST_OPS, Granularity, Skipped


def granularity(score: Score, program: Program) -> Granularity:
    """Return how finely the float-valued ops of `program` were judged by `score`."""
    inside = region_nodes(score)
    found = granularity_of(program, score.side.level, score.judged_nodes, inside)
    if score.side.observed_at is ObservedAt.RESULT:
        # Of what was judged there, nothing says how it came about.
        found = replace(found, op_by_op=0.0, results_only=found.op_by_op + found.results_only)
    return found


def granularity_of(
    program: Program, level: str, judged: Collection[str], inside: Mapping[str, set[str]]
) -> Granularity:
    """Return how finely the float-valued ops of `program` were judged.

    Args:
        program: The baseline's.
        level: Where.
        judged: Nodes that were judged.
        inside: Nodes inside of regions -> judged nodes at which these end.
    """
    named = float_nodes(program, ("op",))
    if not named:
        return Granularity(level, 0, 1.0, 0.0, 0.0, 0.0)
    own = named & set(judged)
    ends = {end for found in inside.values() for end in found} & named
    sizes = _sizes(program, inside)
    for node in program.graph.nodes:
        # A branch or a loop is judged where it ends, too.
        num_inside = ops_inside(called(node)[0].target) if node.name in own else 0
        if num_inside > 1:
            sizes[node.name] = max(sizes[node.name], 1) + num_inside - 1
            ends.add(node.name)
    of_region = {node: min(sizes[end] for end in inside[node]) for node in named & inside.keys()}
    of_region |= {end: sizes[end] for end in ends}
    small = {node for node, size in of_region.items() if size <= MOST_OPS}
    alone = own - ends
    # The first of equals: a set has another order in every process.
    largest = max((node.name for node in program.graph.nodes if node.name in ends), key=sizes.__getitem__, default=None)
    num_large = len(of_region) - len(small)
    return Granularity(
        level=level,
        num_sites=len(named),
        op_by_op=len(alone) / len(named),
        in_regions=len(small) / len(named),
        in_large_regions=num_large / len(named),
        results_only=max(0, len(named) - len(alone) - len(of_region)) / len(named),
        largest_region=0 if largest is None else sizes[largest],
        largest_region_end=None if largest is None else program.sites.by_node[largest][0].name,
    )


def region_nodes(score: Score) -> dict[str, set[str]]:
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
    if score.side.observed_at is ObservedAt.OP:
        found = granularity(score, program)
        return found.op_by_op + found.in_regions + (found.in_large_regions if results_agree else 0.0)
    named = score.side.countable(program)
    return len(named & score.judged_nodes) / len(named) if named else 1.0


_MOST_NAMES = 6


def lacking(score: Score, program: Program) -> list[str]:
    """Return the sites that the coverage of a side asks for and that were not judged, in the order of the program."""
    is_op = score.side.observed_at is not ObservedAt.SEGMENT
    wanted = float_nodes(program, ("op",)) if is_op else score.side.countable(program)
    left = wanted - score.judged_nodes - (region_nodes(score).keys() if is_op else set())
    nodes = (program.sites.by_node[node.name] for node in program.graph.nodes if node.name in left)
    return [
        next((one.name for one in sites if (is_op or one.kind != "op") and ":in" not in one.name), sites[0].name)
        for sites in nodes
    ]


def missing(score: Score, program: Program) -> str:
    """Return in words what is missing on a side that was not judged finely enough."""
    names = lacking(score, program)
    listed = shortened(names, _MOST_NAMES)
    if score.side.place is Place.RECORD and names:
        return f"not in the record: {listed}; record them by these names, or say what they are called: --map FILE"
    what = f"not judged: {listed}" if names else "too many ops lie between two tensors that it has"
    return f"{what}; --min-coverage 0 accepts the results alone"


def not_judged(
    program: Program, scores: Sequence[Score], main: Score, known: Sequence[Skipped], seeded: Seeded | None
) -> list[Skipped]:
    """Return what was left out of the judgement of all sides, beside what is `known` of it."""
    beside = {} if seeded is None else {RANDOM: f"; {seeded.text}"}
    return [
        *(
            Skipped(name, "both", f"not compared end to end: {why}{beside.get(why, '')}", level=score.side.level)
            for score in scores
            for name, why in score.results.not_compared.items()
        ),
        *_unobserved(main, program, known),
        *_reordered(scores, program),
        *(Skipped(program.sites.by_node[node][0].name, "both", why) for node, why in _undefined(program)),
    ]


def _reordered(scores: Sequence[Score], program: Program) -> list[Skipped]:
    reason = "inside of experts: the program computes them in another order"
    return [
        Skipped(site.name, "both", reason, level=score.side.level)
        for score in scores
        if score.side.reordered
        for site in program.sites
        if site.kind == "module" and ":in" not in site.name and site.name.startswith(score.side.reordered)
    ]


def _undefined(program: Program) -> Iterator[tuple[str, str]]:
    """Yield (node, why) of what has no value of its own, of branches that no input led into, and of lone runtimes."""
    ops: dict[Node, str] = {}
    for node in program.graph.nodes:
        if traits_of(node).is_arbitrary and is_tensor_node(node):
            yield node.name, "random: drawn by every run" if traits_of(node).is_random else "memory not yet written"
        if node.name in program.sites.by_node:
            op = called(node)[0]
            ops[op] = node.name
            if is_of_runtime_alone(op.target):
                # What is compared with it is not judged by anybody else.
                yield node.name, "compared with ONNX Runtime, which alone says what it computes"
    for op, name in ops.items():
        yield from ((name, f"no input led into its {branch}") for branch in never_run(op.target))


def _unobserved(score: Score, program: Program, skipped: Sequence[Skipped]) -> list[Skipped]:
    """Float sites that are neither judged nor explained yet."""
    if score.side.place is Place.RECORD:
        return [Skipped(site, "candidate", "not in the record", level=Place.RECORD) for site in lacking(score, program)]
    if score.side.program is None:
        return []
    known = {item.site for item in skipped}
    names = sorted(name for name in lacking(score, program) if name not in known)
    return [Skipped(n, "candidate", "the candidate has no such tensor", level=score.side.level) for n in names]
