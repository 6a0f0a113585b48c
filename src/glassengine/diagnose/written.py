"""What the program of a candidate says of an op: it may be written differently, and yet make no other values."""

from __future__ import annotations

from typing import Any

from glassengine.compare.pairing import difference
from glassengine.diagnose.sides import EngineSide, ProgramSide
from glassengine.program.program import Program


def program_of(side: Any) -> Program | None:
    """Return the program that a side is judged by op for op; None where it has none or only results are judged."""
    if isinstance(side, ProgramSide):
        return side.program
    if isinstance(side, EngineSide) and side.guarantee == "judged op by op":
        return side.engine.program
    return None


def written_differently(baseline: Program, side: Any) -> dict[str, tuple[str, str]]:
    """Return node of `baseline` -> (the side's own site, how its op differs), for the ops that do."""
    own = program_of(side)
    if own is None or own is baseline:
        return {}
    if isinstance(side, ProgramSide):
        return {node: (pair.candidate.name, pair.difference) for node, pair in side.pairs.items() if pair.difference}
    theirs = {node.name: node for node in own.graph.nodes}
    found = {}
    for node in baseline.graph.nodes:
        _, site, _ = side.nodes.get(node.name, ("", "", ""))
        entry = own.sites.get(site)
        how = difference(node, theirs[entry.node]) if entry is not None and entry.kind == "op" else None
        if how is not None:
            found[node.name] = (site, how)
    return found
