"""Two sides of which one was run by several processes: its parts are put together, each for its counterpart."""

from __future__ import annotations

import numpy as np

from glassengine.compare.matching.matching import Match, Matching, by_step
from glassengine.compare.matching.source_wrapper import SourceWrapper
from glassengine.compare.ranks.ranks import PutTogether
from glassengine.compare.ranks.two_layouts import Joined
from glassengine.recording.layout.layout import Entry, have_same_bytes


def sides_of_one_rank(left: SourceWrapper, right: SourceWrapper) -> tuple[SourceWrapper, SourceWrapper]:
    """Return both sides, that of several ranks put together where the other one has a single rank.

    Sides that both have several are compared rank by rank where they are spread alike. Else the baseline is put
    together first, where the parts of the candidate agree with it, and then the candidate.
    """
    several = [len({entry.rank for entry in side.entries}) > 1 for side in (left, right)]
    is_two = all(several) and not is_spread_alike(left, right)
    if several[0] == several[1] and not is_two:
        return left, right
    if is_two:
        joined = Joined(left, right)
        return joined, PutTogether(right, joined, num_groups=joined.num_groups)
    return (PutTogether(left, right), right) if several[0] else (left, PutTogether(right, left))


def expect_counterparts(left: SourceWrapper, right: SourceWrapper, matching: Matching) -> Matching:
    """Tell a side that is put together what each tensor is judged against.

    Returns:
        The matching without what cannot be put together, which is listed with its reason.
    """
    possible: list[Match] = []
    impossible: list[tuple[Entry, str]] = []
    for match in matching.matches:
        reason = None
        if left.is_assembled:
            reason = _reason(left, match.baseline, right, match.candidates[0], match)
        elif right.is_assembled:
            found = (_reason(right, entry, left, match.baseline, match) for entry in match.candidates)
            reason = left.why_not(match.baseline) or next(filter(None, found), None)
        if reason is None:
            possible.append(match)
        else:
            impossible.append((match.baseline, reason))
    return Matching(tuple(possible), (*matching.baseline_only, *impossible), matching.candidate_only)


def _reason(side: SourceWrapper, entry: Entry, other: SourceWrapper, counterpart: Entry, match: Match) -> str | None:
    rule = match.rule
    if len(match.candidates) == 1 and (rule is None or not (rule.baseline_ops or rule.candidate_ops)):
        side.expect(entry, other, counterpart)
    return side.why_not(entry)


def is_spread_alike(left: SourceWrapper, right: SourceWrapper) -> bool:
    """Return whether each rank has the same tensors on both sides, of the same shapes and for the same inputs."""
    if {entry.rank for entry in left.entries} != {entry.rank for entry in right.entries}:
        return False
    first: list[tuple[Entry, Entry]] = []
    for found in by_step(left.entries, right.entries):
        ours, theirs = ({(e.step, e.rank, e.site): e for e in side.values()} for side in found)
        common = [(entry, theirs[key]) for key, entry in ours.items() if key in theirs]
        if any(one.shape != other.shape for one, other in common):
            return False
        if not first:
            inputs = [both for both in common if both[0].site.startswith(".:in") and both[0].dtype == "int64"]
            first = [both for both in inputs if both[0].step == min(one.step for one, _ in inputs)]
    if all(have_same_bytes(one, other) for one, other in first):
        return True
    given = [(one.site, left.values(one).array, right.values(other).array) for one, other in first]
    if all(np.array_equal(one, other) for _, one, other in given):
        return True
    # Other data is a finding; the same data in other ranks is another layout.
    for site in {name for name, _, _ in given}:
        values = [np.concatenate([both[side].flatten() for name, *both in given if name == site]) for side in range(2)]
        if not np.array_equal(np.sort(values[0]), np.sort(values[1])):
            return True
    return False
