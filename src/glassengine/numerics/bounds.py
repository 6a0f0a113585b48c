"""How far one op can legally be from its float64 result: an element-wise first-order rounding bound per class of op.

    P      the op in float64 on the candidate's own inputs
    u      unit roundoff of the dtype in which the op rounds its result
    u_in   unit roundoff of inputs that a fused kernel may have used unrounded, as registers, while the dump is rounded
    u_w    unit roundoff of weights that the candidate holds in a coarser dtype than the baseline
    U      unit roundoff of internal sums (float32 accumulation, unless less is declared for products)

    moves          1.3 (u |P| + u_in |P|')                            selection, layout, casts (1: half an ulp)
    pointwise      (2u + 4U) |P| + sum_i |dP/dx_i| u_in |x_i|'        derivatives by automatic differentiation;
                                                                      4u for activations of several steps; 12U more for
                                                                      functions that are often fitted to an absolute
                                                                      error (erf) where the kernels are not known
    sums           2u |P| + 4 sqrt(K) U A + u_in A'                   A: the op on absolute values, K: terms of one sum
    products       2u (|P| + |b|) + 4 sqrt(K) U A + 4 max(u_w, u_in) sqrt(A2')
                   A2: the op on squares; b: bias or added operand, before which the product may be rounded
    steps          1.3u |P| + the larger jump of P when x moves by (u_in + u_w) |x|'
    softmax        P (2u + 8U (1 + max|x|) + 2 u_in max|x|')
    normalization  2u (|P| + |b|) + |w| (2 sqrt(n) U (m / sigma + |z| s^2 / 2 sigma^2) + 2 u_in |z|' (1 + s / sigma)
                   + 4U |z|) with m = mean|x|, s = rms(x), |z| = (|x| + m) / sigma
    attention      composed of scores, softmax and context, see `attention`

A dash: of inputs near zero, whose rounding is absolute, at least the size that makes u_in times it so large; and 4 tiny
are added to each bound, for the result (float16 has numbers near zero below 6e-5).

What the kernels of a runtime are known to be off by is added (see `kernels`).

sqrt(K) instead of K is the probabilistic bound of Higham and Mary (2019). `docs/numerics.md` has what the constants
were measured on: bound and measured floor together raised no false alarm in 224 legitimate runs. An op of no
class has no bound: it is at most suspicious.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from glassengine.numerics import composite_bounds as composite
from glassengine.numerics.kernels import assumed
from glassengine.numerics.mask_values import size_but_hidden
from glassengine.numerics.ops import U_ACCUMULATE, Operation, Roundoff
from glassengine.ops.row import Rounding
from glassengine.ops.traits import named


def rounding_bound(operation: Operation, roundoff: Roundoff) -> Tensor | None:
    """Return the largest legal distance of each element of a candidate's result, or None for an op of no class."""
    traits, size = operation.traits, operation.exact.abs()
    u, u_in = roundoff.u, roundoff.u_in
    bound: Tensor | None
    if traits.moves or traits.casts:
        # What is selected by size may be a neighbor of the largest.
        selects = traits.choice is not None and traits.choice.values
        largest = torch.maximum(operation.on(size_but_hidden).abs(), size) if selects else size
        bound = 1.3 * (u * largest + u_in * roundoff.size_in(largest))
    elif traits.rounding is Rounding.POINTWISE:
        # Activations may be written out: a product of a rounded sigmoid, say.
        roundings = 4 if traits.relative_to_argument else 2
        inputs = max(u_in, roundoff.u_w, u if traits.several_steps else 0.0)
        bound = (roundings * u + 4 * U_ACCUMULATE) * size + _carried(operation, roundoff, inputs)
    elif traits.rounding is Rounding.SUMS:
        bound = 2 * u * size + 4 * math.sqrt(operation.num_terms) * U_ACCUMULATE * operation.on(torch.abs).abs()
        if u_in:
            bound = bound + u_in * operation.on(roundoff.size_in).abs()
    elif traits.multiplies:
        absolute = operation.on(torch.abs).abs()
        bound = 2 * u * (size + _addend(operation)) + 4 * math.sqrt(operation.num_terms) * roundoff.u_sums * absolute
        rounded = max(roundoff.u_w, u_in)
        if rounded:
            bound = bound + 4 * rounded * operation.on(lambda x: roundoff.size_in(x).square()).abs().sqrt()
    elif traits.rounding is Rounding.STEPS:
        by = u_in + roundoff.u_w
        down = operation.on(lambda x: x - by * roundoff.size_in(x))
        up = operation.on(lambda x: x + by * roundoff.size_in(x))
        bound = 1.3 * u * size + torch.maximum((down - operation.exact).abs(), (up - operation.exact).abs())
    else:
        special = _SPECIAL.get(operation.name)
        bound = special(operation, roundoff) if special is not None else None
    kernel = assumed(operation.name) if roundoff.kernel is None else roundoff.kernel
    if bound is not None and kernel is not None:
        bound = bound + kernel.allowed(size)
    return None if bound is None else bound + 4 * roundoff.tiny


