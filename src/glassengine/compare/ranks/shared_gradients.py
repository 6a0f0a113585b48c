"""Gradients of a tensor that several modules are given, where one side has the share of each and the other the sum.

The gradient of what a module is given is that of the tensor: all who read it add to it. A module whose input is another
tensor of the same values (it was copied, cast, or spread over processes for it alone) has its own share. Where the sum
is recorded under another name, as the gradient of what made the tensor, it is judged there, and the share with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from glassengine.compare.matching.matching import MatchedPair
from glassengine.recording.layout.layout import Entry
from glassengine.recording.read.source import TensorSource
from glassengine.results import FLAGGED, Packed, Pair

SHARED = "added up with those of the modules that are given the same tensor"
OWN_SHARE = "the module's own share of a gradient whose sum is right"

_MAX_SHARES = 256


def shared_gradients(pairs: Packed, judged: Sequence[MatchedPair]) -> list[list[int]]:
    """Return the numbers of flagged pairs that the baseline has as one gradient and the candidate as several.

    Args:
        pairs: All verdicts.
        judged: What was judged.
    """
    if not any(is_share(pairs[i]) for i in pairs.flagged()):
        return []
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, pair in enumerate(pairs):
        if is_share(pair) and (entry := judged[i].baseline).location is not None and _is_given(judged[i]):
            groups[entry.step, entry.rank, entry.location].append(i)
    return [
        numbers
        for numbers in groups.values()
        if len(numbers) > 1
        and all(pairs[i].verdict in FLAGGED for i in numbers)
        and len({judged[i].candidates[0].location for i in numbers}) == len(numbers)
    ]


def shares(pairs: Packed, judged: Sequence[MatchedPair]) -> dict[int, list[int]]:
    """Return the numbers of flagged pairs that may be a module's share -> those of right pairs that may be the sum.

    In the baseline both are one gradient: a share that is wrong would make the sum wrong.

    Args:
        pairs: All verdicts.
        judged: What was judged.
    """
    flagged = [i for i in pairs.flagged() if is_share(pairs[i]) and _is_given(judged[i])]
    if not flagged:
        return {}
    right: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, pair in enumerate(pairs):
        if pair.verdict not in FLAGGED and ":grad_" in pair.site:
            right[_like(judged[i].baseline)].append(i)
    candidates = {i: right[_like(judged[i].baseline)] for i in flagged[:_MAX_SHARES]}
    return {i: sums for i, sums in candidates.items() if sums}


def sum_of(share: Entry, sums: Sequence[Entry], left: TensorSource) -> int | None:
    """Return the place of the sum whose gradient is that of the share; None if none is, or it cannot be known."""
    values = left.tensor(share).flatten()
    if not bool((values != values[:1]).any()):
        return None  # a constant tensor does not show what it is a gradient of
    for place, other in enumerate(sums):
        is_one = share.location is not None and share.location == other.location
        if is_one or bool((values == left.tensor(other).flatten()).all()):
            return place
    return None


def is_share(pair: Pair) -> bool:
    """Whether a wrong tensor may turn out to be a share of what is right."""
    return ":grad_in" in pair.site


def _is_given(match: MatchedPair) -> bool:
    return match.rule is None and match.baseline.site.partition(":")[2].startswith("grad_in")


def _like(entry: Entry) -> tuple[object, ...]:
    return entry.step, entry.rank, entry.dtype, entry.shape
