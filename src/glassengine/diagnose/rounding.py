"""What rounding does to each op: which ops round at all, and how much noise a Monte-Carlo run adds.

Noise is uniform in [-u, u] relative to the result, plus the accumulation error of sums: sqrt(K / 6) u_acc sqrt(x^2 W^2)
for products over K terms (the probabilistic bound of Higham and Mary); without that term 5-40 % of legitimate float32
runs looked wrong in the study behind this design. u_acc is float32's: lower accumulation must show as an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from glassengine.program.naming import MATRIX_PRODUCTS, op_name
from glassengine.program.outputs import is_view

U_ACCUMULATE = 2.0**-24

# Ops that move or select values without rounding them; views are recognised by their schema.
_EXACT = frozenset(
    [
        "_unsafe_view",
        "abs",
        "alias",
        "arange",
        "bitwise_not",
        "cat",
        "clone",
        "constant_pad_nd",
        "contiguous",
        "copy",
        "embedding",
        "empty",
        "expand_copy",
        "flip",
        "full",
        "full_like",
        "gather",
        "getitem",
        "index",
        "index_copy",
        "index_put",
        "index_select",
        "lift_fresh_copy",
        "masked_fill",
        "masked_scatter",
        "max",
        "maximum",
        "min",
        "minimum",
        "neg",
        "new_empty",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones",
        "ones_like",
        "pad",
        "relu",
        "repeat",
        "repeat_interleave",
        "roll",
        "scalar_tensor",
        "scatter",
        "select_scatter",
        "sign",
        "slice_scatter",
        "sort",
        "stack",
        "topk",
        "tril",
        "triu",
        "unfold",
        "where",
        "zeros",
        "zeros_like",
    ]
)
_SUMS = frozenset({"mean", "sum", "var", "std", "cumsum", "norm", "linalg_vector_norm", "logsumexp"})


def rounds(node: Node) -> bool:
    """Whether the op of `node` rounds its result."""
    if is_view(node) or op_name(node) in _EXACT:
        return False
    if op_name(node) in ("_to_copy", "to", "convert_element_type"):
        source = node.args[0].meta["val"].dtype  # type: ignore[union-attr]
        target = node.meta["val"].dtype
        wide = source.is_floating_point and torch.finfo(source).bits <= torch.finfo(target).bits
        return not wide and source.is_floating_point
    return True


def noisy(
    node: Node, value: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], u: float, generator: torch.Generator
) -> torch.Tensor:
    """Return `value` (float64, the exact result of `node` for `args`) with one sample of legal rounding.

    Args:
        node: The op.
        value: Its float64 result.
        args: The float64 arguments it was computed from.
        kwargs: Its keyword arguments, likewise.
        u: Unit roundoff of the dtype in which the op rounds its result.
        generator: Source of the noise.
    """
    scale = u * value.abs()
    accumulated = _accumulation(op_name(node), args, kwargs, u)
    if accumulated is not None:
        scale = scale + accumulated
    unit = torch.rand(value.shape, generator=generator, dtype=torch.float32).double() * 2 - 1
    disturbed = value + scale * unit
    return torch.where(value.isfinite(), disturbed, value)


def _accumulation(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], u: float) -> Any:
    """Half-width of uniform noise for the internal sums of an op (broadcasts against its result), None without sums."""
    if op in MATRIX_PRODUCTS:
        left, right = (args[1], args[2]) if op in ("addmm", "baddbmm") else (args[0], args[1])
        squares = left.square() @ (right.square().transpose(-1, -2) if op == "linear" else right.square())
        terms: int = left.shape[-1]
        # A uniform variable on [-a, a] has standard deviation a / sqrt(3).
        return squares.sqrt() * (3.0 * terms / 6.0) ** 0.5 * U_ACCUMULATE
    if op == "convolution":
        weight = args[1]
        squares = torch.ops.aten.convolution.default(args[0].square(), weight.square(), None, *args[3:])
        return (weight[0].numel() / 2.0) ** 0.5 * U_ACCUMULATE * squares.sqrt()
    if op == "scaled_dot_product_attention":
        return _attention(args, kwargs, u)
    if op in _SUMS:
        source = args[0]
        terms = max(1, source.numel())
        return torch.tensor(min(terms, 1 << 16) ** 0.5 * U_ACCUMULATE) * source.abs().mean()
    return None


def _attention(args: tuple[Any, ...], kwargs: dict[str, Any], u: float) -> Any:
    """Scores are sums over D, probabilities are rounded (to the input dtype by fused kernels), contexts sum over T."""
    query, key, value = args[:3]
    size, length = query.shape[-1], key.shape[-2]
    scale = kwargs.get("scale") or size**-0.5
    spread = query.square().sum(-1, keepdim=True).amax().sqrt() * key.square().sum(-1).amax().sqrt()
    score_error = size**0.5 * U_ACCUMULATE * scale * float(spread)
    weight = torch.ops.aten.scaled_dot_product_attention.default(*args[:2], value.abs(), *args[3:], **kwargs)
    share = score_error + 2 * U_ACCUMULATE + length**0.5 * U_ACCUMULATE + u / max(1.0, length**0.5)
    return share * weight
