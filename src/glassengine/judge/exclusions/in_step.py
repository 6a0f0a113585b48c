"""All that is excluded of the tensors of one step, by reason: one list of sources, and the masks that come of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.judge.exclusions.other_values import Followed, Source
from glassengine.judge.exclusions.tie_propagation import TiesFollowed
from glassengine.numerics.exemptions import PADDING, TIES, UNWRITTEN
from glassengine.results import ExemptionReason


class Excluded(NamedTuple):
    """Of one tensor.

    Attributes:
        by_reason: Reason -> bool mask that broadcasts against it.
        valid: Elements that count, ties aside; None where all do.
        tied: Elements of which another value is legal below a tie; None where there are none.
    """

    by_reason: dict[ExemptionReason, Tensor]
    valid: Tensor | None
    tied: Tensor | None


class Exclusions:
    """What is excluded in one step, found in graph order.

    Args:
        sources: What leaves elements undefined.
        again: Computes a node once more in float64: takes it, and the other values of nodes that it reads.
        unwritten: Names of nodes with elements that nothing has written, which are NaN in float64.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        again: Callable[[Node, Mapping[Node, Any]], Any],
        unwritten: Collection[str] = (),
    ) -> None:
        self._followed = [Followed(source) for source in sources]
        self._unwritten = unwritten
        self.ties = TiesFollowed(again)

    def visit(self, node: Node, env: Mapping[Node, Sequence[Any]]) -> None:
        """Take note of a computed node.

        Args:
            node: It.
            env: Values of the nodes computed so far, this one among them: exact, in the program's dtype, and noisy.
        """
        for one in self._followed:
            one.visit(node, env[node][1], lambda source: env[source][1])
        self.ties.visit(node, env)

    def of(self, node: Node, exact: Tensor, real: Tensor | None, dtype: torch.dtype) -> Excluded:
        """Return what is excluded of a tensor.

        Args:
            node: Its node.
            exact: Its float64 value.
            real: Elements other than padding; None where all are.
            dtype: In which it is rounded.
        """
        found: dict[ExemptionReason, Tensor] = {} if real is None else {PADDING: ~real}
        if node.name in self._unwritten and exact.is_floating_point():
            found[UNWRITTEN] = exact.isnan()
        found |= {one.source.kind: mask for one in self._followed if (mask := one.of(node.name)) is not None}
        valid: Tensor | None = None
        for mask in found.values():
            valid = ~mask if valid is None else valid & ~mask
        tied = self.ties.of(node, exact, dtype)
        if tied is not None:
            found[TIES] = tied
        return Excluded(found, valid, tied)

    def settle(self, node: Node) -> None:
        """Take note that nothing reads `node` any more."""
        for one in self._followed:
            one.settle(node)
        self.ties.settle(node)
