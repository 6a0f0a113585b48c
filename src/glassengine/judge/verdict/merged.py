"""Merges scores of one side over different cases, which other processes have judged."""

from __future__ import annotations

import dataclasses
from typing import Any

from glassengine.judge.result_figures import worse
from glassengine.judge.verdict.judged import MOST_WITH_VALUES
from glassengine.judge.verdict.score import Score
from glassengine.numerics.metrics.drift import DriftSums
from glassengine.results import worst

_SETS = ("judged_nodes", "empty_nodes")
_RESULTS = ("_found", "_sums", "_varying", "_beside", "not_compared")


def found_in(score: Score) -> dict[str, Any]:
    """Return what a score has found, without its side and its program, which stay in their process."""
    names = ("pairs", "divergences", *_SETS, "left_out", "ledger", "drift", "sums")
    return {name: getattr(score, name) for name in names} | {
        "results": {name: getattr(score.results, name) for name in _RESULTS}
    }


def merge(score: Score, later: dict[str, Any]) -> None:
    """Add what was found over later cases of the same side.

    Args:
        score: Over the cases before them.
        later: As `found_in` returns it.
    """
    room = MOST_WITH_VALUES - sum(pair.values is not None for pair in score.pairs)
    for pair in later["pairs"]:
        room -= pair.values is not None
        score.pairs.append(pair if room >= 0 else dataclasses.replace(pair, values=None))
    for node, found in later["divergences"].items():
        first = score.divergences.setdefault(node, found)
        score.divergences[node] = dataclasses.replace(first, verdict=worst([first.verdict, found.verdict]))
    for name in _SETS:
        getattr(score, name).update(later[name])
    score.left_out = score.left_out | {k: v for k, v in later["left_out"].items() if k not in score.left_out}
    score.ledger.add_all(later["ledger"])
    if score.drift is not None:
        for node, (site, sums) in later["drift"].found.items():
            own, mine = score.drift.found.setdefault(node, (site, DriftSums()))
            if own == site:
                mine.merge(sums)
    score.sums |= {node: shown for node, shown in later["sums"].items() if score.sums.get(node) is None}
    own_results, theirs = score.results, later["results"]
    for name, result in theirs["_found"].items():
        before = own_results._found.get(name)
        own_results._found[name] = result if before is None else worse(before, result)
    for name, sums in theirs["_sums"].items():
        own_results._sums.setdefault(name, DriftSums()).merge(sums)
    for name in ("_varying", "_beside", "not_compared"):
        getattr(own_results, name).update(theirs[name])
