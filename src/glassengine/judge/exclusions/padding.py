"""Padding: which elements of a tensor belong to real tokens, and to cache slots that hold one.

The inputs of a step say which positions are padding, and the axes of a site which dimensions are positions. No value is
followed (see `other_values`): a position of padding is left out whatever is computed there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from glassengine.judge.cases import StepInputs
from glassengine.numerics.mask_values import is_mask
from glassengine.program.representation.program import Program
from glassengine.sites import Site


def valid_mask(site: Site, value: torch.Tensor, inputs: StepInputs) -> torch.Tensor | None:
    """Return a bool mask that broadcasts against `value`, or None when every element counts.

    Of a mask every slot counts: it says which slots are seen, and those of padding must not be.

    Args:
        site: Says which dimensions are batch, sequence and cache (or batch and sequence folded into one).
        value: The tensor.
        inputs: Of the step: [B, S] real tokens, [B, T] occupied cache slots.
    """
    tokens, slots = inputs.token_mask, inputs.attention_mask.bool()
    if bool(tokens.all()) and bool(slots.all()):
        return None
    mask: torch.Tensor | None = None
    folded = [i for i, size in enumerate(site.shape) if size in ("batch*sequence", "sequence*batch")]
    if folded:
        mask = _spread(tokens.flatten(), value, folded[0])
    elif tokens.shape[1] == 1 and not bool(tokens.all()) and "batch" in site.axes:
        mask = _spread(tokens[:, 0], value, site.axes["batch"])  # all that a row of padding has
    tables = {"sequence": tokens} if is_mask(value) else {"sequence": tokens, "cache": slots}
    for axis, table in tables.items():
        if axis in site.axes and "batch" in site.axes:
            part = _spread(table, value, site.axes["batch"], site.axes[axis])
            mask = part if mask is None else mask & part
    return mask


def _spread(table: torch.Tensor, value: torch.Tensor, *axes: int) -> torch.Tensor:
    """Reshape `table` so that its dimensions lie at `axes` of `value` (in any order)."""
    order = sorted(range(len(axes)), key=lambda i: axes[i])
    shape = [1] * value.dim()
    for axis in axes:
        shape[axis] = value.shape[axis]
    return table.permute(order).reshape(shape)


def valid_in_step(
    program: Program, inputs: StepInputs | Mapping[str, Any], node: torch.fx.Node, value: torch.Tensor
) -> torch.Tensor | None:
    """Return which elements of the value of a node are no padding in a step; None where all are real."""
    if not isinstance(inputs, StepInputs):
        return None
    return valid_mask(program.sites.by_node[node.name][0], value, inputs)


def completed(tensor: torch.Tensor, native: torch.Tensor, cache_axis: int | None, num_seen: int) -> torch.Tensor:
    """Return a candidate's cache in the length of the baseline's, with the baseline's values in slots that it lacks.

    A cache that grows is shorter than the static one, and one that slides holds the newest slots only. Only slots that
    both have are compared: in the others the result equals the baseline. A tensor of another shape is returned as is.

    Args:
        tensor: The candidate's.
        native: The baseline's, in its own dtype.
        cache_axis: Axis of the slots; None for other tensors.
        num_seen: Slots of the baseline's cache that hold a token.
    """
    axis = cache_axis
    if axis is None or tensor.dim() != native.dim() or tensor.shape[axis] >= native.shape[axis]:
        return tensor
    if any(tensor.shape[i] != native.shape[i] for i in range(native.dim()) if i != axis):
        return tensor
    start = max(0, num_seen - tensor.shape[axis])
    whole = native.to(tensor.dtype, copy=True)
    whole.narrow(axis, start, tensor.shape[axis]).copy_(tensor)
    return whole
