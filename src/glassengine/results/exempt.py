"""What was left out of a verdict, by reason and size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from glassengine.results.base import Result

ExemptionReason = Literal[
    "padding",
    "unwritten memory",
    "masked rows",
    "undefined casts",
    "ties",
    "below ties or padding",
    "random",
    "unread",
    "written in another gauge",
]


@dataclass(frozen=True)
class Exemption(Result):
    """Elements that a comparison left out for one reason, over all cases and steps of the rung that was judged finest.

    Attributes:
        reason: "padding" (tokens and cache slots that hold nothing), "unwritten memory", "masked rows" (attention that
            sees no key), "undefined casts" (NaN or too large a number to an integer dtype), "ties" (a choice between
            values that differ by less than rounding), "below ties or padding" (a whole tensor with unknown
            elements that depend on them), "random" (other in each run), "unread" (later ops leave
            these elements out, with any values), "written in another gauge" (later ops take back how these differ, with
            any values).
        num_elements: How many.
        share: Of all elements that the two sides have in common.
        num_tensors: How many tensors have such elements.
        largest_site: Of the tensor that has most of them.
    """

    reason: ExemptionReason
    num_elements: int
    share: float
    num_tensors: int
    largest_site: str
