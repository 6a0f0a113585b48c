"""What a candidate writes in another gauge is taken out of all scores once every case has run, and counted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from glassengine.judge.pairing.gauge import TAKEN_BACK, taken_back
from glassengine.judge.sides.protocol import Place
from glassengine.judge.verdict.score import Score
from glassengine.numerics.exemptions import GAUGE
from glassengine.results import FLAGGED


def leave_out_gauges(scores: Sequence[Score], inputs: Mapping[str, Tensor]) -> None:
    """Call rounding what the candidate's next ops take back, in its program and in its untouched module.

    Args:
        scores: Of all sides.
        inputs: Of one step, by name, caches among them.
    """
    own = [score for score in scores if score.side.place in (Place.CANDIDATE, Place.UNTOUCHED)]
    origins = {node for score in own for node in score.divergences}
    for score in own if origins else ():
        if score.side.program is not None:
            found = taken_back(score.program, score.side.program, score.side.pairs, inputs, origins)
            score.judged_nodes |= found  # what its readers contradict was dropped
            for other in own:
                _leave_out(other, found)


def _leave_out(score: Score, nodes: set[str]) -> None:
    sites = {site.name for node in nodes for site in score.program.sites.by_node.get(node, ())}
    for at, pair in enumerate(score.pairs):
        if pair.site in sites and pair.verdict in FLAGGED:
            score.pairs[at] = dataclasses.replace(
                pair, verdict="rounding", noise_ratio=None, bound_ratio=None, reason=TAKEN_BACK
            )
            score.ledger.leave_out(GAUGE, pair.site, math.prod(pair.shape or ()))
    for node in nodes:
        score.divergences.pop(node, None)
