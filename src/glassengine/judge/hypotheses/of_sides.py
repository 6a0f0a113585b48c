"""What a side says of itself where one of its tensors is flagged."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from glassengine.judge.hypotheses.ask import Asked
from glassengine.judge.replay.segment import SegmentReplay
from glassengine.judge.sides.sides import EngineSide, ProgramSide
from glassengine.program.representation.program import Program


def asked_of(program: Program, side: Any, flagged: Collection[str]) -> Asked | None:
    """Return what is known of a side in its present step; None where its tensors are not replayed.

    Args:
        program: The baseline's.
        side: Under judgement.
        flagged: Nodes of `program` that were flagged in this step.
    """
    replay = getattr(side, "replay", None)
    if replay is None:
        return None
    if isinstance(replay, SegmentReplay) or not isinstance(side, (ProgramSide, EngineSide)):
        return Asked(program, replay.values, flagged=flagged)
    if isinstance(side, EngineSide):
        own = side.engine.program if side.counterparts else None
        return Asked(program, replay.values, own, side.counterparts, flagged)
    found = side.counterparts or {node: pair.candidate.node for node, pair in side.pairs.items()}
    return Asked(program, replay.values, side.program, found, flagged)
