"""Whether an argument of a candidate is an input of the baseline: by what the two forwards do with it."""

from __future__ import annotations

from glassengine.program.inputs.observe import Use


def is_evidence(one: Use, other: Use) -> bool:
    """Whether both forwards do something telling with an input, and the same."""
    return any(a is not None and a == b for a, b in ((one.bound, other.bound), (one.convolved, other.convolved))) or (
        one.is_mask and other.is_mask
    )


def alike(one: Use, other: Use) -> int:
    """Return how much speaks for two inputs being one: what reads them weighs most.

    Args:
        one: Of the candidate.
        other: Of the baseline.
    """
    same = 0
    for a, b in ((one.bound, other.bound), (one.convolved, other.convolved)):
        same += 4 if a is not None and a == b else -4 if (a is None) != (b is None) else 0
    same += 2 if one.is_mask == other.is_mask else -2
    # What the candidate does not look at is not what the baseline reads.
    same -= 3 if other.is_read and not one.is_read else 0
    return same + (one.is_data == other.is_data) + (one.is_summed == other.is_summed)
