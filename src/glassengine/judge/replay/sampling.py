"""One sample of what rounding makes of each op in a graph, and how far it may lead in a function that is made of ops.

Every op in a recurrence, a branch, a loop or a function of an ONNX model rounds as it would alone. A bound of such a
function is worked out from samples: it has none in closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.numerics.judgement import smallest_precise, unit_roundoff
from glassengine.numerics.noise import noisy, rounds
from glassengine.numerics.ops import FLOAT32_SUMS, Accumulation

NUM_RUNS = 6
_OF_ELEMENT = 4.0
_OF_ROW = 6.0
"""Of the largest error that an element, or on average the elements of its row, had in some run."""

Each = Callable[[Node, Any, tuple[Any, ...], dict[str, Any]], Any]


def sampled(
    generator: torch.Generator, dtype_of: Callable[[Node, Tensor], torch.dtype], how: Accumulation = FLOAT32_SUMS
) -> Each:
    """Return what rounds the float64 results of a node, given its float64 arguments.

    Args:
        generator: Source of the noise.
        dtype_of: Returns the floating dtype in which a result is rounded.
        how: How products are summed.
    """

    def each(node: Node, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def one(result: Any) -> Any:
            if not isinstance(result, Tensor) or not result.is_floating_point():
                return result
            dtype = dtype_of(node, result)
            u, tiny = unit_roundoff(dtype), smallest_precise(dtype)
            return noisy(node, result.double(), args, kwargs, u, generator, how, tiny)

        return pytree.tree_map(one, value) if rounds(node) else value

    return each


def bound_of(exact: Tensor, runs: Sequence[Tensor]) -> Tensor:
    """Return how far rounding may lead from `exact`, element by element, of runs that were rounded inside."""
    errors = torch.stack([(run - exact).abs().nan_to_num(0.0, 0.0, 0.0) for run in runs]).amax(0)
    row = errors.square().mean(-1, keepdim=True).sqrt() if errors.dim() else errors
    return _OF_ELEMENT * errors + _OF_ROW * row
