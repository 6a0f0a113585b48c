# ruff: noqa: E501
"""Right implementations of twenty operations, each written in another way than its reference.

In half precision they compute in float32 and round once, unless the reference itself rounds on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass(frozen=True)
class Case:
    """An operation.

    Attributes:
        name: Of it.
        reference: Plain PyTorch.
        inputs: Makes its arguments in a dtype.
        right: Other implementations, by name.
    """

    name: str
    reference: Function
    inputs: Callable[[torch.dtype], tuple[Any, ...]]
    right: dict[str, Function]


def wide(function: Function) -> Function:
    """Run in float32 and round the results once."""

    def run(*args: Any) -> Any:
        dtype = next(a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point())
        found = function(*(a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args))
        if isinstance(found, tuple):
            return tuple(one.to(dtype) for one in found)
        return found.to(dtype) if found.is_floating_point() else found

    return run


def online_softmax(x: Tensor, block: int = 32) -> Tensor:
    m = torch.full_like(x[..., :1], -math.inf)
    total = torch.zeros_like(m)
    for part in x.split(block, -1):
        new = torch.maximum(m, part.amax(-1, keepdim=True))
        total = total * torch.exp(m - new) + torch.exp(part - new).sum(-1, keepdim=True)
        m = new
    return torch.exp(x - m) / total


def exp2_softmax(x: Tensor) -> Tensor:
    e = torch.exp2((x - x.amax(-1, keepdim=True)) * math.log2(math.e))
    return e / e.sum(-1, keepdim=True)


def fast_exp(x: Tensor) -> Tensor:
    """Cody and Waite: 2^k times a polynomial."""
    k = torch.round(x * math.log2(math.e))
    r = (x - k * 0.693145751953125) - k * 1.428606765330187e-06
    p = torch.full_like(r, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + c
    return torch.ldexp(p * r * r + r + 1, k.int())


def poly_softmax(x: Tensor) -> Tensor:
    e = fast_exp(x - x.amax(-1, keepdim=True))
    return e * (1 / e.sum(-1, keepdim=True))


def welford(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    mean, m2 = torch.zeros_like(x[..., 0]), torch.zeros_like(x[..., 0])
    for i in range(x.shape[-1]):
        delta = x[..., i] - mean
        mean = mean + delta / (i + 1)
        m2 = m2 + delta * (x[..., i] - mean)
    return (x - mean[..., None]) * torch.rsqrt(m2 / x.shape[-1] + 1e-5)[..., None] * w + b


def two_pass_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    c = x - x.mean(-1, keepdim=True)
    return c / torch.sqrt((c * c).mean(-1, keepdim=True) + 1e-5) * w + b


def one_pass_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    mean = x.sum(-1, keepdim=True) / x.shape[-1]
    var = (x * x).sum(-1, keepdim=True) / x.shape[-1] - mean * mean
    return (x - mean) * torch.rsqrt(var + 1e-5) * w + b


def chunked_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Chan's joining of the statistics of parts."""
    n, mean, m2 = 0, torch.zeros_like(x[..., :1]), torch.zeros_like(x[..., :1])
    for part in x.split(24, -1):
        k, own = part.shape[-1], part.mean(-1, keepdim=True)
        delta = own - mean
        m2 = m2 + (part - own).square().sum(-1, keepdim=True) + delta * delta * (n * k / (n + k))
        mean, n = mean + delta * (k / (n + k)), n + k
    return (x - mean) / (m2 / n + 1e-5).sqrt() * w + b


def rms_reference(x: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * w.float()).to(x.dtype)


