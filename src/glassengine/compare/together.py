"""What the verdicts on pairs say together: shares of a sum that are never added up are judged as what they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from glassengine.compare.matching.matching import Match
from glassengine.compare.partial_sums import ADDED_OTHERWISE, partial_sums, with_right_sums
from glassengine.compare.ranks.findings import Findings
from glassengine.compare.ranks.open_shares import never_added_up
from glassengine.compare.ranks.shared_gradients import OWN_SHARE, SHARED, shared_gradients, shares
from glassengine.recording.read.source import TensorSource
from glassengine.results import FLAGGED, Packed, Pair


class Again(Protocol):
    """Asks for tensors once more."""

    def added_up(self, groups: Sequence[Sequence[int]]) -> list[Pair]:
        """Return for each group of pairs the verdict on the first, to whose candidate those of the others are added."""

    def sums_of(self, wanted: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Return the numbers of pairs that are a share -> that of the pair, of several, which is its sum."""

    def rejected(self, numbers: Sequence[int]) -> list[Pair]:
        """Return the verdicts on pairs whose parts are not shares."""


def judged_together(
    found: Packed, chosen: Sequence[Match], left: TensorSource, right: TensorSource, again: Again
) -> None:
    """Make the verdicts on all pairs out of those on each alone."""
    for i, k in with_right_sums(found, chosen, partial_sums(left, right)).items():
        found[i] = dataclasses.replace(found[i], verdict=found[k].verdict, reason=ADDED_OTHERWISE)
    groups = shared_gradients(found, chosen)
    for numbers, together in zip(groups, again.added_up(groups), strict=True):
        if together.verdict not in FLAGGED:
            for i in numbers:
                site, other = chosen[i].baseline.site, chosen[i].candidate_site
                found[i] = dataclasses.replace(together, site=site, candidate_site=other, reason=SHARED)
    for i, k in again.sums_of(shares(found, chosen)).items():
        found[i] = dataclasses.replace(found[i], verdict=found[k].verdict, reason=f"{OWN_SHARE}: {found[k].site}")
    for side, is_left in ((left, True), (right, False)):
        if isinstance(side, Findings):
            entries = [one.baseline if is_left else one.candidates[0] for one in chosen]
            open_ones = never_added_up(found, chosen, side, entries)
            for i, pair in zip(open_ones, again.rejected(open_ones), strict=True):
                side.reject(entries[i])
                found[i] = pair
