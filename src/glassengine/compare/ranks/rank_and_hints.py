"""Which process has the first wrong tensor of a run of several, and what would explain it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from glassengine.compare.matching.matching import Match
from glassengine.compare.matching.source_wrapper import SourceWrapper
from glassengine.compare.ranks.hints import hints_of_copies, out_of_order, rank_hints, wrong_ranks
from glassengine.compare.ranks.ranks import PutTogether
from glassengine.compare.ranks.spread import Part
from glassengine.recording.layout.layout import Entry
from glassengine.results import FLAGGED, Hint, Pair
from glassengine.sites import ROOT


def rank_and_hints(
    number: int, pairs: Sequence[Pair], judged: Sequence[Match], left: SourceWrapper, right: SourceWrapper
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
    if left.is_assembled or right.is_assembled:
        if match.rule is not None:
            return None, ()
        ours, theirs = match.baseline, match.candidates[0]
        if right.is_assembled:
            return of_parts(cast(PutTogether, right), theirs, left.tensor(ours))
        return of_parts(cast(PutTogether, left), ours, right.tensor(theirs))
    if all(entry.rank == match.baseline.rank for entry in left.entries):
        return None, ()
    place = (match.baseline.step, match.baseline.site)
    there = [i for i, one in enumerate(judged) if (one.baseline.step, one.baseline.site) == place and one.rule is None]
    wrong = [i for i in there if pairs[i].verdict in FLAGGED]
    if len(there) < 2:
        return match.baseline.rank, ()
    if len(wrong) < len(there):
        named = ", ".join(str(pairs[i].rank) for i in wrong)
        return match.baseline.rank, (
            Hint("other", f"wrong in rank {named}, right in the others", 0.9, evidence="rank"),
        )
    baselines = [left.tensor(judged[i].baseline) for i in there]
    if not all(torch.equal(baselines[0], other) for other in baselines[1:]):
        return None, ()
    parts = [Part((pairs[i].rank,), right.tensor(judged[i].candidates[0])) for i in there]
    return None, hints_of_copies(parts, match.baseline.site, baselines[0])


def of_parts(side: PutTogether, entry: Entry, whole: Tensor) -> tuple[int | None, tuple[Hint, ...]]:
    """Return the rank that has its part of a tensor wrong, None where all that have it do; and hints.

    Args:
        side: Of several ranks.
        entry: One of its entries.
        whole: What its parts should make.
    """
    absent = _absent(side, entry)
    if absent and side.tensor(entry).shape != whole.shape:
        named, around = ", ".join(map(str, absent)), _around(entry.site)
        text = f"rank {named} has none, though it ran {around}: a call was left out there"
        return absent[0] if len(absent) == 1 else None, (Hint("other", text, 0.9, evidence="rank"),)
    ranks = side.ranks_of(entry.step, entry.site)
    wrong = wrong_ranks(side, entry, whole) or (ranks if len(ranks) == 1 else ())
    rank = next(iter(wrong), None)
    if rank is None and (moved := out_of_order(side, entry)) is not None and 2 * len(moved[0]) < len(ranks):
        rank = moved[0][0]
    return rank, (*_without_update(side, entry, rank), *rank_hints(side, entry, whole))


def _without_update(side: PutTogether, entry: Entry, rank: int | None) -> tuple[Hint, ...]:
    """Return that the one rank which is wrong left an update out that the others made."""
    if rank is None:
        return ()
    steps = {}
    for before in side.entries:
        if before.step < entry.step and before.site.endswith(":param"):
            there = side.ranks_of(before.step, before.site)
            module = before.site.partition(":")[0].rpartition(".")[0]
            if rank not in there and rank in side.ranks_of(before.step, module or ROOT):
                steps[before.step] = there
    if not steps:
        return ()
    step, there = min(steps.items())
    named = ", ".join(map(str, there))
    return (
        Hint("other", f"rank {rank} updated no parameters in step {step}, rank {named} did", 0.95, evidence="rank"),
    )


def _absent(side: PutTogether, entry: Entry) -> list[int]:
    """Return the ranks that recorded the module around that of `entry`, and not `entry`."""
    if entry.site.partition(":")[0] == ROOT:
        return []
    found = side.ranks_of(entry.step, _around(entry.site))
    return sorted(set(found) - set(side.ranks_of(entry.step, entry.site)))


def _around(site: str) -> str:
    return site.partition(":")[0].partition("@")[0].rpartition(".")[0] or ROOT
