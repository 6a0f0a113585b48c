"""Bounds the legal distance of one op from its float64 result: element-wise, first order, one rule per class of op.

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
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from glassengine.numerics.float64 import U_ACCUMULATE, Operation, Roundoff
from glassengine.numerics.kernels import assumed
from glassengine.numerics.mask_values import size_but_hidden
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
        bound = size.mul(roundings * u + 4 * U_ACCUMULATE).add_(_carried(operation, roundoff, inputs))
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
    return None if bound is None else bound.add_(4 * roundoff.tiny)


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
    target, given = operation.target, (operation.args, operation.kwargs)
    if (
        operation.name == "prelu"
    ):  # its slopes are those of channels, which do not broadcast to the result by themselves
        x, slope = operation.args
        target, given = _prelu, ((x, slope.reshape(-1, *[1] * (x.dim() - 2))), {})
    leaves, spec = pytree.tree_flatten(given)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not where:
        return torch.zeros_like(operation.exact)  # of whole numbers, which have no errors
    inside = 4 * U_ACCUMULATE if operation.traits.relative_to_argument else 0.0
    if not u_in:
        sizes = [leaves[i].detach().abs().mul_(inside) for i in where if inside]
        return sum(sizes[1:], sizes[0]) if sizes else operation.exact.new_zeros(())
    wide = [leaves[i].detach().expand(operation.exact.shape).clone().requires_grad_() for i in where]
    for i, leaf in zip(where, wide, strict=True):
        leaves[i] = leaf
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    with torch.enable_grad():
        total = target(*args, **kwargs).sum()
        slopes = torch.autograd.grad(total, wide, allow_unused=True)
    carried = torch.zeros_like(operation.exact)
    for leaf, slope in zip(wide, slopes, strict=True):
        size = leaf.detach().abs()
        carried = carried + inside * size
        if slope is not None:
            # Near its extremes a wave is flat to first order only. At a pole every error is possible.
            steepest = slope.abs().clamp(min=1.0) if operation.traits.is_periodic else slope.abs()
            carried = carried + torch.nan_to_num(
                steepest * roundoff.size_in(size) * u_in, nan=math.inf, posinf=math.inf
            )
    return carried


def _prelu(x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x > 0, x, slope * x)


def softmax(operation: Operation, roundoff: Roundoff) -> Tensor:
    """P (2u + 8U (1 + max|x|) + 2 u_in max|x|')."""
    x, dim = operation.args[0], operation.args[1]
    probability = operation.exact
    # Masked entries have no probability, and their huge scores no influence.
    largest = torch.where(probability > 0, x.abs(), 0.0).amax(dim, keepdim=True)
    return probability * (
        2 * roundoff.u + 8 * U_ACCUMULATE * (1 + largest) + 2 * roundoff.u_in * roundoff.size_in(largest)
    )


def log_softmax(operation: Operation, roundoff: Roundoff) -> Tensor:
    """2u |P| + (4u + 8U) (1 + max|x|) + 2 u_in max|x|': kernels round max + log(sum) to u. logsumexp likewise."""
    x, dim = operation.args[0], operation.args[1]
    keep = operation.exact.dim() == x.dim()
    largest = torch.where(x.isfinite(), x.abs(), 0.0).amax(dim, keepdim=keep)
    inner = (4 * roundoff.u + 8 * U_ACCUMULATE) * (1 + largest) + 2 * roundoff.u_in * roundoff.size_in(largest)
    return 2 * roundoff.u * operation.exact.abs() + inner


def _normalized(x: Tensor, dims: list[int], sigma: Tensor, w: Tensor, b: Tensor, exact: Tensor, r: Roundoff) -> Tensor:
    """Bound of w (x - mean) / sigma + b with statistics over `dims`.

    The variance may be taken as mean(x^2) - mean^2, whose rounding grows with mean(x^2) / sigma^2.
    """
    n = math.prod(x.shape[d] for d in dims)
    square = torch.linalg.vector_norm(x, dim=dims, keepdim=True).square() / n
    mean = torch.linalg.vector_norm(x, 1, dims, keepdim=True) / n
    of_sums = 2 * math.sqrt(n) * U_ACCUMULATE
    # What is of rows is worked out first: it is small.
    inner = x.abs().add_(mean)
    bound = inner * (r.u_w * r.size_in(w) / sigma) + r.u_w * r.size_in(b) if r.u_w else 0.0
    inner.mul_((0.5 * of_sums * square / sigma.square() + 4 * U_ACCUMULATE) / sigma).add_(of_sums * mean / sigma)
    if r.u_in:
        inner += (r.size_in(x) + r.size_in(mean)) * (2 * r.u_in * (1 + square.sqrt() / sigma) / sigma)
    return exact.abs().add_(b.abs()).mul_(2 * r.u).add_(inner * w.abs()).add_(bound)


def _variance(x: Tensor, dims: list[int]) -> Tensor:
    """Of float64, in two thirds of the time of torch's where few digits cancel."""
    square = torch.linalg.vector_norm(x, dim=dims, keepdim=True).square() / math.prod(x.shape[d] for d in dims)
    found = square - x.mean(dims, keepdim=True).square()
    return x.var(dims, correction=0, keepdim=True) if bool((found < 1e-6 * square).any()) else found


def _argument(operation: Operation, index: int, name: str, default: Any) -> Any:
    value = operation.args[index] if len(operation.args) > index else operation.kwargs.get(name)
    return default if value is None else value


def layer_norm(operation: Operation, r: Roundoff) -> Tensor:
    """Statistics over the last dimensions."""
    x, shape = operation.args[:2]
    one, zero = x.new_ones(()), x.new_zeros(())
    w, b = _argument(operation, 2, "weight", one), _argument(operation, 3, "bias", zero)
    dims = list(range(x.dim() - len(shape), x.dim()))
    sigma = (_variance(x, dims) + _argument(operation, 4, "eps", 1e-5)).sqrt()
    return _normalized(x, dims, sigma, w, b, operation.exact, r)


def rms_norm(operation: Operation, r: Roundoff) -> Tensor:
    """Mean square over the last dimensions; the mean taken as 0 makes the bound of the layer norm one of this."""
    x, shape = operation.args[:2]
    w = _argument(operation, 2, "weight", x.new_ones(()))
    dims = list(range(x.dim() - len(shape), x.dim()))
    sigma = (x.square().mean(dims, keepdim=True) + _argument(operation, 3, "eps", 0.0)).sqrt()
    return _normalized(x, dims, sigma, w, x.new_zeros(()), operation.exact, r)


def group_norm(operation: Operation, r: Roundoff) -> Tensor:
    """Statistics over the channels of a group and all positions."""
    x, groups = operation.args[:2]
    channel = [1, x.shape[1], *[1] * (x.dim() - 2)]
    w = _argument(operation, 2, "weight", x.new_ones(x.shape[1])).reshape(channel)
    b = _argument(operation, 3, "bias", x.new_zeros(x.shape[1])).reshape(channel)
    grouped = x.reshape(x.shape[0], groups, -1)
    sigma = (grouped.var(-1, correction=0, keepdim=True) + _argument(operation, 4, "eps", 1e-5)).sqrt()
    w, b, exact = (part.expand(x.shape).reshape(grouped.shape) for part in (w, b, operation.exact))
    return _normalized(grouped, [2], sigma, w, b, exact, r).reshape(x.shape)


def batch_norm(operation: Operation, r: Roundoff) -> Tensor:
    """Evaluation mode: the statistics are weights."""
    x: Tensor = operation.args[0]
    mean, var, eps = operation.args[3], operation.args[4], operation.args[-1]
    channel = [1, x.shape[1], *[1] * (x.dim() - 2)]
    one, zero = x.new_ones(x.shape[1]), x.new_zeros(x.shape[1])
    w, b, mean, var = (
        (default if value is None else value).reshape(channel)
        for value, default in ((operation.args[1], one), (operation.args[2], zero), (mean, zero), (var, one))
    )
    sigma = (var + eps).sqrt()
    inside = 8 * U_ACCUMULATE * (w.abs() * (x.abs() + mean.abs()) / sigma + b.abs())
    spread = r.size_in(w) * (r.size_in(x) + r.size_in(mean)) / sigma + r.size_in(b)
    bound: Tensor = 2 * r.u * (operation.exact.abs() + b.abs()) + inside + (r.u_in + r.u_w) * spread
    return bound


def variance(operation: Operation, r: Roundoff) -> Tensor | None:
    """The sum of |x - m| |x| is at most n sqrt(var) rms(x)."""
    x, dims = operation.args[0], operation.args[1] if len(operation.args) > 1 else operation.kwargs.get("dim")
    if isinstance(dims, bool):
        return None
    dims = list(range(x.dim())) if dims is None else dims
    keep = operation.exact.dim() == x.dim()
    rms = x.square().mean(dims, keepdim=keep).sqrt()
    n = max(1, x.numel() // max(1, operation.exact.numel()))
    inner = 8 * math.sqrt(n) * U_ACCUMULATE * rms + 2 * r.u_in * r.size_in(rms)
    size = operation.exact
    carried: Tensor = inner * (size.sqrt() if operation.name == "var" else 1.0)
    return 4 * r.u * size + carried


def norm(operation: Operation, r: Roundoff) -> Tensor:
    """All terms are positive, so errors are relative."""
    n = max(1, operation.args[0].numel() // max(1, operation.exact.numel()))
    size = operation.exact.abs()
    inside: Tensor = size * (4 * r.u + 4 * math.sqrt(n) * U_ACCUMULATE)
    return inside + 2 * r.u_in * (size + math.sqrt(n) * r.size_in(torch.zeros_like(size)))


def weight_norm(operation: Operation, r: Roundoff) -> Tensor:
    """A direction scaled to a given length: all terms of the sum of squares are positive, so errors are relative."""
    n = max(1, operation.args[0].numel() // max(1, operation.args[1].numel()))
    return operation.exact.abs() * (4 * r.u + 2 * math.sqrt(n) * U_ACCUMULATE + 3 * (r.u_in + r.u_w))


def dequantized(operation: Operation, r: Roundoff) -> Tensor:
    """(q - zero) scale, which runtimes also compute as q scale - zero scale: 4u |P| + 4U (|q| + |zero|) scale."""
    without_zero = operation.target(*operation.args[:2], None, **operation.kwargs)
    inside = without_zero.abs() + (without_zero - operation.exact).abs()
    bound: Tensor = (4 * r.u + 2 * (r.u_in + r.u_w)) * operation.exact.abs() + 4 * U_ACCUMULATE * inside
    return bound


def product_of_all(operation: Operation, r: Roundoff) -> Tensor:
    """Relative errors add up, one for each factor; half-precision kernels round after each."""
    n: int = max(1, operation.args[0].numel() // max(1, operation.exact.numel()))
    return operation.exact.abs() * (2 * r.u + n * (r.u + 2 * r.u_in))


def attention(operation: Operation, r: Roundoff) -> Tensor:
    """Scores s (sums over D, rounded where they are stored), probabilities p, context (sums over T).

        es  = 4 sqrt(D) U scale |q||k|' + 1.5 max(u, U) |s| + 4 u_in scale sqrt(q^2 k^2'), 0 where p = 0
        rel = es + sum(p es) + 2 max(u, U) + 8 U (1 + max|s|)
        B   = (p rel) |v| + u_in p |v| + 4 sqrt(T) U (p |v|) + 2u |P| + 2 tiny sum|v|, the last over p > 0

    Probabilities may be stored in the dtype of the result, before or after they are divided by their sum (which is
    at least 1). Inputs of u_in have the size of `Roundoff.size_in`.

    q [B, H, S, D], k [B, G, T, D], v [B, G, T, Dv], float64.
    """
    parts = attention_parts(operation.args, operation.kwargs)
    q, k, v, scores, p, scale = parts
    wide = max(r.u, r.u_sums)
    live = p > 0
    size = torch.where(live, scores.abs(), 0.0)
    products = 4 * math.sqrt(q.shape[-1]) * r.u_sums * scale * (q.abs() @ k.abs().mT)
    if r.u_in:
        products = products + 4 * r.u_in * scale * (r.size_in(q).square() @ r.size_in(k).square().mT).sqrt()
    error = torch.where(live, products + 1.5 * wide * size, 0.0)
    relative = error + (p * error).sum(-1, keepdim=True) + 2 * wide
    relative = relative + 8 * U_ACCUMULATE * (1 + size.amax(-1, keepdim=True))
    context = (p * relative + 2 * r.tiny * live) @ v.abs() + 4 * math.sqrt(k.shape[-2]) * r.u_sums * (p @ v.abs())
    if r.u_in:
        context = context + r.u_in * (p @ r.size_in(v))
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
    "softmax": softmax,
    "_softmax": softmax,
    "_safe_softmax": softmax,
    "log_softmax": log_softmax,
    "_log_softmax": log_softmax,
    "logsumexp": log_softmax,
    "layer_norm": layer_norm,
    "native_layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "group_norm": group_norm,
    "_native_batch_norm_legit_no_training": batch_norm,
    "var": variance,
    "std": variance,
    "norm": norm,
    "linalg_vector_norm": norm,
    "_weight_norm": weight_norm,
    "dequantize": dequantized,
    "prod": product_of_all,
    "cumprod": product_of_all,
    "scaled_dot_product_attention": attention,
}
