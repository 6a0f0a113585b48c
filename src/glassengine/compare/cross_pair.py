"""Rules over several verdicts: sums over microbatches, shares of a sum or gradient, partial sums never reduced.

This is derived from what follows: the next new tensor. Where it is wrong, and not the same in all ranks, nothing
was added up before; where nothing follows, it is not added up at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from glassengine.compare.matching.matching import MatchedPair
from glassengine.compare.matching.phases import is_of_parameter, phase_of
from glassengine.compare.matching.source_wrapper import CACHES, SourceWrapper
from glassengine.compare.ranks.assembly import EXPLAINED
from glassengine.compare.ranks.ranks import AssembledRanks
from glassengine.compare.verdicts import OWN_SHARE, SHARED, Judging, shared_gradients, shares
from glassengine.numerics.tolerance import is_inexact
from glassengine.recording.layout.layout import Entry
from glassengine.results import FLAGGED, Packed, Pair
from glassengine.sites import ROOT

if TYPE_CHECKING:
    from glassengine.compare.ranks.ranks import AssembledRanks


def never_added_up(
    pairs: Sequence[Pair], judged: Sequence[MatchedPair], side: AssembledRanks, own: Sequence[Entry]
) -> list[int]:
    """Return the numbers of the pairs that are shares of a sum, or of a mean, which nothing shows to be made.

    Args:
        pairs: All verdicts, in order of execution.
        judged: What was judged.
        side: The one of several ranks.
        own: Its entries of them.
    """
    is_open = [one.rule is None and side.standing(entry)[0] for one, entry in zip(judged, own, strict=True)]
    if not any(is_open):
        return []
    found = []
    by_step: dict[int, list[int]] = {}
    for i, one in enumerate(judged):
        by_step.setdefault(one.baseline.step, []).append(i)
    of_site: dict[str, list[int]] = {}
    for i, one in enumerate(judged):
        of_site.setdefault(one.baseline.site, []).append(i)
    for i in (i for i, flag in enumerate(is_open) if flag):
        site = judged[i].baseline.site
        if is_of_parameter(site):
            is_made = _is_used(i, is_open, pairs, judged, of_site, side, own)
        else:
            after = [k for k in by_step[judged[i].baseline.step] if k > i]
            following = next((k for k in after if _is_made_of(judged[k]) and _is_new(k, i, judged)), None)
            # Rows of a table become shares of a sum by a mask; what is made of shares has rows only without their sum.
            is_masked = following is not None and side.is_of_rows(own[following]) and not side.is_of_rows(own[i])
            later = [k for k in after if not is_open[k]]
            is_made = not is_masked and _is_made(i, later, pairs, judged, side, own)
        if not is_made:
            found.append(i)
    return found


def _is_new(k: int, i: int, judged: Sequence[MatchedPair]) -> bool:
    """Whether a later tensor is another than the one before it: not the same storage under another name."""
    location = judged[k].baseline.location
    return location is None or location != judged[i].baseline.location


def _is_used(
    i: int,
    is_open: Sequence[bool],
    pairs: Sequence[Pair],
    judged: Sequence[MatchedPair],
    of_site: Mapping[str, Sequence[int]],
    side: AssembledRanks,
    own: Sequence[Entry],
) -> bool:
    """Whether the gradients that ranks have of a parameter are put together: what is made of them later shows it.

    That is the next update, which may be steps later where gradients are accumulated; or the sum of gradients itself.
    """
    entry = judged[i].baseline
    path = entry.site.partition(":")[0].partition("@")[0]
    updates = [k for k in of_site.get(f"{path}:param", ()) if judged[k].baseline.step >= entry.step]
    if updates:
        # All ranks made the same of them, or one of them what is right: what is wrong then came after.
        update = updates[0]
        if pairs[update].verdict not in FLAGGED or _is_same_in_all(side, own[update]):
            return True
        errors = side.errors_of_expected(own[update])
        return errors is not None and min(errors.values()) <= EXPLAINED * max(errors.values())
    later = [k for k in of_site[entry.site] if judged[k].baseline.step > entry.step and not is_open[k]]
    return bool(later) and pairs[later[0]].verdict not in FLAGGED


def _is_made(
    i: int,
    later: Sequence[int],
    pairs: Sequence[Pair],
    judged: Sequence[MatchedPair],
    side: AssembledRanks,
    own: Sequence[Entry],
) -> bool:
    site = judged[i].baseline.site
    seen = {one.baseline.location for one in judged[:i] if one.baseline.step == judged[i].baseline.step}
    same_phase = [k for k in later if phase_of(judged[k].baseline.site) == phase_of(site) and _is_made_of(judged[k])]
    new = [k for k in same_phase if judged[k].baseline.location is None or judged[k].baseline.location not in seen]
    if not new:
        return False
    following = new[0]
    if pairs[following].verdict in FLAGGED:
        return _is_same_in_all(side, own[following])
    around = next((k for k in same_phase if _is_around(judged[k].baseline.site, site)), None)
    if around is None or pairs[around].verdict not in FLAGGED or _is_same_in_all(side, own[around]):
        return True
    # The module around it is wrong, and each rank has another result: something else in it is, or this.
    return any(pairs[k].verdict in FLAGGED for k in same_phase if k < around)


def _is_made_of(match: MatchedPair) -> bool:
    """Whether a tensor may be made of those before it: no parameter, no mask, no cache (recorded when all is done)."""
    entry = match.baseline
    is_of_activations = not is_of_parameter(entry.site) and not entry.site.endswith(CACHES)
    return is_of_activations and is_inexact(entry.dtype) and not entry.site.startswith(f"{ROOT}:in")


def _is_same_in_all(side: AssembledRanks, entry: Entry) -> bool:
    return side.standing(entry)[1]


def _is_around(outer: str, inner: str) -> bool:
    """Whether `outer` is the result of a module around that of `inner`, or in a backward the gradient it passes on."""
    path, _, port = outer.partition(":")
    end = "grad_in" if phase_of(inner) == "backward" else "out"
    own = inner.partition(":")[0].partition("@")[0]
    path = path.partition("@")[0]
    return (port or "out").startswith(end) and own != path and (path == ROOT or own.startswith(f"{path}."))


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