_BOUNDED = frozenset(Rounding) - {Rounding.UNKNOWN, Rounding.UNBOUNDED, Rounding.EXACT, Rounding.COUNTS}


def has_bound(name: str) -> bool:
    """Whether the class of the op `name` has a rounding bound."""
    return named(name).rounding in _BOUNDED


def _addend(operation: Operation) -> Tensor | float:
    """What is added to the product: |bias| of a linear layer or convolution, |input| of addmm and its like."""
    args, place = operation.args, operation.traits.addend
    if place is None:
        return 0.0
    added = args[place] if len(args) > place else operation.kwargs.get("bias")
    if not isinstance(added, Tensor):
        return 0.0
    of_channels = operation.traits.rounding is Rounding.CONVOLUTION
    return added.abs().reshape(-1, *[1] * (operation.exact.dim() - 2)) if of_channels else added.abs()


def _carried(operation: Operation, roundoff: Roundoff, u_in: float) -> Tensor:
    """What errors u_in of the arguments of a pointwise op become in its result, and errors inside of it."""
    leaves, spec = pytree.tree_flatten((operation.args, operation.kwargs))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not where:
        return torch.zeros_like(operation.exact)  # of whole numbers, which have no errors
    wide = [leaves[i].detach().expand(operation.exact.shape).clone().requires_grad_() for i in where]
    for i, leaf in zip(where, wide, strict=True):
        leaves[i] = leaf
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    with torch.enable_grad():
        total = operation.target(*args, **kwargs).sum()
        slopes = torch.autograd.grad(total, wide, allow_unused=True)
    inside = 4 * U_ACCUMULATE if operation.traits.relative_to_argument else 0.0
    carried = torch.zeros_like(operation.exact)
    for leaf, slope in zip(wide, slopes, strict=True):
        size = leaf.detach().abs()
        carried = carried + inside * size
        if slope is not None and u_in:
            # Near its extremes a wave is flat to first order only. At a pole every error is possible.
            steepest = slope.abs().clamp(min=1.0) if operation.traits.is_periodic else slope.abs()
            carried = carried + torch.nan_to_num(
                steepest * roundoff.size_in(size) * u_in, nan=math.inf, posinf=math.inf
            )
    return carried


_SPECIAL: dict[str, Callable[[Operation, Roundoff], Tensor | None]] = {
    "softmax": composite.softmax,
    "_softmax": composite.softmax,
    "_safe_softmax": composite.softmax,
    "log_softmax": composite.log_softmax,
    "_log_softmax": composite.log_softmax,
    "logsumexp": composite.log_softmax,
    "layer_norm": composite.layer_norm,
    "native_layer_norm": composite.layer_norm,
    "rms_norm": composite.rms_norm,
    "group_norm": composite.group_norm,
    "_native_batch_norm_legit_no_training": composite.batch_norm,
    "var": composite.variance,
    "std": composite.variance,
    "norm": composite.norm,
    "linalg_vector_norm": composite.norm,
    "_weight_norm": composite.weight_norm,
    "dequantize": composite.dequantized,
    "prod": composite.product_of_all,
    "cumprod": composite.product_of_all,
    "scaled_dot_product_attention": composite.attention,
}
