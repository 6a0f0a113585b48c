"""How far one op can legally be from its float64 result: an element-wise first-order rounding bound per class of op.

    P      the op in float64 on the candidate's own inputs
    u      unit roundoff of the dtype in which the op rounds its result
    u_in   unit roundoff of inputs that a fused kernel may have used unrounded, as registers, while the dump is rounded
    u_w    unit roundoff of weights that the candidate holds in a coarser dtype than the baseline
    U      unit roundoff of internal sums (float32 accumulation)

    moves          (u + u_in) |P|                                     selection, layout, casts
    pointwise      (2u + 4U) |P| + sum_i |dP/dx_i| u_in |x_i|         derivatives by automatic differentiation
    sums           2u |P| + (4 sqrt(K) U + u_in) A                    A: the op on absolute values, K: terms of one sum
    products       2u |P| + 4 sqrt(K) U A + 4 u_w sqrt(A2)            A2: the op on squares; operands come from memory
    softmax        P (2u + 8U (1 + max|x|) + 2 u_in max|x|)
    normalisation  2u (|P| + |b|) + (8 sqrt(n) U + 2 u_in) |w| (|x| + mean|x| + |z| rms(x)) / sigma, z = (x - mean) / sigma
    attention      composed of scores, softmax and context, see `_attention`

sqrt(K) instead of K is the probabilistic bound of Higham and Mary (2019). The constants are those of the numerics study
behind this design, where bound and measured floor together raised no false alarm in 224 legitimate runs. An op of no
class has no bound: it is at most suspicious.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

U_ACCUMULATE = 2.0**-24

MOVES = frozenset(
    """_unsafe_view abs adaptive_max_pool2d alias amax amin arange as_strided broadcast_to cat chunk clamp clamp_max
    clamp_min clone constant_pad_nd contiguous copy cummax cummin detach diagonal embedding empty expand expand_as
    expand_copy flatten flip full full_like gather getitem hardtanh index index_copy index_put index_select
    lift_fresh_copy masked_fill masked_scatter max max_pool1d max_pool2d max_pool2d_with_indices max_pool3d maximum min
    minimum movedim narrow neg new_empty new_full new_ones new_zeros ones ones_like pad permute pixel_shuffle
    pixel_unshuffle reflection_pad1d reflection_pad2d relu relu6 repeat repeat_interleave replication_pad1d
    replication_pad2d reshape roll scalar_tensor scatter select select_scatter sign slice slice_scatter sort split
    split_with_sizes squeeze stack swapaxes t threshold tile topk transpose tril triu unbind unflatten unfold
    unsafe_split unsqueeze view view_as where zeros zeros_like""".split()
)
"""Ops that move or select values without arithmetic."""

CASTS = frozenset({"_to_copy", "convert_element_type", "to", "type_as"})
PRODUCTS = frozenset("addbmm addmm addmv baddbmm bmm dot einsum linear matmul mm mv".split())
CONVOLUTIONS = frozenset(
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution".split()
)
SUMS = frozenset(
    """_adaptive_avg_pool2d _upsample_bicubic2d_aa _upsample_bilinear2d_aa adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d cumsum diff index_add mean scatter_add sum trace
    upsample_bicubic2d upsample_bilinear2d upsample_nearest2d""".split()
)
POINTWISE = frozenset(
    """acos add addcdiv addcmul asin atan atan2 celu cos cosh div elu erf erfc exp exp2 expm1 fmod gelu hardshrink
    hardsigmoid hardswish hypot leaky_relu lerp log log10 log1p log2 log_sigmoid logit mish mul pow prelu reciprocal
    remainder rsqrt rsub selu sigmoid silu sin sinh softplus softshrink softsign special_erf special_expit sqrt square
    sub tan tanh tanhshrink true_divide xlogy""".split()
)
RANDOM = frozenset(
    """bernoulli dropout native_dropout multinomial normal poisson rand rand_like randint randint_like randn randn_like
    randperm rrelu uniform exponential""".split()
)
"""Ops whose result is drawn anew: never judged."""

# Inside of these, errors are relative to the argument, not to the result: 1 + tanh and 1 + erf cancel, and arguments
# of sines are reduced.
_RELATIVE_TO_ARGUMENT = frozenset("celu cos elu erfc expm1 gelu log1p mish selu silu sin softplus tan tanhshrink".split())
_LARGEST = frozenset("amax amin cummax cummin max min sort topk".split())


@dataclass(frozen=True)
class Roundoff:
    """Unit roundoffs of one op (see the module) and `tiny`, below which its result has no relative precision."""

    u: float
    u_in: float = 0.0
    u_w: float = 0.0
    tiny: float = 0.0


@dataclass(frozen=True)
class Operation:
    """One op in float64: ATen base name, what computes it, arguments and result."""

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    exact: Tensor

    def on(self, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the result of the op on floating arguments changed by `change`; numbers stay."""

        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) and value.is_floating_point() else value

        args, kwargs = pytree.tree_map(changed, (self.args, self.kwargs))
        found = self.target(*args, **kwargs)
        result: Tensor = found[0] if isinstance(found, (tuple, list)) else found
        return result


