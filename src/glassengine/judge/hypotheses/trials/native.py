"""A piece in the dtype of the model, where the baseline casts to a finer one first."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.graphs.cut import Piece
from glassengine.judge.hypotheses.trials.trial import FAILS
from glassengine.numerics.judgement import unit_roundoff


def in_its_dtype(piece: Piece, actual: torch.Tensor) -> torch.Tensor | None:
    """Return what a piece makes in the dtype of the model, where it casts to a finer one; None where it does not."""
    own = actual.dtype
    if not own.is_floating_point or unit_roundoff(own) <= unit_roundoff(torch.float32):
        return None
    values: dict[Node, Any] = {}
    is_cast = False

    def coarse(value: Any) -> Any:
        is_finer = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != own
        return value.to(own) if is_finer else own if value in (torch.float32, torch.float64) else value

    try:
        for place, tensor in zip(piece.module.graph.find_nodes(op="placeholder"), piece.arguments(), strict=True):
            values[place] = tensor
        for op in piece.ops:
            args, kwargs = torch.fx.node.map_arg((op.args, dict(op.kwargs)), values.__getitem__)
            is_cast = is_cast or torch.float32 in (*args, *kwargs.values())
            called: Any = op.target
            values[op] = pytree.tree_map(
                coarse, called(*pytree.tree_map(coarse, args), **pytree.tree_map(coarse, kwargs))
            )
        (end,) = piece.module.graph.output_node().all_input_nodes
    except FAILS:
        return None
    made = values[end]
    return made.double() if is_cast and isinstance(made, torch.Tensor) else None
