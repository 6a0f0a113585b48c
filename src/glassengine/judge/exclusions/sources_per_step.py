"""Lists the sources of exclusions, and gathers by reason what they exclude of the tensors of one step.

Unwritten memory may be overwritten later, so it is followed element by element: an element counts again as soon as it
holds something else. Of a draw no single other value tells what depends on it (two draws may fall on the same side of a
threshold), so all that reads a draw depends on it as a whole; a replay of the candidate's op on the values that the
candidate drew still judges it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.judge.exclusions.masked import HiddenRows
from glassengine.judge.exclusions.perturbation import EXACT, WHOLE, Again, Followed, Source, Values
from glassengine.judge.exclusions.ties import Ties
from glassengine.judge.exclusions.undefined_casts import UndefinedCasts
from glassengine.numerics.exemptions import PADDING, TIES
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

    def other(self, node: Node, below: Any, values: Values, other_values: Mapping[Node, Any]) -> Any:
        """Return an unknown value for a draw."""
        return WHOLE if traits_of(node).is_random else below


_SOURCES: tuple[type[Source], ...] = (Unwritten, UndefinedCasts, HiddenRows, Ties, Draws)
"""In the order in which an element with several reasons is counted."""
TEXTS = {source.kind: source.reason for source in _SOURCES if source.reason}
"""Reasons in the list of skipped tensors; of other reasons only elements are counted."""
CHOICES = frozenset(source.kind for source in _SOURCES if source.is_choice)
"""Reasons that do not count for a candidate's op that is replayed on the candidate's own values."""


def sources_of(hidden: Callable[[Node], Tensor | None] | None) -> list[Source]:
    """Return the sources of one step.

    Args:
        hidden: Gives where the scores of a softmax hold numbers that hide a key (see `HiddenRows`); None if the inputs
            of the program say which rows are padding.
    """
    kinds = [kind for kind in _SOURCES if kind is not HiddenRows or hidden is not None]
    return [HiddenRows(hidden) if kind is HiddenRows else kind() for kind in kinds]


class Excluded(NamedTuple):
    """Of one tensor.

    Attributes:
        by_reason: Reason -> bool mask that broadcasts against it.
        valid: Elements that count, choices aside; None if all do.
        tied: Elements of which another value is legal below a tie; None if there are none.
    """

    by_reason: dict[ExemptionReason, Tensor]
    valid: Tensor | None
    tied: Tensor | None


class Exclusions:
    """What is excluded in one step, found in graph order.

    Args:
        sources: What leaves elements undefined.
        again: Computes a node once more in float64; for the sources that are followed there.
    """

    def __init__(self, sources: Sequence[Source], again: Again) -> None:
        self._followed = [Followed(source, again if source.lane == EXACT else None) for source in sources]

    def carry(self, node: Node, values: Mapping[ExemptionReason, Any]) -> None:
        """Take over, for an input that is a cache, what `carried` returned in the step before."""
        for one in self._followed:
            if one.source.kind in values:
                one.perturbed[node] = values[one.source.kind]

    def carried(self, node: Node) -> dict[ExemptionReason, Any]:
        """Return the other values of a node, by reason."""
        return {one.source.kind: one.perturbed[node] for one in self._followed if node in one.perturbed}

    def visit(self, node: Node, values: Values) -> None:
        """Follow all sources through a computed node.

        Args:
            node: The node.
            values: Of the nodes computed so far, this one among them: exact, in the program's dtype, and noisy.
        """
        for one in self._followed:
            one.visit(node, values)

    def of(self, node: Node, values: Values, real: Tensor | None, dtype: torch.dtype) -> Excluded:
        """Return what is excluded of a tensor.

        Args:
            node: Its node, visited last.
            values: As for `visit`.
            real: Bool mask of the elements other than padding; None if all are.
            dtype: In which it is rounded.
        """
        masks: dict[ExemptionReason, Tensor] = {} if real is None else {PADDING: ~real}
        masks |= {one.source.kind: mask for one in self._followed if (mask := one.of(node, values, dtype)) is not None}
        valid: Tensor | None = None
        for reason, mask in masks.items():
            if reason not in CHOICES:
                valid = ~mask if valid is None else valid & ~mask
        return Excluded(masks, valid, masks.get(TIES))

    def force(self, node: Node) -> None:
        """Take note that the value of a node is now the one that a candidate chose."""
        for one in self._followed:
            if one.source.is_choice:
                one.settle(node)

    def settle(self, node: Node) -> None:
        """Take note that nothing reads `node` any more."""
        for one in self._followed:
            one.settle(node)
