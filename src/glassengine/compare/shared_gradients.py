"""Gradients of a tensor that several modules are given, where one side has the share of each and the other the sum.

The gradient of what a module is given is that of the tensor: all who read it add to it. A module whose input is another
tensor of the same values (it was copied, cast, or spread over processes for it alone) has its own share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from glassengine.compare.matching import Match
from glassengine.results import FLAGGED, Pair

SHARED = "added up with those of the modules that are given the same tensor"


def shared_gradients(pairs: Sequence[Pair], judged: Sequence[Match]) -> list[list[int]]:
    """Return the numbers of flagged pairs that the baseline has as one gradient and the candidate as several.

    Args:
        pairs: All verdicts.
        judged: What was judged.
    """
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, one in enumerate(judged):
        entry = one.baseline
        if one.rule is None and entry.location is not None and entry.site.partition(":")[2].startswith("grad_in"):
            groups[entry.step, entry.rank, entry.location].append(i)
    return [
        numbers
        for numbers in groups.values()
        if len(numbers) > 1
        and all(pairs[i].verdict in FLAGGED for i in numbers)
        and len({judged[i].candidates[0].location for i in numbers}) == len(numbers)
    ]
