"""What is missing for the coverage that is asked for, in words: which tensors, how many of them, and what to do."""

from __future__ import annotations

import math

from glassengine.judge.sides.countable import float_nodes
from glassengine.judge.sides.protocol import Level, Place
from glassengine.judge.verdict.fineness import region_nodes
from glassengine.judge.verdict.score import Score
from glassengine.program.representation.program import Program

_MOST_NAMES = 6
_ANYWAY = "--min-coverage 0 accepts the results alone"


def missing(score: Score, program: Program, min_coverage: float) -> str:
    """Return what is missing on a side that was not judged finely enough.

    Args:
        score: Of the side that the verdict rests on.
        program: The baseline's.
        min_coverage: Share that is asked for.
    """
    is_op = score.side.level is not Level.SEGMENT
    wanted = float_nodes(program, ("op",)) if is_op else score.side.countable(program)
    judged = score.judged_nodes | region_nodes(score, program).keys() if is_op else score.judged_nodes
    lacking = wanted - judged
    names = [
        program.sites.by_node[node.name][0 if is_op else -1].name
        for node in program.graph.nodes
        if node.name in lacking
    ]
    if not names:
        return f"the regions between the tensors that it has are too large; {_ANYWAY}"
    least = max(1, math.ceil(min_coverage * len(wanted)) - len(wanted & judged))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    listed = f"{', '.join(names[:_MOST_NAMES])}{more}"
    if score.side.place is not Place.RECORD:
        return f"not judged: {listed}; {_ANYWAY}"
    of_them = "" if least >= len(names) else f" {least} of"
    return f"not in the record: {listed}; record{of_them} them by these names, or give theirs: --map FILE"
