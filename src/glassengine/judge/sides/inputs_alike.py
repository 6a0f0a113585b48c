"""Whether an argument of a candidate is an input of the baseline: by what the two forwards do with it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from glassengine.program.inputs.observe import Use

_GUESS = 20
"""What speaks against giving an argument something for no reason."""


def likeness(pairs: Mapping[str, tuple[Use, Use]], optional: Collection[str]) -> int:
    """Return how much speaks for an assignment of inputs to arguments.

    Args:
        pairs: Argument -> what the candidate does with it, and the baseline with the input that it is given.
        optional: Arguments that the forward can do without: they are given only what both do the same with.
    """
    guesses = sum(1 if _is_evidence(*pairs[name]) else -_GUESS for name in pairs if name in optional)
    return guesses + sum(_alike(one, other) for one, other in pairs.values())


def _is_evidence(one: Use, other: Use) -> bool:
    """Whether both forwards do something telling with an input, and the same."""
    return any(a is not None and a == b for a, b in ((one.bound, other.bound), (one.convolved, other.convolved))) or (
        one.is_mask and other.is_mask
    )


def _alike(one: Use, other: Use) -> int:
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