def rounding_bound(operation: Operation, roundoff: Roundoff) -> Tensor | None:
    """Return the largest legal distance of each element of a candidate's result, or None for an op of no class."""
    name, size = operation.name, operation.exact.abs()
    u, u_in = roundoff.u, roundoff.u_in
    bound: Tensor | None
    if name in MOVES or name in CASTS:
        # What is selected by size may be a neighbour of the largest.
        bound = (u + u_in) * (torch.maximum(operation.on(torch.abs).abs(), size) if name in _LARGEST else size)
    elif name in POINTWISE:
        bound = (2 * u + 4 * U_ACCUMULATE) * size + _carried(operation, u_in)
    elif name in SUMS:
        absolute = operation.on(torch.abs).abs()
        bound = 2 * u * size + (4 * math.sqrt(_terms(operation)) * U_ACCUMULATE + u_in) * absolute
    elif name in PRODUCTS or name in CONVOLUTIONS:
        absolute = operation.on(torch.abs).abs()
        bound = 2 * u * size + 4 * math.sqrt(_terms(operation)) * U_ACCUMULATE * absolute
        if roundoff.u_w:
            bound = bound + 4 * roundoff.u_w * operation.on(torch.square).abs().sqrt()
    else:
        special = _SPECIAL.get(name)
        bound = special(operation, roundoff) if special is not None else None
    return None if bound is None else bound + 4 * roundoff.tiny


