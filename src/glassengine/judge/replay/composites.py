"""What rounding does to a function that is made of ops: a recurrence, a branch, a loop, a function of an ONNX model.

Every op in it rounds as it would alone. A bound is worked out from such runs: these functions have none in closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.numerics.noise import noisy, rounds
from glassengine.numerics.ops import FLOAT32_SUMS, Accumulation
from glassengine.ops.traits import traits_of
from glassengine.program.onnx.operators.function import Composite

NUM_RUNS = 6
_OF_ELEMENT = 4.0
_OF_ROW = 6.0
"""Of the largest error that an element, or on average the elements of its row, had in some run."""


def rounded_inside(
    target: Composite,
    u: float,
    generator: torch.Generator,
    accumulation: Accumulation = FLOAT32_SUMS,
    tiny: float = 0.0,
) -> Callable[..., Any]:
    """Return a composite function whose ops round; for the arguments see `rounding.noisy`."""

    def each(node: Node, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if traits_of(node).is_arbitrary or not rounds(node):
            return value
        return pytree.tree_map(partial(_noisy, node, args, kwargs, u, generator, accumulation, tiny), value)

    return target.rounded(each)


def bound_of(exact: torch.Tensor, runs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return how far rounding may lead from `exact`, element by element, of runs that were rounded inside."""
    errors = torch.stack([(run - exact).abs().nan_to_num(0.0, 0.0, 0.0) for run in runs]).amax(0)
    row = errors.square().mean(-1, keepdim=True).sqrt() if errors.dim() else errors
    return _OF_ELEMENT * errors + _OF_ROW * row


def _noisy(
    node: Node,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    u: float,
    generator: torch.Generator,
    accumulation: Accumulation,
    tiny: float,
    value: Any,
) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return noisy(node, value.double(), args, kwargs, u, generator, accumulation, tiny)
