"""Gradients of parameters that are added up over microbatches: what counts is the sum over all of them.

Schedules of pipelines add them up in any order: a sum over some of the microbatches is another one then, in a run that
is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from glassengine.compare.matching.matching import Match
from glassengine.recording.read.source import TensorSource
from glassengine.results import FLAGGED, Packed

ADDED_OTHERWISE = "a sum over some of the microbatches, in another order; that over all is right"
_GRADIENT = ":grad"

Place = tuple[str, int, int]
"""Site, step and rank."""


def partial_sums(left: TensorSource, right: TensorSource) -> dict[Place, Place]:
    """Return where the baseline has a sum over some of the microbatches of an update -> where it has that over all.

    Of runs that do not say that they are of several microbatches, nothing is returned.

    Args:
        left: The baseline.
        right: The candidate.
    """
    told = (side.metadata.get("microbatches") for side in (left, right))
    count = max((number for number in told if isinstance(number, int)), default=1)
    if count < 2:
        return {}
    places = [entry.place for entry in left.entries if entry.site.endswith(_GRADIENT)]
    group = {step: number // count for number, step in enumerate(sorted({step for _, step, _ in places}))}
    last: dict[tuple[str, int, int], Place] = {}
    for place in places:
        site, step, rank = place
        last[site, group[step], rank] = max(place, last.get((site, group[step], rank), place))
    each = ((place, last[place[0], group[place[1]], place[2]]) for place in places)
    return {place: final for place, final in each if place != final}


def with_right_sums(pairs: Packed, judged: Sequence[Match], sums: Mapping[Place, Place]) -> dict[int, int]:
    """Return the numbers of flagged pairs that are such sums -> that of the right pair with the sum over all.

    Args:
        pairs: All verdicts.
        judged: What was judged.
        sums: What `partial_sums` returns.
    """
    flagged = [i for i in pairs.flagged() if judged[i].baseline.place in sums] if sums else []
    wanted = {sums[judged[i].baseline.place] for i in flagged}
    right = {}
    for i, pair in enumerate(pairs if wanted else ()):
        if pair.verdict not in FLAGGED and (place := judged[i].baseline.place) in wanted:
            right[place] = i
    each = ((i, right.get(sums[judged[i].baseline.place])) for i in flagged)
    return {i: k for i, k in each if k is not None}