def _terms(operation: Operation) -> int:
    """Number of terms of one sum of the op."""
    tensors = [leaf for leaf in pytree.tree_leaves(operation.args) if isinstance(leaf, Tensor)]
    if operation.name in ("addmm", "baddbmm", "addbmm", "addmv"):
        return max(1, tensors[1].shape[-1])
    if operation.name in CONVOLUTIONS:
        return max(1, tensors[1][0].numel())
    if operation.name in PRODUCTS:
        return max(1, tensors[0].shape[-1] if operation.name != "einsum" else tensors[0].numel())
    if operation.name == "cumsum":
        return max(1, tensors[0].numel())
    # Overlapping windows (pooling, resampling) hold more terms than the ratio of the sizes, but never many.
    return max(16, tensors[0].numel() // max(1, operation.exact.numel()))


def _carried(operation: Operation, u_in: float) -> Tensor:
    """What relative errors u_in of the arguments of a pointwise op become in its result, and errors inside of it."""
    leaves, spec = pytree.tree_flatten((operation.args, operation.kwargs))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    wide = [leaves[i].detach().expand(operation.exact.shape).clone().requires_grad_() for i in where]
    for i, leaf in zip(where, wide, strict=True):
        leaves[i] = leaf
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    with torch.enable_grad():
        total = operation.target(*args, **kwargs).sum()
        slopes = torch.autograd.grad(total, wide, allow_unused=True)
    inside = 4 * U_ACCUMULATE if operation.name in _RELATIVE_TO_ARGUMENT else 0.0
    carried = torch.zeros_like(operation.exact)
    for leaf, slope in zip(wide, slopes, strict=True):
        size = leaf.detach().abs()
        carried = carried + inside * size
        if slope is not None and u_in:
            # At a pole every error is possible.
            carried = carried + torch.nan_to_num(slope.abs() * size * u_in, nan=math.inf, posinf=math.inf)
    return carried


def _softmax(operation: Operation, roundoff: Roundoff) -> Tensor:
    x, dim = operation.args[0], operation.args[1]
    probability = operation.exact
    # Masked entries have no probability, and their huge scores no influence.
    largest = torch.where(probability > 0, x.abs(), 0.0).amax(dim, keepdim=True)
    return probability * (
        2 * roundoff.u + 8 * U_ACCUMULATE * (1 + largest) + 2 * roundoff.u_in * largest
    )


def _log_softmax(operation: Operation, roundoff: Roundoff) -> Tensor:
    x, dim = operation.args[0], operation.args[1]
    keep = operation.exact.dim() == x.dim()
    largest = torch.where(x.isfinite(), x.abs(), 0.0).amax(dim, keepdim=keep)
    return 2 * roundoff.u * operation.exact.abs() + 8 * U_ACCUMULATE * (1 + largest) + 2 * roundoff.u_in * largest


def _normalised(x: Tensor, dims: list[int], sigma: Tensor, w: Tensor, b: Tensor, exact: Tensor, r: Roundoff) -> Tensor:
    """Bound of w (x - mean) / sigma + b with statistics over `dims`."""
    n = math.prod(x.shape[d] for d in dims)
    rms = x.square().mean(dims, keepdim=True).sqrt()
    mean = x.abs().mean(dims, keepdim=True)
    z = (x.abs() + mean) / sigma
    spread = (x.abs() + mean + z * rms) / sigma
    return 2 * r.u * (exact.abs() + b.abs()) + (8 * math.sqrt(n) * U_ACCUMULATE + 2 * r.u_in) * w.abs() * spread


def _argument(operation: Operation, index: int, name: str, default: Any) -> Any:
    value = operation.args[index] if len(operation.args) > index else operation.kwargs.get(name)
    return default if value is None else value


def _layer_norm(operation: Operation, r: Roundoff) -> Tensor:
    x, shape = operation.args[:2]
    one, zero = x.new_ones(()), x.new_zeros(())
    w, b = _argument(operation, 2, "weight", one), _argument(operation, 3, "bias", zero)
    dims = list(range(x.dim() - len(shape), x.dim()))
    sigma = (x.var(dims, correction=0, keepdim=True) + _argument(operation, 4, "eps", 1e-5)).sqrt()
    return _normalised(x, dims, sigma, w, b, operation.exact, r)


def _rms_norm(operation: Operation, r: Roundoff) -> Tensor:
    x, shape = operation.args[:2]
    w = _argument(operation, 2, "weight", x.new_ones(()))
    dims = list(range(x.dim() - len(shape), x.dim()))
    sigma = (x.square().mean(dims, keepdim=True) + _argument(operation, 3, "eps", 0.0)).sqrt()
    return _normalised(x, dims, sigma, w, x.new_zeros(()), operation.exact, r)


def _group_norm(operation: Operation, r: Roundoff) -> Tensor:
    x, groups = operation.args[:2]
    channel = [1, x.shape[1], *[1] * (x.dim() - 2)]
    w = _argument(operation, 2, "weight", x.new_ones(x.shape[1])).reshape(channel)
    b = _argument(operation, 3, "bias", x.new_zeros(x.shape[1])).reshape(channel)
    grouped = x.reshape(x.shape[0], groups, -1)
    sigma = (grouped.var(-1, correction=0, keepdim=True) + _argument(operation, 4, "eps", 1e-5)).sqrt()
    parts = [part.expand(x.shape).reshape(grouped.shape) for part in (w, b, operation.exact)]
    return _normalised(grouped, [2], sigma, *parts, r).reshape(x.shape)


def _batch_norm(operation: Operation, r: Roundoff) -> Tensor:
    """Evaluation mode: the statistics are weights."""
    x = operation.args[0]
    mean, var, eps = operation.args[3], operation.args[4], operation.args[-1]
    channel = [1, x.shape[1], *[1] * (x.dim() - 2)]
    one, zero = x.new_ones(x.shape[1]), x.new_zeros(x.shape[1])
    w, b, mean, var = (
        (default if value is None else value).reshape(channel)
        for value, default in ((operation.args[1], one), (operation.args[2], zero), (mean, zero), (var, one))
    )
    spread = w.abs() * (x.abs() + mean.abs()) / (var + eps).sqrt()
    return 2 * r.u * (operation.exact.abs() + b.abs()) + (8 * U_ACCUMULATE + r.u_in + r.u_w) * (spread + b.abs())


def _variance(operation: Operation, r: Roundoff) -> Tensor | None:
    """sum |x - m| |x| is at most n sqrt(var) rms(x)."""
    x, dims = operation.args[0], operation.args[1] if len(operation.args) > 1 else operation.kwargs.get("dim")
    if isinstance(dims, bool):
        return None
    dims = list(range(x.dim())) if dims is None else dims
    keep = operation.exact.dim() == x.dim()
    rms = x.square().mean(dims, keepdim=keep).sqrt()
    n = max(1, x.numel() // max(1, operation.exact.numel()))
    inner = 8 * math.sqrt(n) * U_ACCUMULATE + 2 * r.u_in
    size = operation.exact
    return 4 * r.u * size + inner * rms * (size.sqrt() if operation.name == "var" else 1.0)


def _norm(operation: Operation, r: Roundoff) -> Tensor:
    """All terms are positive, so errors are relative."""
    n = max(1, operation.args[0].numel() // max(1, operation.exact.numel()))
    return operation.exact.abs() * (4 * r.u + 4 * math.sqrt(n) * U_ACCUMULATE + 2 * r.u_in)


def _product_of_all(operation: Operation, r: Roundoff) -> Tensor:
    n = max(1, operation.args[0].numel() // max(1, operation.exact.numel()))
    return operation.exact.abs() * (2 * r.u + 2 * n * (U_ACCUMULATE + r.u_in))


def _attention(operation: Operation, r: Roundoff) -> Tensor:
    """Scores s (sums over D, rounded where they are stored), probabilities p, context (sums over T).

        es  = 4 sqrt(D) U scale |q||k|' + 1.5 max(u, U) |s|, 0 where p = 0
        rel = es + sum(p es) + 2 max(u, U) + 8 U (1 + max|s|)
        B   = (p rel) |v| + 4 sqrt(T) U (p |v|) + 2u |P|

    q [B, H, S, D], k [B, G, T, D], v [B, G, T, Dv], float64.
    """
    parts = attention_parts(operation.args, operation.kwargs)
    q, k, v, scores, p, scale = parts
    wide = max(r.u, U_ACCUMULATE)
    live = p > 0
    size = torch.where(live, scores.abs(), 0.0)
    products = 4 * math.sqrt(q.shape[-1]) * U_ACCUMULATE * scale * (q.abs() @ k.abs().mT)
    error = torch.where(live, products + 1.5 * wide * size, 0.0)
    relative = error + (p * error).sum(-1, keepdim=True) + 2 * wide
    relative = relative + 8 * U_ACCUMULATE * (1 + size.amax(-1, keepdim=True))
    context = (p * relative) @ v.abs() + 4 * math.sqrt(k.shape[-2]) * U_ACCUMULATE * (p @ v.abs())
    return context + 2 * r.u * operation.exact.abs()


def attention_parts(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    """Return (q, k, v, scores with mask, probabilities, scale) of an attention, heads of k and v repeated for q's.

    A row that may see nothing has probability 0 everywhere, as in torch.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    q, k, v, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    scale = given.get("scale") or q.shape[-1] ** -0.5
    if k.shape[-3] != q.shape[-3]:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q @ k.mT * scale
    if given.get("is_causal"):
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    return q, k, v, scores, scores.softmax(-1).nan_to_num(0.0), float(scale)


_SPECIAL: dict[str, Callable[[Operation, Roundoff], Tensor | None]] = {
    "softmax": _softmax,
    "_softmax": _softmax,
    "log_softmax": _log_softmax,
    "_log_softmax": _log_softmax,
    "logsumexp": _log_softmax,
    "layer_norm": _layer_norm,
    "native_layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "var": _variance,
    "std": _variance,
    "norm": _norm,
    "linalg_vector_norm": _norm,
    "prod": _product_of_all,
    "cumprod": _product_of_all,
    "scaled_dot_product_attention": _attention,
}