def split_k(a: Tensor, b: Tensor, parts: int = 4) -> Tensor:
    step = -(-a.shape[-1] // parts)
    out = torch.zeros(a.shape[0], b.shape[1])
    for start in range(0, a.shape[-1], step):
        out = out + a[:, start : start + step] @ b[start : start + step]
    return out


def kahan_product(a: Tensor, b: Tensor) -> Tensor:
    total, lost = torch.zeros(a.shape[0], b.shape[1]), torch.zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        y = a[:, k : k + 1] * b[k : k + 1] - lost
        t = total + y
        lost, total = (t - total) - y, t
    return total


def strips(a: Tensor, b: Tensor) -> Tensor:
    out = torch.zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        out = out + a[:, k : k + 1] * b[k : k + 1]
    return out


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, block: int = 16) -> Tensor:
    scale, out = q.shape[-1] ** -0.5, torch.zeros(*q.shape[:-1], v.shape[-1])
    m, total = torch.full_like(q[..., :1], -math.inf), torch.zeros_like(q[..., :1])
    rows = torch.arange(q.shape[-2])[:, None]
    for start in range(0, k.shape[-2], block):
        s = q @ k[..., start : start + block, :].mT * scale
        if causal:
            s = s.masked_fill(rows < start + torch.arange(s.shape[-1]), -math.inf)
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        safe = torch.where(new.isinf(), 0.0, new)
        p, alpha = torch.exp(s - safe), torch.exp(m - safe)
        total = total * alpha + p.sum(-1, keepdim=True)
        out = out * alpha + p @ v[..., start : start + block, :]
        m = new
    return out / total


def written_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    s = (q * q.shape[-1] ** -0.5) @ k.mT
    if causal:
        s = s + torch.full(s.shape[-2:], -math.inf).triu(1)
    return s.softmax(-1) @ v


