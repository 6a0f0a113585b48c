"""An op on inputs that are computed once more from what they were made of, up to a few ops back.

Fused code computes a value once for its readers and once more for the dump, each time with kernels and roundings of its
own. What it feeds to an op may therefore differ from what was dumped, by as much as the ops in between may round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.compare.bounds import rounding_bound
from glassengine.compare.operation import CASTS, MOVES, POINTWISE, U_ACCUMULATE, Operation, Roundoff
from glassengine.diagnose.float64 import retarget, target_of
from glassengine.program.naming import op_name

_AVERAGES = frozenset({"mean", "sum"})
"""Of a normalisation that is written out, which runtimes fuse."""
_COMPUTED_AGAIN = POINTWISE | MOVES | CASTS | _AVERAGES
MOST_DEPTH = 3


class NoCounterpart(Exception):
    """An input of the op was not observed on the candidate's side."""


class ComputedAgain:
    """Computes ops on the candidate's values with inputs of theirs computed again.

    Args:
        observed: The candidate's values by baseline node.
        value_of: Returns the value that the candidate has for a node; raises `NoCounterpart` where it has none.
        roundoff: Of an op and the candidate's result of it.
    """

    def __init__(
        self,
        observed: Mapping[str, Any],
        value_of: Callable[[Node], Any],
        roundoff: Callable[[Node, torch.Tensor], Roundoff],
    ) -> None:
        self._observed = observed
        self._value_of = value_of
        self._roundoff = roundoff

    def operation(self, op: Node, call: Callable[..., Any], depth: int) -> tuple[Operation, torch.Tensor] | None:
        """Return the op on inputs computed again, and how far from it their rounding may lead.

        Args:
            op: The op.
            call: What computes its result.
            depth: How many ops back; None where no input is computed again.
        """
        inner: dict[str, torch.Tensor] = {}
        try:
            made = self._made(op, call, depth, inner, {})
            if made is None:
                return None
            carried = torch.zeros_like(made.exact)
            for name, bound in inner.items():
                moved = [self._made(op, call, depth, None, {name: sign * bound}) for sign in (1.0, -1.0)]
                effects = [(part.exact - made.exact).abs() for part in moved if part is not None]
                carried = carried + torch.stack(effects).amax(0).nan_to_num(0.0, 0.0, 0.0)
        except (NoCounterpart, RuntimeError, IndexError, ValueError):
            return None  # what the candidate made an input of does not fit the input
        return made, carried

    def _made(
        self,
        op: Node,
        call: Callable[..., Any],
        depth: int,
        inner: dict[str, torch.Tensor] | None,
        moved: Mapping[str, torch.Tensor],
    ) -> Operation | None:
        again: dict[str, torch.Tensor] = {}
        for source in op.all_input_nodes:
            value = self._again(source, depth, inner, moved)
            if value is not None:
                again[source.name] = value
        if not again:
            return None
        args, kwargs = torch.fx.node.map_arg(
            (op.args, dict(op.kwargs)), lambda source: again.get(source.name, self._value_of(source))
        )
        args, kwargs = pytree.tree_map(retarget, (args, kwargs))
        return Operation(op_name(op), call, args, kwargs, call(*args, **kwargs))

    def _again(
        self, node: Node, depth: int, inner: dict[str, torch.Tensor] | None, moved: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """Return an observed value in float64, computed once more; None where it is as it was observed.

        Args:
            node: Yields the value.
            depth: How many ops back.
            inner: Filled with the rounding bound of each value that is computed again.
            moved: Node -> what to add to its value.
        """
        if not depth or node.name not in self._observed or op_name(node) not in _COMPUTED_AGAIN:
            return None
        sources = {source: self._again(source, depth - 1, inner, moved) for source in node.all_input_nodes}
        try:
            args, kwargs = torch.fx.node.map_arg(
                (node.args, dict(node.kwargs)),
                lambda source: self._value_of(source) if sources[source] is None else sources[source],
            )
            args, kwargs = pytree.tree_map(retarget, (args, kwargs))
            value = target_of(node)(*args, **kwargs)
        except (NoCounterpart, RuntimeError, IndexError, ValueError):
            return None
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return None
        if inner is not None and op_name(node) in POINTWISE | _AVERAGES:
            operation = Operation(op_name(node), target_of(node), args, kwargs, value)
            # In registers: what is computed again is not stored in between.
            stored = self._roundoff(node, self._observed[node.name])
            roundoff = Roundoff(min(stored.u, U_ACCUMULATE), tiny=stored.tiny, kernel=stored.kernel)
            bound = rounding_bound(operation, roundoff)
            if bound is not None:
                inner[node.name] = bound
        return value + moved[node.name] if node.name in moved else value
