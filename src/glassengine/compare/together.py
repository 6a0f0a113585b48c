"""Judges all pairs of a comparison: each alone, then related ones together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from glassengine.compare.judging import Judge
from glassengine.compare.matching.matching import Match
from glassengine.compare.ranks.open_shares import never_added_up
from glassengine.compare.ranks.ranks import PutTogether
from glassengine.compare.ranks.shared_gradients import OWN_SHARE, SHARED, shared_gradients, shares_of_right_sums
from glassengine.recording.read.source import TensorSource
from glassengine.results import FLAGGED, Pair


def judge_all(judge: Judge, chosen: Sequence[Match], left: TensorSource, right: TensorSource) -> list[Pair]:
    """Return the verdict on each pair; shares of a sum that are never added up are judged as what they are."""
    pairs = [judge.pair(one) for one in chosen]
    # A pair that is judged again adds no second row to the table of drifts.
    judge = dataclasses.replace(judge, precision=None, ledger=None)
    for numbers in shared_gradients(pairs, chosen):
        together = judge.pair(chosen[numbers[0]], added=[chosen[i] for i in numbers[1:]])
        if together.verdict not in FLAGGED:
            for i in numbers:
                site, other = chosen[i].baseline.site, chosen[i].candidate_site
                pairs[i] = dataclasses.replace(together, site=site, candidate_site=other, reason=SHARED)
    for i, k in shares_of_right_sums(pairs, chosen, left).items():
        pairs[i] = dataclasses.replace(pairs[i], verdict=pairs[k].verdict, reason=f"{OWN_SHARE}: {pairs[k].site}")
    sides = ((left, [one.baseline for one in chosen]), (right, [one.candidates[0] for one in chosen]))
    for side, entries in sides:
        if isinstance(side, PutTogether):
            for i in never_added_up(pairs, chosen, side, entries):
                side.reject(entries[i])
                pairs[i] = judge.pair(chosen[i])
    return pairs
