"""Two sides of which one was run by several processes: its parts are put together, each for its counterpart."""

from __future__ import annotations

from glassengine.compare.matching.matching import Match, Matching
from glassengine.compare.ranks.ranks import PutTogether
from glassengine.compare.ranks.two_layouts import Joined, is_spread_alike
from glassengine.recording.layout.layout import Entry
from glassengine.recording.read.source import TensorSource


def sides_of_one_rank(left: TensorSource, right: TensorSource) -> tuple[TensorSource, TensorSource]:
    """Return both sides, that of several ranks put together where the other one has a single rank.

    Sides that both have several are compared rank by rank where they are spread alike. Else the baseline is put
    together first, where the parts of the candidate agree with it, and then the candidate.
    """
    several = [len({entry.rank for entry in side.entries}) > 1 for side in (left, right)]
    if all(several) and not is_spread_alike(left, right):
        joined = Joined(left, right)
        return joined, PutTogether(right, joined, num_groups=joined.num_groups)
    if several[0] == several[1]:
        return left, right
    return (PutTogether(left, right), right) if several[0] else (left, PutTogether(right, left))


def expect_counterparts(left: TensorSource, right: TensorSource, matching: Matching) -> Matching:
    """Tell a side that is put together what each tensor is judged against.

    Returns:
        The matching without what cannot be put together, which is listed with its reason.
    """
    possible: list[Match] = []
    impossible: list[tuple[Entry, str]] = []
    for match in matching.matches:
        reason = None
        if isinstance(left, PutTogether):
            reason = _reason(left, match.baseline, right, match.candidates[0], match)
        elif isinstance(right, PutTogether):
            found = (_reason(right, entry, left, match.baseline, match) for entry in match.candidates)
            why_not = left.why_not(match.baseline) if isinstance(left, Joined) else None
            reason = why_not or next(filter(None, found), None)
        if reason is None:
            possible.append(match)
        else:
            impossible.append((match.baseline, reason))
    return Matching(tuple(possible), (*matching.baseline_only, *impossible), matching.candidate_only)


def _reason(side: PutTogether, entry: Entry, other: TensorSource, counterpart: Entry, match: Match) -> str | None:
    rule = match.rule
    if len(match.candidates) == 1 and (rule is None or not (rule.baseline_ops or rule.candidate_ops)):
        side.expect(entry, other, counterpart)
    return side.why_not(entry)
