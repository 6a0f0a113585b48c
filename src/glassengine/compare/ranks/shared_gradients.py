"""Gradients of a tensor that several modules are given, where one side has the share of each and the other the sum.

The gradient of what a module is given is that of the tensor: all who read it add to it. A module whose input is another
tensor of the same values (it was copied, cast, or spread over processes for it alone) has its own share. Where the sum
is recorded under another name, as the gradient of what made the tensor, it is judged there, and the share with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from glassengine.compare.matching.matching import Match
from glassengine.recording.layout.layout import Entry
from glassengine.recording.read.source import TensorSource
from glassengine.results import FLAGGED, Pair

SHARED = "added up with those of the modules that are given the same tensor"
OWN_SHARE = "the module's own share of a gradient whose sum is right"

_MAX_SHARES = 256


def shared_gradients(pairs: Sequence[Pair], judged: Sequence[Match]) -> list[list[int]]:
    """Return the numbers of flagged pairs that the baseline has as one gradient and the candidate as several.

    Args:
        pairs: All verdicts.
        judged: What was judged.
    """
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, one in enumerate(judged):
        entry = one.baseline
        if entry.location is not None and _is_given(one):
            groups[entry.step, entry.rank, entry.location].append(i)
    return [
        numbers
        for numbers in groups.values()
        if len(numbers) > 1
        and all(pairs[i].verdict in FLAGGED for i in numbers)
        and len({judged[i].candidates[0].location for i in numbers}) == len(numbers)
    ]


def shares_of_right_sums(pairs: Sequence[Pair], judged: Sequence[Match], left: TensorSource) -> dict[int, int]:
    """Return the numbers of flagged pairs that are a module's share -> that of the pair which is the sum, and right.

    In the baseline both are one gradient: a share that is wrong would make the sum wrong.

    Args:
        pairs: All verdicts.
        judged: What was judged.
        left: The baseline.
    """
    flagged = [i for i, pair in enumerate(pairs) if pair.verdict in FLAGGED and _is_given(judged[i])]
    right: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, pair in enumerate(pairs):
        if pair.verdict not in FLAGGED and ":grad_" in judged[i].baseline.site:
            right[_like(judged[i].baseline)].append(i)
    found = {}
    for i in flagged[:_MAX_SHARES]:
        entry = judged[i].baseline
        values = left.tensor(entry).flatten()
        if not bool((values != values[:1]).any()):
            continue  # a constant tensor does not show what it is a gradient of
        for k in right[_like(entry)]:
            other = judged[k].baseline
            is_one = entry.location is not None and entry.location == other.location
            if is_one or torch.equal(values, left.tensor(other).flatten()):
                found[i] = k
                break
    return found


def _is_given(match: Match) -> bool:
    return match.rule is None and match.baseline.site.partition(":")[2].startswith("grad_in")


def _like(entry: Entry) -> tuple[object, ...]:
    return entry.step, entry.rank, entry.dtype, entry.shape
