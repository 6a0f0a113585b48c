"""Rules over several verdicts: sums over microbatches, shares of gradients, partial sums that are never reduced."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from glassengine.compare.matching.matching import MatchedPair
from glassengine.compare.matching.source_wrapper import SourceWrapper
from glassengine.compare.ranks.shared_gradients import OWN_SHARE, SHARED, shared_gradients, shares
from glassengine.compare.verdicts import Judging
from glassengine.results import FLAGGED, Packed

if TYPE_CHECKING:
    from glassengine.compare.ranks.ranks import AssembledRanks

ADDED_OTHERWISE = "a sum over some of the microbatches, in another order; that over all is right"
_GRADIENT = ":grad"

Place = tuple[str, int, int]
"""Site, step and rank."""


def apply_cross_pair_rules(found: Packed, chosen: Sequence[MatchedPair], judging: Judging) -> None:
    """Change the verdicts on single pairs by what several of them say together.

    Args:
        found: The verdicts.
        chosen: What was judged.
        judging: Judges single pairs again.
    """
    left, right = judging.sides
    for i, k in _with_right_sums(found, chosen, _partial_sums(left, right)).items():
        found[i] = dataclasses.replace(found[i], verdict=found[k].verdict, reason=ADDED_OTHERWISE)
    groups = shared_gradients(found, chosen)
    for numbers, together in zip(groups, judging.added_up(groups), strict=True):
        if together.verdict not in FLAGGED:
            for i in numbers:
                site, other = chosen[i].baseline.site, chosen[i].candidate_site
                found[i] = dataclasses.replace(together, site=site, candidate_site=other, reason=SHARED)
    for i, k in judging.sums_of(shares(found, chosen)).items():
        found[i] = dataclasses.replace(found[i], verdict=found[k].verdict, reason=f"{OWN_SHARE}: {found[k].site}")
    for side, is_left in ((left, True), (right, False)):
        if side.is_assembled:
            from glassengine.compare.ranks.open_shares import never_added_up

            entries = [one.baseline if is_left else one.candidates[0] for one in chosen]
            open_ones = never_added_up(found, chosen, cast("AssembledRanks", side), entries)
            for i, pair in zip(open_ones, judging.rejected(open_ones), strict=True):
                side.reject(entries[i])
                found[i] = pair


def _partial_sums(left: SourceWrapper, right: SourceWrapper) -> dict[Place, Place]:
    """Return where the baseline has a sum over some of the microbatches of an update -> where it has that over all.

    Of runs that do not say that they are of several microbatches, nothing is returned.

    Args:
        left: The baseline.
        right: The candidate.
    """
    counts = (side.metadata.get("microbatches") for side in (left, right))
    count = max((number for number in counts if isinstance(number, int)), default=1)
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


def _with_right_sums(pairs: Packed, judged: Sequence[MatchedPair], sums: Mapping[Place, Place]) -> dict[int, int]:
    """Return the numbers of flagged pairs that are such sums -> that of the right pair with the sum over all.

    Args:
        pairs: All verdicts.
        judged: What was judged.
        sums: What `_partial_sums` returns.
    """
    flagged = [i for i in pairs.flagged() if judged[i].baseline.place in sums] if sums else []
    wanted = {sums[judged[i].baseline.place] for i in flagged}
    right = {}
    for i, pair in enumerate(pairs if wanted else ()):
        if pair.verdict not in FLAGGED and (place := judged[i].baseline.place) in wanted:
            right[place] = i
    each = ((i, right.get(sums[judged[i].baseline.place])) for i in flagged)
    return {i: k for i, k in each if k is not None}
