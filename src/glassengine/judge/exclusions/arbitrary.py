"""Memory that nothing has written and random draws: each run has other values there.

Unwritten memory may be overwritten later, so it is followed element by element: an element counts again as soon as it
holds something else. Of a draw no single other value tells what depends on it (two draws may fall on the same side of a
threshold), so all that reads a draw depends on it as a whole; a replay of the candidate's op on the values that the
candidate drew still judges it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.judge.exclusions.other_values import EXACT, WHOLE, Source, Values
from glassengine.ops.row import OpTraits
from glassengine.ops.traits import traits_of
from glassengine.results import ExemptionReason


class Unwritten(Source):
    """What depends on memory that nothing has written; in float64 such elements are NaN."""

    kind: ExemptionReason = "unwritten memory"
    lane = EXACT

    def concerns(self, traits: OpTraits) -> bool:
        """Return whether an op allocates."""
        return traits.is_unwritten

    def marks(self, node: Node, value: Tensor, values: Values) -> Tensor | None:
        """Return all of what an allocation gives."""
        return torch.ones_like(value, dtype=torch.bool) if traits_of(node).is_unwritten else None


class Draws(Source):
    """What depends on random numbers, as a whole."""

    kind: ExemptionReason = "random"
    lane = EXACT
    is_choice = True

    def concerns(self, traits: OpTraits) -> bool:
        """Return whether an op draws."""
        return bool(traits.is_random)

    def other(self, node: Node, below: Any, values: Values, others: Mapping[Node, Any]) -> Any:
        """Return an unknown value for a draw."""
        return WHOLE if traits_of(node).is_random else below
