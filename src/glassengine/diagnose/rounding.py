"""What rounding does to each op: which ops round at all, and how much noise a Monte-Carlo run adds.

Noise is uniform in [-u, u] relative to the result, plus the accumulation error of sums: sqrt(K / 6) u_acc sqrt(x^2 W^2)
for products over K terms (the probabilistic bound of Higham and Mary); without that term 5-40 % of legitimate float32
runs looked wrong in the study behind this design. u_acc is float32's, unless less is
declared: lower accumulation must show as an error.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.compare.operation import (
    ATTENTION,
    CASTS,
    CONVOLUTIONS,
    FLOAT32_SUMS,
    MOVES,
    PRODUCTS,
    SUMS,
    U_ACCUMULATE,
    Accumulation,
    num_terms,
)
from glassengine.diagnose.float64 import target_of
from glassengine.program.naming import op_name
from glassengine.program.outputs import is_view

_ROOTS = frozenset({"var", "std", "norm", "linalg_vector_norm", "logsumexp"})


def rounds(node: Node) -> bool:
    """Whether the op of `node` rounds its result."""
    if is_view(node) or op_name(node) in MOVES:
        return False
    if op_name(node) in CASTS:
        source = node.args[0].meta["val"].dtype  # type: ignore[union-attr]
        target = node.meta["val"].dtype
        floating: bool = source.is_floating_point and target.is_floating_point
        return floating and torch.finfo(source).bits > torch.finfo(target).bits
    return True


def noisy(
    node: Node,
    value: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    u: float,
    generator: torch.Generator,
    accumulation: Accumulation = FLOAT32_SUMS,
) -> torch.Tensor:
    """Return `value` (float64, the exact result of `node` for `args`) with one sample of legal rounding.

    Args:
        node: The op.
        value: Its float64 result.
        args: The float64 arguments it was computed from.
        kwargs: Its keyword arguments, likewise.
        u: Unit roundoff of the dtype in which the op rounds its result.
        generator: Source of the noise.
        accumulation: Of products.
    """
    scale = u * value.abs()
    accumulated = _accumulation(node, value, args, kwargs, u, accumulation)
    if accumulated is not None:
        scale += accumulated
    unit = torch.rand(value.shape, generator=generator, dtype=torch.float32).mul_(2).sub_(1)
    disturbed = scale.mul_(unit).add_(value)
    is_finite = not value.numel() or bool(disturbed.abs().amax() < math.inf)
    return disturbed if is_finite else torch.where(value.isfinite(), disturbed, value)


def _accumulation(
    node: Node, value: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], u: float, how: Accumulation
) -> torch.Tensor | None:
    """Half-width of uniform noise for the internal sums of an op (broadcasts against its result), None without sums."""
    op, call = op_name(node), target_of(node)
    if op in PRODUCTS or op in CONVOLUTIONS:
        # The added operand of addmm and the bias of linear and convolutions are rounded once, not summed up.
        left, right, *rest = (
            (args[0] * 0, *args[1:]) if op.startswith(("add", "badd")) else (*args[:2], None, *args[3:])
        )
        operands = (left, right, *rest)[: len(args)]
        named = {name: None if name == "bias" else option for name, option in kwargs.items()}
        squares: torch.Tensor = call(*pytree.tree_map(_squared, operands), **named).double()
        if not bool(squares.isfinite().all()):
            squares = call(*pytree.tree_map(_squared_wide, operands), **named)
        # A uniform variable on [-a, a] has standard deviation a / sqrt(3).
        share = math.sqrt(3.0 * num_terms(op, args, value) / 6.0) * how.u_sums + 2 * how.u_operands
        return squares.abs().sqrt() * share
    if op == ATTENTION:
        return _attention(args, kwargs, max(u, how.u_operands), how.u_sums)
    if op in SUMS or op in _ROOTS:
        absolute: torch.Tensor = call(*pytree.tree_map(_absolute, args), **kwargs).abs()
        return absolute * math.sqrt(min(num_terms(op, args, value), 1 << 16)) * U_ACCUMULATE
    return None


def _squared(value: Any) -> Any:
    """The size of noise needs no float64, which takes twice the time."""
    return value.float().square() if isinstance(value, torch.Tensor) else value


def _squared_wide(value: Any) -> Any:
    return value.square() if isinstance(value, torch.Tensor) else value


def _absolute(value: Any) -> Any:
    return value.abs() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _attention(args: tuple[Any, ...], kwargs: dict[str, Any], u: float, u_sums: float) -> torch.Tensor:
    """Scores are sums over D, probabilities are rounded (to the input dtype by fused kernels), contexts sum over T."""
    query, key, value = args[:3]
    size, length = query.shape[-1], key.shape[-2]
    scale = kwargs.get("scale") or size**-0.5
    spread = query.square().sum(-1, keepdim=True).amax().sqrt() * key.square().sum(-1).amax().sqrt()
    score_error = size**0.5 * u_sums * scale * float(spread)
    weight = torch.ops.aten.scaled_dot_product_attention.default(*args[:2], value.abs(), *args[3:], **kwargs)
    share = score_error + 2 * U_ACCUMULATE + length**0.5 * u_sums + u / max(1.0, length**0.5)
    noise: torch.Tensor = weight * share
    return noise
