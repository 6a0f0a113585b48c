"""An op on inputs that are computed once more from what they were made of, up to a few ops back.

Fused code computes a value once for its readers and once more for the dump, each time with kernels and roundings of its
own. What it feeds to an op may therefore differ from what was dumped, by as much as the ops in between may round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.replay.values import DOES_NOT_FIT, Values, in_float64
from glassengine.numerics.bounds import rounding_bound
from glassengine.numerics.float64 import target_of
from glassengine.numerics.ops import U_ACCUMULATE, Operation, Roundoff
from glassengine.ops.row import Rounding
from glassengine.ops.traits import traits_of

MOST_DEPTH = 3
_CANCELLED = 4.0
"""From so many times the rounding bound of the op on, what its inputs were off by is more than its own rounding."""
_TYPICAL = 1 / 8
"""Of the bound of a sum, whose terms kernels add in several lanes."""


class ComputedAgain:
    """Computes ops on the candidate's values with inputs of theirs computed again.

    Args:
        values: Of the candidate.
    """

    def __init__(self, values: Values) -> None:
        self._values = values

    def read(self, op: Node, call: Callable[..., Any], depth: int) -> tuple[Operation, torch.Tensor] | None:
        """Return the op on inputs computed again, and how far from it their rounding may lead.

        Args:
            op: The op.
            call: What computes its result.
            depth: How many ops back; 0 for inputs as they were observed, which may have been rounded otherwise.
        """
        inner: dict[str, torch.Tensor] = {}
        try:
            made = self._made(op, call, depth, inner, {})
            carried = torch.zeros_like(made.exact)
            for name, bound in inner.items():
                moved = [self._made(op, call, depth, None, {name: sign * bound}) for sign in (1.0, -1.0)]
                effects = [(part.exact - made.exact).abs() for part in moved]
                carried = carried + torch.stack(effects).amax(0).nan_to_num(0.0, 0.0, 0.0)
            own = rounding_bound(made, Roundoff(U_ACCUMULATE)) if inner else None
        except DOES_NOT_FIT:
            return None  # what the candidate made an input of does not fit the input
        if own is None:
            return None
        # Only where terms cancel: elsewhere the op's own bound has room for what its inputs were off by.
        return made, torch.where(carried > _CANCELLED * own, carried, 0.0)

    def _made(
        self,
        op: Node,
        call: Callable[..., Any],
        depth: int,
        inner: dict[str, torch.Tensor] | None,
        moved: Mapping[str, torch.Tensor],
    ) -> Operation:
        read = {source: self._read(source, depth, inner, moved) for source in op.all_input_nodes}
        return in_float64(op, call, read.__getitem__)

    def _read(
        self, node: Node, depth: int, inner: dict[str, torch.Tensor] | None, moved: Mapping[str, torch.Tensor]
    ) -> Any:
        """Return what a kernel may have read for `node`: computed again up to `depth` ops back, or as it was observed.

        Args:
            node: Yields the value.
            depth: How many ops back.
            inner: Filled with the rounding bound of each value that a kernel may have rounded otherwise.
            moved: Node -> what to add to its value.
        """
        value = self._values.of(node)
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        if node.name not in self._values.observed or not is_float or node.op != "call_function":
            return value
        traits = traits_of(node)
        moves = traits.moves
        is_cheap = traits.casts or traits.rounding is Rounding.POINTWISE or traits.kind == "sum"
        if not moves and not (depth > 0 and is_cheap):
            if inner is not None and not traits.casts:
                self._note(node, self._called(node, self._values.of), inner)
            return value.double() + moved[node.name] if node.name in moved else value
        made = self._called(node, lambda source: self._read(source, depth - (not moves), inner, moved))
        if made is None or made.exact.shape != value.shape:
            return value
        if inner is not None and not moves and not traits.casts:
            self._note(node, made, inner)
        return made.exact + moved[node.name] if node.name in moved else made.exact

    def _called(self, node: Node, read: Callable[[Node], Any]) -> Operation | None:
        """Return the op of a node on what `read` gives; None where it cannot be computed."""
        try:
            made = in_float64(node, target_of(node), read)
        except DOES_NOT_FIT:
            return None
        return made if isinstance(made.exact, torch.Tensor) and made.exact.is_floating_point() else None

    def _note(self, node: Node, operation: Operation | None, inner: dict[str, torch.Tensor]) -> None:
        """Note how far a kernel may have rounded a value otherwise, in registers: it is not stored in between."""
        if operation is None or operation.exact.shape != self._values.observed[node.name].shape:
            return
        stored = self._values.roundoff(node, self._values.observed[node.name])
        u, u_sums = min(stored.u, U_ACCUMULATE), stored.u_sums
        bound = rounding_bound(operation, Roundoff(u, tiny=stored.tiny, u_sums=u_sums, kernel=stored.kernel))
        if bound is not None:
            inner[node.name] = bound * _TYPICAL if traits_of(node).rounding is Rounding.SUMS else bound
