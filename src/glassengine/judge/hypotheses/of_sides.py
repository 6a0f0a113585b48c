"""What a side says of itself where one of its tensors is flagged."""

from __future__ import annotations

from collections.abc import Collection

from glassengine.judge.hypotheses.ask import Asked
from glassengine.judge.sides.protocol import Side
from glassengine.program.representation.program import Program


def asked_of(program: Program, side: Side, flagged: Collection[str]) -> Asked | None:
    """Return what is known of a side in its present step; None where its tensors are not replayed.

    Args:
        program: The baseline's.
        side: Under judgement.
        flagged: Nodes of `program` that were flagged in this step.
    """
    if side.replay is None:
        return None
    own = side.program if side.counterparts else None
    return Asked(program, side.replay.values, own, side.counterparts, flagged)