def half_probabilities(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As FlashAttention does: the probabilities are rounded for the second product."""
    p = (q.float() @ k.float().mT * q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
    return (p.float() @ v.float()).to(q.dtype)


def conv(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1)


def winograd(x: Tensor, w: Tensor) -> Tensor:
    """F(2 x 2, 3 x 3)."""
    bt = torch.tensor([[1.0, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
    g = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
    at = torch.tensor([[1.0, 1, 1, 0], [0, 1, -1, -1]])
    tiles = F.pad(x, (1, 1, 1, 1)).unfold(2, 4, 2).unfold(3, 4, 2)
    u, v = bt @ tiles @ bt.T, g @ w @ g.T
    m = torch.einsum("ncijab,ocab->noijab", u, v)
    y = at @ m @ at.T
    n, o, i, j, _, _ = y.shape
    return y.permute(0, 1, 2, 4, 3, 5).reshape(n, o, 2 * i, 2 * j)


def by_columns(x: Tensor, w: Tensor) -> Tensor:
    columns = F.unfold(x, 3, padding=1)
    return (w.flatten(1) @ columns).reshape(x.shape[0], w.shape[0], *x.shape[2:])


def by_shifts(x: Tensor, w: Tensor) -> Tensor:
    padded, out = F.pad(x, (1, 1, 1, 1)), 0.0
    for i in range(3):
        for j in range(3):
            shifted = padded[:, :, i : i + x.shape[2], j : j + x.shape[3]]
            out = out + torch.einsum("nchw,oc->nohw", shifted, w[:, :, i, j])
    return out  # type: ignore[return-value]


def cross_entropy(x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), t)


def chunked_loss(x: Tensor, t: Tensor) -> Tensor:
    x = x.float()
    total = torch.zeros(())
    for rows, own in zip(x.split(7), t.split(7), strict=True):
        m = torch.full_like(rows[:, :1], -math.inf)
        s = torch.zeros_like(m)
        for part in rows.split(13, 1):
            new = torch.maximum(m, part.amax(1, keepdim=True))
            s = s * torch.exp(m - new) + torch.exp(part - new).sum(1, keepdim=True)
            m = new
        total = total + (m + s.log() - rows.gather(1, own[:, None])).sum()
    return total / len(x)


def gelu_by_erf(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5)))


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def sigmoid_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def swiglu(x: Tensor, g: Tensor) -> Tensor:
    return (F.silu(g.float()) * x.float()).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def rope_by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    c, s = cos[..., :half], sin[..., :half]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def rope_complex(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos[..., :half], sin[..., :half])
    return torch.cat([z.real, z.imag], -1)


def angles(dtype: torch.dtype) -> tuple[Tensor, ...]:
    t = torch.arange(24)[:, None] / 10000 ** (torch.arange(8) / 8)
    t = torch.cat([t, t], -1)
    return drawn(2, 3, 24, 16, dtype=dtype), t.cos().to(dtype), t.sin().to(dtype)


def blocked_scan(x: Tensor) -> Tensor:
    parts, carry = [], torch.zeros_like(x[..., :1])
    for part in x.split(16, -1):
        own = part.cumsum(-1) + carry
        parts.append(own)
        carry = own[..., -1:]
    return torch.cat(parts, -1)


def doubling_scan(x: Tensor) -> Tensor:
    by = 1
    while by < x.shape[-1]:
        x = x + F.pad(x, (by, 0))[..., : x.shape[-1]]
        by *= 2
    return x


def pairwise(x: Tensor) -> Tensor:
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = F.pad(x, (0, 1))
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0]


def kahan_sum(x: Tensor) -> Tensor:
    total, lost = torch.zeros_like(x[..., 0]), torch.zeros_like(x[..., 0])
    for i in range(x.shape[-1]):
        y = x[..., i] - lost
        t = total + y
        lost, total = (t - total) - y, t
    return total


def top_two(x: Tensor) -> tuple[Tensor, Tensor]:
    found = x.topk(3, -1)
    return found.values, found.indices


def top_by_sort(x: Tensor) -> tuple[Tensor, Tensor]:
    found = x.sort(-1, descending=True)
    return found.values[..., :3], found.indices[..., :3]


def top_by_masks(x: Tensor) -> tuple[Tensor, Tensor]:
    values, places = [], []
    x = x.clone()
    for _ in range(3):
        v, i = x.max(-1, keepdim=True)
        values.append(v)
        places.append(i)
        x.scatter_(-1, i, -math.inf)
    return torch.cat(values, -1), torch.cat(places, -1)


def experts(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
    p = (x.float() @ gate.float()).softmax(-1)
    weight, chosen = p.topk(2, -1)
    out = torch.zeros_like(x.float())
    for e in range(w.shape[0]):
        own = (chosen == e) * weight
        out = out + own.sum(-1, keepdim=True) * (x.float() @ w[e].float())
    return out.to(x.dtype)


def routed(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
    p = torch.softmax(x.float() @ gate.float(), -1)
    weight, chosen = torch.topk(p, 2)
    out = torch.zeros(x.shape[0], x.shape[1])
    for e in range(w.shape[0]):
        rows, which = (chosen == e).nonzero(as_tuple=True)
        out.index_add_(0, rows, (x[rows].float() @ w[e].float()) * weight[rows, which, None])
    return out.to(x.dtype)


def quantities(*shapes: tuple[int, ...]) -> Callable[[torch.dtype], tuple[Tensor, ...]]:
    """Normal tensors of these shapes."""
    return lambda dtype: tuple(drawn(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))


def logits(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return drawn(32, 101, dtype=dtype), torch.arange(32) * 3 % 101


def group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x, 4, w, b, 1e-5)


def group_by_hand(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    g = x.reshape(x.shape[0], 4, -1)
    mean = g.mean(-1, keepdim=True)
    var = (g - mean).square().mean(-1, keepdim=True)
    y = ((g - mean) / (var + 1e-5).sqrt()).reshape(x.shape)
    return y * w[:, None] + b[:, None]


def group_folded(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Scale and shift of each channel, then one pass."""
    g = x.reshape(x.shape[0], 4, -1)
    mean, var = g.mean(-1), g.var(-1, correction=0)
    scale = torch.rsqrt(var + 1e-5).repeat_interleave(2, 1) * w
    shift = b - mean.repeat_interleave(2, 1) * scale
    return x * scale[..., None] + shift[..., None]


def linear_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


CASES = (
    Case("softmax", lambda x: F.softmax(x, -1), quantities((16, 130)), {
        "online": wide(online_softmax), "exp2": wide(exp2_softmax), "polynomial": wide(poly_softmax),
        "by log": wide(lambda x: (x - x.logsumexp(-1, keepdim=True)).exp()),
    }),
    Case("softmax written", lambda x: torch.exp(x - x.amax(-1, keepdim=True)) / torch.exp(x - x.amax(-1, keepdim=True)).sum(-1, keepdim=True), quantities((16, 130)), {
        "online": wide(online_softmax), "exp2": wide(exp2_softmax), "torch": lambda x: torch.softmax(x, -1),
    }),
    Case("log softmax", lambda x: F.log_softmax(x, -1), quantities((16, 130)), {
        "by hand": wide(lambda x: x - x.amax(-1, keepdim=True) - (x - x.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True).log()),
        "logsumexp": wide(lambda x: x - torch.logsumexp(x, -1, keepdim=True)),
        "base 2": wide(lambda x: (x * math.log2(math.e) - torch.log2(torch.exp2((x - x.amax(-1, keepdim=True)) * math.log2(math.e)).sum(-1, keepdim=True)) - x.amax(-1, keepdim=True) * math.log2(math.e)) * math.log(2)),
    }),
    Case("layer norm", lambda x, w, b: F.layer_norm(x, (96,), w, b), quantities((24, 96), (96,), (96,)), {
        "welford": wide(welford), "two pass": wide(two_pass_norm), "one pass": wide(one_pass_norm), "chan": wide(chunked_norm),
    }),
    Case("layer norm written", lambda x, w, b: two_pass_norm(x.float(), w.float(), b.float()).to(x.dtype), quantities((24, 96), (96,), (96,)), {
        "welford": wide(welford), "torch": wide(lambda x, w, b: F.layer_norm(x, (96,), w, b)), "one pass": wide(one_pass_norm),
    }),
    Case("rms norm", rms_reference, quantities((24, 96), (96,)), {
        "torch": wide(lambda x, w: F.rms_norm(x, (96,), w, 1e-6)),
        "sqrt": wide(lambda x, w: x / torch.sqrt((x * x).sum(-1, keepdim=True) / 96 + 1e-6) * w),
        "norm": wide(lambda x, w: x * w * (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / 96 + 1e-6) ** -0.5),
        "by thirds": wide(lambda x, w: x * torch.rsqrt(sum(p.square().sum(-1, keepdim=True) for p in x.split(32, -1)) / 96 + 1e-6) * w),  # type: ignore[arg-type]
    }),
    Case("add and rms norm", lambda x, r, w: (rms_reference(x + r, w), x + r), quantities((24, 96), (24, 96), (96,)), {
        "fused": lambda x, r, w: ((lambda h: wide(lambda h, w: F.rms_norm(h, (96,), w, 1e-6))(h, w))(x + r), x + r),
        "sqrt": lambda x, r, w: ((lambda h: wide(lambda h, w: h / torch.sqrt((h * h).mean(-1, keepdim=True) + 1e-6) * w)(h, w))(r + x), r + x),
        "half of each": lambda x, r, w: ((lambda h: wide(lambda h, w: h * w * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt())(h, w))(x + r), x.clone().add_(r)),
    }),
    Case("group norm", group_norm, quantities((3, 8, 50), (8,), (8,)), {
        "by hand": wide(group_by_hand), "folded": wide(group_folded),
        "layer norm": wide(lambda x, w, b: F.layer_norm(x.reshape(3, 4, 100), (100,)).reshape(x.shape) * w[:, None] + b[:, None]),
    }),
    Case("matrix product", lambda a, b: a @ b, quantities((33, 257), (257, 40)), {
        "split": wide(split_k), "kahan": wide(kahan_product), "strips": wide(strips), "transposed": lambda a, b: (b.T @ a.T).T,
        "einsum": wide(lambda a, b: torch.einsum("ik,kj->ij", a, b)),
    }),
    Case("linear and gelu", linear_gelu, quantities((24, 64), (32, 64), (32,)), {
        "by parts": lambda x, w, b: F.gelu(x @ w.T + b), "fused": wide(lambda x, w, b: gelu_by_erf(x @ w.T + b)),
        "split": wide(lambda x, w, b: F.gelu(split_k(x, w.T) + b)),
    }),
    Case("attention", attention, quantities((2, 3, 37, 16), (2, 3, 37, 16), (2, 3, 37, 16)), {
        "flash": wide(flash), "written": wide(written_attention), "half probabilities": half_probabilities,
        "flash of 5": wide(lambda q, k, v: flash(q, k, v, block=5)),
    }),
    Case("causal attention", lambda q, k, v: attention(q, k, v, True), quantities((2, 3, 37, 16), (2, 3, 37, 16), (2, 3, 37, 16)), {
        "flash": wide(lambda q, k, v: flash(q, k, v, True)), "written": wide(lambda q, k, v: written_attention(q, k, v, True)),
        "flash of 7": wide(lambda q, k, v: flash(q, k, v, True, 7)),
    }),
    Case("convolution", conv, quantities((2, 5, 12, 12), (6, 5, 3, 3)), {
        "winograd": wide(winograd), "columns": wide(by_columns), "shifts": wide(by_shifts),
        "fourier": wide(lambda x, w: torch.fft.irfft2(torch.einsum("nchw,ochw->nohw", torch.fft.rfft2(F.pad(x, (1, 3, 1, 3))), torch.fft.rfft2(w, s=(16, 16)).conj()), s=(16, 16))[..., :12, :12]),
    }),
    Case("cross entropy", cross_entropy, logits, {
        "chunked": chunked_loss, "log softmax": lambda x, t: -x.float().log_softmax(-1)[torch.arange(len(t)), t].mean(),
        "by softmax": lambda x, t: -(x.float() - x.float().amax(-1, keepdim=True)).exp().div((x.float() - x.float().amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)).gather(1, t[:, None]).log().mean(),
    }),
    Case("gelu", F.gelu, quantities((40, 60)), {
        "erf": wide(gelu_by_erf), "erfc": wide(lambda x: 0.5 * x * torch.erfc(-x * math.sqrt(0.5))), "ndtr": wide(lambda x: x * torch.special.ndtr(x)),
    }),
    Case("gelu by tanh", lambda x: F.gelu(x, approximate="tanh"), quantities((40, 60)), {
        "written": wide(tanh_gelu), "sigmoid": wide(sigmoid_gelu), "exp": wide(lambda x: x / (1 + torch.exp(-1.5957691216057308 * (x + 0.044715 * x**3)))),
    }),
    Case("swiglu", swiglu, quantities((24, 64), (24, 64)), {
        "sigmoid": wide(lambda x, g: g * torch.sigmoid(g) * x), "exp": wide(lambda x, g: x * g / (1 + torch.exp(-g))),
        "tanh": wide(lambda x, g: x * g * 0.5 * (1 + torch.tanh(0.5 * g))),
    }),
    Case("rope", rope, angles, {
        "halves": wide(rope_by_halves), "complex": wide(rope_complex), "native": rope_by_halves,
    }),
    Case("scan", lambda x: x.cumsum(-1), quantities((12, 70)), {
        "blocked": wide(blocked_scan), "doubling": wide(doubling_scan), "triangle": wide(lambda x: x @ torch.ones(70, 70).triu()),
    }),
    Case("sum", lambda x: x.sum(-1), quantities((12, 1000)), {
        "pairwise": wide(pairwise), "kahan": wide(kahan_sum), "product": wide(lambda x: x @ torch.ones(1000)),
        "one after another": wide(lambda x: x.cumsum(-1)[..., -1]),
    }),
    Case("top three", top_two, lambda dtype: (drawn(20, 50, dtype=dtype),), {"sort": top_by_sort, "masks": top_by_masks, "of ties": lambda x: top_by_sort(x)}),
    Case("experts", experts, quantities((30, 16), (16, 6), (6, 16, 16)), {
        "routed": routed, "dense": lambda x, g, w: (lambda p, top: torch.einsum("ne,neo->no", torch.zeros_like(p).scatter(-1, top.indices, top.values), torch.einsum("ni,eio->neo", x.float(), w.float())).to(x.dtype))((x.float() @ g.float()).softmax(-1), (x.float() @ g.float()).softmax(-1).topk(2, -1)),
        "reordered": lambda x, g, w: routed(x.flip(0), g, w).flip(0),
    }),
)  # fmt: skip
