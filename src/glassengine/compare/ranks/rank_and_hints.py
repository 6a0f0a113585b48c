"""Which process has the first wrong tensor of a run of several, and what would explain it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from glassengine.compare.matching.matching import Match
from glassengine.compare.ranks.hints import hints_of_copies, rank_hints, wrong_ranks
from glassengine.compare.ranks.ranks import PutTogether
from glassengine.compare.ranks.spread import Part
from glassengine.recording.read.source import TensorSource
from glassengine.results import FLAGGED, Hint, Pair


def rank_and_hints(
    number: int, pairs: Sequence[Pair], judged: Sequence[Match], left: TensorSource, right: TensorSource
) -> tuple[int | None, tuple[Hint, ...]]:
    """Return the rank that has a tensor wrong, None where all that have it do or there is one; and hints.

    Args:
        number: Of the pair.
        pairs: All verdicts.
        judged: What was judged.
        left: The baseline, put together where it is.
        right: The candidate, likewise.
    """
    match = judged[number]
    if isinstance(left, PutTogether) or isinstance(right, PutTogether):
        if match.rule is not None:
            return None, ()
        ours, theirs = match.baseline, match.candidates[0]
        if isinstance(right, PutTogether):
            whole = left.tensor(ours)
            return next(iter(wrong_ranks(right, theirs, whole)), None), rank_hints(right, theirs, whole)
        assert isinstance(left, PutTogether)
        whole = right.tensor(theirs)
        return next(iter(wrong_ranks(left, ours, whole)), None), rank_hints(left, ours, whole)
    if all(entry.rank == match.baseline.rank for entry in left.entries):
        return None, ()
    place = (match.baseline.step, match.baseline.site)
    there = [i for i, one in enumerate(judged) if (one.baseline.step, one.baseline.site) == place and one.rule is None]
    wrong = [i for i in there if pairs[i].verdict in FLAGGED]
    if len(there) < 2:
        return match.baseline.rank, ()
    if len(wrong) < len(there):
        named = ", ".join(str(pairs[i].rank) for i in wrong)
        return match.baseline.rank, (Hint("rank", f"wrong in rank {named}, right in the others", 0.9),)
    baselines = [left.tensor(judged[i].baseline) for i in there]
    if not all(torch.equal(baselines[0], other) for other in baselines[1:]):
        return None, ()
    parts = [Part((pairs[i].rank,), right.tensor(judged[i].candidates[0])) for i in there]
    return None, hints_of_copies(parts, match.baseline.site, baselines[0])
