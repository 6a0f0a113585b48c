"""Activations that a candidate writes out, with a rounding after each op: right if float64 makes the same of both.

1 + erf(x) and 1 + tanh(x) cancel, so that gelu by hand in a half precision is far from gelu in one op where x is small
or negative: by more than the rounding of one op explains, and still by rounding alone.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from glassengine.judge.graphs.cut import cut
from glassengine.judge.sides.protocol import Side
from glassengine.judge.verdict.evidence import counterpart_of
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.program.representation.program import Program

ROUNDED_IN_STEPS = "written out, and the same in float64: rounded in several steps"

# Of constants that are written with some ten digits.
_EQUAL = 2.0**-20


@torch.no_grad()
def is_same_in_float64(program: Program, side: Side, node: Node, predicted: torch.Tensor) -> bool:
    """Whether a candidate writes an activation out, and float64 makes the same of that as of the baseline's op.

    Args:
        program: The baseline's.
        side: The candidate.
        node: Of the baseline, judged on the candidate's own input.
        predicted: What float64 makes of the baseline's op on that input.
    """
    traits = traits_of(node)
    # What is periodic is not among them: a coarse argument of a sine is a mistake, not a rounding.
    is_activation = traits.relative_to_argument and not traits.is_periodic
    if not is_activation or side.program is None or side.replay is None:
        return False
    given = side.replay.values.get(node.all_input_nodes[0].name)
    target, values = counterpart_of(program, side, side.program, node, side.replay.values)
    if target is None or op_name(target) == op_name(node) or not isinstance(given, torch.Tensor):
        return False
    piece = cut([target], values, values.keys() - {target.name})
    if piece is None:
        return False
    try:
        (found,) = piece.exact()
    except (RuntimeError, IndexError, ValueError):
        return False  # it holds what float64 does not have
    size = torch.maximum(predicted.abs(), given.double().abs())
    return found.shape == predicted.shape and bool(((found - predicted).abs() <= _EQUAL * size).all())
