"""Fully masked attention rows: their output is implementation-defined and excluded.

A query of padding with nothing but padding before it sees no key: a mask hides all of its scores. One implementation
gives all keys the same share, another gives none, a third returns NaN, and rounding alone picks one of the hidden
numbers. The noise of such rows is as large as their values; measured over these and real rows together, it would hide
any mistake in the real ones. So these rows and what depends on them (see `other_values`) are excluded, unless nothing
else is left of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from glassengine.judge.exclusions.other_values import NATIVE, Source, Values
from glassengine.numerics.mask_values import HIDDEN
from glassengine.ops.arguments import argument
from glassengine.ops.row import OpTraits, Rounding
from glassengine.ops.traits import traits_of
from glassengine.results import ExemptionReason


class HiddenRows(Source):
    """What depends on fully masked attention rows.

    Args:
        hidden: Takes a node of scores and returns a bool mask, in its shape, of the numbers that hide a key (see
            `hidden_values`), or None if there are none. Without it every number of that size hides.
    """

    kind: ExemptionReason = "masked rows"
    reason = "fully masked attention rows, and elements that depend on them"

    def __init__(self, hidden: Callable[[Node], torch.Tensor | None] | None = None) -> None:
        self._hidden = hidden

    def concerns(self, traits: OpTraits) -> bool:
        """Return whether an op makes shares of scores."""
        return traits.hidden == "ignored" or traits.rounding is Rounding.ATTENTION

    def marks(self, node: Node, value: torch.Tensor, values: Values) -> torch.Tensor | None:
        """Return the rows that see no key, of the result of a softmax or an attention."""
        traits = traits_of(node)
        if traits.hidden == "ignored":
            source, dims = node.all_input_nodes[0], argument(node, "dim")
            scores = values[source][NATIVE]
            along = list(range(scores.dim())) if dims is None or dims == [] else dims
            return self._sees_nothing(source, scores, along, keep=value.dim() == scores.dim())
        if traits.rounding is Rounding.ATTENTION:
            own = argument(node, "attn_mask")
            return self._sees_nothing(own, values[own][NATIVE], -1) if isinstance(own, Node) else None
        return None

    def excludes(self, mask: torch.Tensor) -> bool:
        """Return whether any element of the tensor is left."""
        return not bool(mask.all())

    def _sees_nothing(
        self, node: Node, scores: torch.Tensor, dim: int | list[int], *, keep: bool = True
    ) -> torch.Tensor | None:
        """Return which rows along `dim` hold hidden places only; None where no row does."""
        if not scores.dim() or not scores.numel():
            return None
        if scores.dtype is torch.bool:
            seen = scores
        else:
            known = None if self._hidden is None else self._hidden(node)
            if self._hidden is not None and known is None:
                return None
            seen = scores > HIDDEN if known is None else ~known
        none: torch.Tensor = ~seen.any(dim, keepdim=keep)
        return none if bool(none.any()) else None
