"""What is missing for the coverage that is asked for: which tensors, and what to do."""

from __future__ import annotations

from glassengine.judge.sides.countable import float_nodes
from glassengine.judge.sides.protocol import Level, Place
from glassengine.judge.verdict.fineness import region_nodes
from glassengine.judge.verdict.score import Score
from glassengine.program.representation.program import Program

_MOST_NAMES = 6


def lacking(score: Score, program: Program) -> list[str]:
    """Return the sites that the coverage of a side asks for and that were not judged, in the order of the program."""
    is_op = score.side.level is not Level.SEGMENT
    wanted = float_nodes(program, ("op",)) if is_op else score.side.countable(program)
    left = wanted - score.judged_nodes - (region_nodes(score, program).keys() if is_op else set())
    nodes = (program.sites.by_node[node.name] for node in program.graph.nodes if node.name in left)
    return [
        next((one.name for one in sites if (is_op or one.kind != "op") and ":in" not in one.name), sites[0].name)
        for sites in nodes
    ]


def missing(score: Score, program: Program) -> str:
    """Return in words what is missing on a side that was not judged finely enough."""
    names = lacking(score, program)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    listed = f"{', '.join(names[:_MOST_NAMES])}{more}"
    if score.side.place is Place.RECORD and names:
        return f"not in the record: {listed}; record them by these names, or say what they are called: --map FILE"
    what = f"not judged: {listed}" if names else "too many ops lie between two tensors that it has"
    return f"{what}; --min-coverage 0 accepts the results alone"
