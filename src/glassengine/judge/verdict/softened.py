"""Softens two alarms to suspicious, which is ok unless `--fail-on suspicious`.

The one is a tensor that nothing reads. The other is a tensor that was paired by its name alone, where the same one was
judged from its own inputs and found right, provided that every result agrees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from glassengine.judge.exclusions.unread import unread_nodes
from glassengine.judge.sides.protocol import Level, Place
from glassengine.judge.verdict.score import Score
from glassengine.program.representation.program import Program
from glassengine.results import FLAGGED, Divergence, Pair

UNREAD = "nothing reads it: no result can depend on it"
BY_NAME_ONLY = "by its name alone; from its own inputs it is right, and the results agree"


@dataclass(frozen=True)
class Softened:
    """Pairs and divergences by rung, after alarms that cannot matter were softened."""

    pairs: dict[str, list[Pair]]
    divergences: dict[str, list[Divergence]]


def softened(scores: Sequence[Score], program: Program) -> Softened:
    """Return what all sides found, with the two alarms of the module's docstring softened."""
    unread = unread_nodes(program)
    main = [score for score in scores if score.side.level is Level.OP and score.side.place is not Place.PASS]
    agree = [score for score in scores if _agrees(score)]
    right: set[str] = set()
    for score in main:
        flagged = {pair.site for pair in score.pairs if pair.verdict in FLAGGED}
        # One op that is wrong, and what was paired by name may be what shows it.
        if score in agree and score is not scores[0] and not any(pair.verdict == "wrong" for pair in score.pairs):
            right |= {n for n in score.judged_nodes if program.sites.by_node[n][0].name not in flagged}
    pairs, divergences = {}, {}
    for score in scores:
        excused = dict.fromkeys(unread, UNREAD)
        if score.side.level is Level.SEGMENT and score in agree and score is not scores[0]:
            named = {site.name for node in right for site in program.sites.by_node.get(node, ())}
            if all(pair.site in named for pair in score.pairs if pair.verdict == "wrong"):
                excused = dict.fromkeys(right, BY_NAME_ONLY) | excused
        sites = {site.name: why for node, why in excused.items() for site in program.sites.by_node.get(node, ())}
        pairs[score.side.rung] = [_softer(pair, sites) for pair in score.pairs]
        divergences[score.side.rung] = [
            dataclasses.replace(found, verdict="suspicious")
            if found.verdict == "wrong" and (found.node or "") in excused
            else found
            for found in score.divergences.values()
        ]
    return Softened(pairs, divergences)


def _agrees(score: Score) -> bool:
    """Whether all results of a side were compared and agree, and no tie had to excuse any of them."""
    found = score.results.found
    return bool(found) and all(result.agrees and not result.exempt for result in found)


def _softer(pair: Pair, sites: Mapping[str, str]) -> Pair:
    if pair.verdict != "wrong" or pair.site not in sites:
        return pair
    return dataclasses.replace(pair, verdict="suspicious", reason=sites[pair.site])
