"""Wrong implementations, each with the kinds of mistake that its name may be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.corpus import right
from tests.kernels.corpus.right import CASES, drawn, wide

REFERENCES = {case.name: case for case in CASES}
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Wrong:
    """A wrong implementation.

    Attributes:
        of: Name of the operation.
        name: Of the mistake.
        kinds: What it may be called.
        function: The implementation.
        dtype: Of its inputs.
        inputs: Other inputs than the operation's, where these do not show it.
    """

    of: str
    name: str
    kinds: str
    function: Callable[..., Any]
    dtype: torch.dtype = torch.float32
    inputs: Callable[[torch.dtype], tuple[Any, ...]] | None = None

    def arguments(self) -> tuple[Any, ...]:
        """Return inputs that show it."""
        return (self.inputs or REFERENCES[self.of].inputs)(self.dtype)

    @property
    def reference(self) -> Callable[..., Any]:
        """The reference of the operation."""
        return REFERENCES[self.of].reference


def also(of: str, other: str, wrongs: list[Wrong], *names: str) -> list[Wrong]:
    """Return mistakes of another operation, by their names, as those of this one."""
    return [replace(wrong, of=of) for wrong in wrongs if wrong.of == other and wrong.name in names]


def tail(function: Callable[..., Any], number: int, value: float = 0.0) -> Callable[..., Any]:
    """The last columns are not written."""

    def run(*args: Any) -> Any:
        y = function(*args).clone()
        y[..., -number:] = value
        return y

    return run


def rows_left(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The last rows are not written."""

    def run(*args: Any) -> Any:
        y = function(*args).clone()
        y[-number:] = 0
        return y

    return run


def in_steps(values: Tensor, dtype: torch.dtype = BF16) -> Tensor:
    """A sum over the last axis whose running total is rounded after each term."""
    total = torch.zeros_like(values[..., 0], dtype=dtype)
    for i in range(values.shape[-1]):
        total = (total.float() + values[..., i].float()).to(dtype)
    return total.to(values.dtype)


def product_in_steps(a: Tensor, b: Tensor, dtype: torch.dtype = BF16) -> Tensor:
    total = torch.zeros(a.shape[0], b.shape[1], dtype=dtype)
    for k in range(a.shape[1]):
        total = (total.float() + a[:, k : k + 1].float() * b[k : k + 1].float()).to(dtype)
    return total.to(a.dtype)


def of(name: str, by: float, *places: int) -> Callable[[torch.dtype], tuple[Any, ...]]:
    """The inputs of an operation, some of them scaled."""
    return lambda dtype: tuple(a * by if i in places else a for i, a in enumerate(REFERENCES[name].inputs(dtype)))


def shifted(name: str, by: float) -> Callable[[torch.dtype], tuple[Any, ...]]:
    """The inputs of an operation, the first with a large mean."""
    return lambda dtype: (REFERENCES[name].inputs(dtype)[0] + by, *REFERENCES[name].inputs(dtype)[1:])


def norm(x: Tensor, w: Tensor, b: Tensor, eps: float = 1e-5, correction: int = 0) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=correction, keepdim=True) + eps).sqrt() * w + b


def rms(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, diagonal: int | None = None) -> Tensor:
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if diagonal is not None:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(diagonal), -math.inf)
    return s.softmax(-1) @ v


def stale_flash(q: Tensor, k: Tensor, v: Tensor, block: int = 16) -> Tensor:
    """The output is not rescaled when the maximum changes."""
    scale, out = q.shape[-1] ** -0.5, torch.zeros_like(q)
    m, total = torch.full_like(q[..., :1], -math.inf), torch.zeros_like(q[..., :1])
    for start in range(0, k.shape[-2], block):
        s = q @ k[..., start : start + block, :].mT * scale
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        p = torch.exp(s - new)
        total = total * torch.exp(m - new) + p.sum(-1, keepdim=True)
        out = out + p @ v[..., start : start + block, :]
        m = new
    return out / total


def whole_blocks(q: Tensor, k: Tensor, v: Tensor, block: int = 16) -> Tensor:
    """The keys after the last whole block are left out."""
    n = k.shape[-2] // block * block
    return attend(q, k[..., :n, :], v[..., :n, :])


def padded_keys(q: Tensor, k: Tensor, v: Tensor, block: int = 16) -> Tensor:
    """The last block is filled with zero keys that are not masked."""
    fill = -k.shape[-2] % block
    return attend(q, F.pad(k, (0, 0, 0, fill)), F.pad(v, (0, 0, 0, fill)))


def block_softmax(x: Tensor, block: int = 32) -> Tensor:
    """The tail beyond whole blocks does not count for the sum."""
    n = x.shape[-1] // block * block
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e[..., :n].sum(-1, keepdim=True)


def zero_padded(x: Tensor, block: int = 32) -> Tensor:
    """The row is filled up with zeros, which are not masked."""
    padded = F.pad(x, (0, -x.shape[-1] % block))
    return padded.softmax(-1)[..., : x.shape[-1]]


def rope_as(x: Tensor, cos: Tensor, sin: Tensor, sign: float = -1.0, interleaved: bool = False) -> Tensor:
    if interleaved:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return x * cos + turned * sin
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([sign * b, -sign * a], -1) * sin


def sub_experts(x: Tensor, gate: Tensor, w: Tensor, **how: Any) -> Tensor:
    p = (x @ gate).softmax(-1)
    weight, chosen = p.topk(how.get("k", 2), -1)
    if how.get("normalized"):
        weight = weight / weight.sum(-1, keepdim=True)
    if how.get("unweighted"):
        weight = torch.ones_like(weight)
    out = torch.zeros_like(x)
    for e in range(w.shape[0] - how.get("fewer", 0)):
        matrix = w[e].T if how.get("transposed") else w[e]
        out = out + ((chosen == e) * weight).sum(-1, keepdim=True) * (x @ matrix)
    return out


def loss(x: Tensor, t: Tensor, **how: Any) -> Tensor:
    x = x.float()
    if how.get("no_max"):
        terms = x.exp().sum(-1).log() - x.gather(1, t[:, None])[:, 0]
    else:
        terms = x.logsumexp(-1) - x.gather(1, t[:, None])[:, 0]
    return terms[: how.get("rows", len(t))].sum() / how.get("of", len(t))


class Remembers:
    """Returns what the first call gave."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.first = function, None

    def __call__(self, *args: Any) -> Any:
        first, self.first = self.first, self.function(*args)
        return self.first if first is None else first


def _writes(x: Tensor) -> Tensor:
    x -= x.amax(-1, keepdim=True)
    return x.softmax(-1)


def _softmaxes() -> list[Wrong]:
    name, big = "softmax", lambda by: lambda dtype: (drawn(16, 130, dtype=dtype) * by,)
    wrongs = [
        Wrong(
            name,
            "the maximum is not subtracted",
            "overflow|operation left out",
            lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
            inputs=big(60),
        ),
        Wrong(
            name,
            "the maximum of the whole tensor",
            "overflow|axis",
            lambda x: (x - x.amax()).exp() / (x - x.amax()).exp().sum(-1, keepdim=True),
            inputs=lambda dtype: (drawn(16, 130) + torch.arange(16)[:, None] * 20.0,),
        ),
        Wrong(name, "other axis", "axis", lambda x: x.softmax(0)),
        Wrong(name, "sum left out", "operation left out|scale", lambda x: (x - x.amax(-1, keepdim=True)).exp()),
        Wrong("softmax written", "sum left out", "operation left out", lambda x: (x - x.amax(-1, keepdim=True)).exp()),
        Wrong(
            name,
            "base 2",
            "operation replaced|scale",
            lambda x: (
                torch.exp2(x - x.amax(-1, keepdim=True))
                / torch.exp2(x - x.amax(-1, keepdim=True)).sum(-1, keepdim=True)
            ),
        ),
        Wrong(name, "last columns not written", "tail", tail(lambda x: x.softmax(-1), 2)),
        Wrong(name, "tail does not count", "tail|scale|operation left out", block_softmax),
        Wrong(name, "zeros are not masked", "tail|mask|scale|out of bounds", zero_padded),
        Wrong(name, "last rows not written", "tail", rows_left(lambda x: x.softmax(-1), 4)),
        Wrong(name, "zeros", "constant", torch.zeros_like),
        Wrong(name, "uniform", "constant", lambda x: torch.full_like(x, 1 / x.shape[-1])),
        Wrong(name, "its input", "input returned", lambda x: x.clone()),
        Wrong(name, "writes to its input", "inputs written", _writes),
        Wrong(
            name,
            "sum in bfloat16",
            "accumulation|precision|scale",
            lambda x: (lambda e: e / in_steps(e)[..., None])((x - x.amax(-1, keepdim=True)).exp()),
        ),
        Wrong(name, "result by way of float16", "precision", lambda x: x.softmax(-1).half().float()),
        Wrong(name, "result by way of bfloat16", "precision", lambda x: x.bfloat16().float().softmax(-1)),
        Wrong("log softmax", "softmax", "operation replaced|operation left out", lambda x: x.softmax(-1)),
        Wrong(
            "log softmax",
            "maximum added once too little",
            "operation left out",
            lambda x: x - (x - x.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True).log(),
        ),
        Wrong("log softmax", "base 2", "scale|operation replaced", lambda x: x.softmax(-1).log2()),
        Wrong(
            "log softmax",
            "no maximum",
            "overflow|operation left out",
            lambda x: x - x.exp().sum(-1, keepdim=True).log(),
            inputs=big(60),
        ),
        Wrong("log softmax", "log of softmax", "overflow|precision", lambda x: x.softmax(-1).log(), inputs=big(60)),
        Wrong("log softmax", "transposed axes", "axis", lambda x: x.log_softmax(0)),
    ]
    return wrongs + also("softmax written", name, wrongs, "the maximum is not subtracted", "other axis", "base 2")


def _norms() -> list[Wrong]:
    ln, rn, written = "layer norm", "rms norm", "layer norm written"
    small = of(ln, 0.01, 0)

    def no_root(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5) * w + b

    def one_pass(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        return (x - mean) / ((x * x).mean(-1, keepdim=True) - mean**2 + 1e-5).sqrt() * w + b

    wrongs = [
        Wrong(ln, "unbiased variance", "statistics", lambda x, w, b: norm(x, w, b, correction=1)),
        Wrong(ln, "eps 1e-6", "eps", lambda x, w, b: norm(x, w, b, 1e-6)),
        Wrong(ln, "eps 1e-3", "eps", lambda x, w, b: norm(x, w, b, 1e-3)),
        Wrong(ln, "no eps", "eps", lambda x, w, b: norm(x, w, b, 0.0), inputs=small),
        Wrong(
            ln,
            "eps outside of the root",
            "eps",
            lambda x, w, b: (
                (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True).sqrt() + 1e-5) * w + b
            ),
        ),
        Wrong(ln, "bias ignored", "bias missing|argument ignored", lambda x, w, b: norm(x, w, 0 * b)),
        Wrong(ln, "weight ignored", "argument ignored|operation left out", lambda x, w, b: norm(x, 0 * w + 1, b)),
        Wrong(ln, "weight + 1", "bias missing|operation replaced|other|scale", lambda x, w, b: norm(x, 1 + w, b)),
        Wrong(
            ln,
            "mean is not subtracted",
            "operation left out|operation replaced|statistics",
            lambda x, w, b: rms(x, w, 1e-5) + b,
        ),
        Wrong(
            ln,
            "variance about zero",
            "operation left out|statistics",
            lambda x, w, b: (
                (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w + b
            ),
        ),
        Wrong(
            ln,
            "no root",
            "operation left out|operation replaced",
            no_root,
        ),
        Wrong(ln, "over rows", "axis", lambda x, w, b: norm(x.T, 1 + 0 * w[0], 0 * b[0]).T * w + b),
        Wrong(ln, "weight and bias exchanged", "operands swapped", lambda x, w, b: norm(x, b, w)),
        Wrong(
            ln,
            "one pass with a large mean",
            "statistics|precision|overflow",
            one_pass,
            inputs=shifted(ln, 3e4),
        ),
        Wrong(
            written,
            "one pass with a large mean",
            "statistics|precision|overflow",
            one_pass,
            inputs=shifted(ln, 300.0),
        ),
        Wrong(
            ln,
            "statistics of the whole row but three",
            "tail|statistics|scale",
            lambda x, w, b: (
                (x - x[..., :-3].mean(-1, keepdim=True))
                / (x[..., :-3].var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
                * w
                + b
            ),
        ),
        Wrong(ln, "last column", "tail", tail(norm, 1)),
        Wrong(
            ln,
            "mean in bfloat16",
            "accumulation|precision|statistics",
            lambda x, w, b: (
                (x - x.mean(-1, keepdim=True).bfloat16()) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() * w
                + b
            ),
            inputs=shifted(ln, 1.0),
        ),
        Wrong(rn, "eps 1e-5", "eps", lambda x, w: rms(x, w, 1e-5)),
        Wrong(
            rn,
            "eps outside of the root",
            "eps",
            lambda x, w: x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-6) * w,
            inputs=of(rn, 0.01, 0),
        ),
        Wrong(
            rn,
            "sum in place of mean",
            "operation replaced|scale|statistics",
            lambda x, w: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) * w,
        ),
        Wrong(rn, "weight ignored", "argument ignored|operation left out", lambda x, w: rms(x, 1)),  # type: ignore[arg-type]
        Wrong(
            rn, "layer norm", "operation replaced|other|statistics", lambda x, w: F.layer_norm(x, (96,), w, None, 1e-6)
        ),
        Wrong(
            rn,
            "squares in bfloat16",
            "accumulation|precision|scale",
            lambda x, w: x * torch.rsqrt(in_steps(x.square())[..., None] / 96 + 1e-6) * w,
        ),
        Wrong(
            rn,
            "by way of bfloat16",
            "precision",
            lambda x, w: (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).bfloat16().float() * w,
        ),
        Wrong(rn, "weight + 1", "bias missing|operation replaced|other|scale", lambda x, w: rms(x, 1 + w)),
        Wrong(
            rn,
            "half of the row",
            "tail|statistics|scale",
            lambda x, w: x * torch.rsqrt(x[..., :48].square().mean(-1, keepdim=True) + 1e-6) * w,
        ),
        Wrong(
            "add and rms norm",
            "sum not returned",
            "input returned|operation left out",
            lambda x, r, w: (rms(x + r, w), r),
        ),
        Wrong(
            "add and rms norm",
            "no residual",
            "operation left out|argument ignored|bias missing",
            lambda x, r, w: (rms(x, w), x),
        ),
        Wrong("add and rms norm", "writes the residual", "inputs written", lambda x, r, w: (rms(r.add_(x), w), r)),
        Wrong(
            "add and rms norm",
            "normalizes before it adds",
            "operation left out|other|bias missing|operation replaced",
            lambda x, r, w: (rms(x, w) + r, x + r),
        ),
        Wrong("group norm", "two groups", "other|axis|operation replaced", lambda x, w, b: F.group_norm(x, 2, w, b)),
        Wrong("group norm", "instance norm", "other|axis|operation replaced", lambda x, w, b: F.group_norm(x, 8, w, b)),
        Wrong("group norm", "eps", "eps", lambda x, w, b: F.group_norm(x, 4, w, b, 1e-3)),
        Wrong(
            "group norm",
            "unbiased",
            "statistics",
            lambda x, w, b: (
                (
                    (x.reshape(3, 4, -1) - x.reshape(3, 4, -1).mean(-1, keepdim=True))
                    / (x.reshape(3, 4, -1).var(-1, keepdim=True) + 1e-5).sqrt()
                ).reshape(x.shape)
                * w[:, None]
                + b[:, None]
            ),
        ),
        Wrong("group norm", "bias of channel 0", "other|bias missing", lambda x, w, b: F.group_norm(x, 4, w) + b[0]),
    ]
    both = (
        "unbiased variance",
        "eps 1e-6",
        "eps outside of the root",
        "weight + 1",
        "mean is not subtracted",
        "no root",
    )
    return wrongs + also(written, ln, wrongs, *both, "no root")


def _products() -> list[Wrong]:
    name = "matrix product"
    long = lambda dtype: (drawn(24, 1024, dtype=dtype), drawn(1024, 24, seed=1, dtype=dtype))  # noqa: E731
    square = lambda dtype: (drawn(40, 40, dtype=dtype), drawn(40, 40, seed=1, dtype=dtype))  # noqa: E731
    conv, gelu = "convolution", "linear and gelu"
    return [
        Wrong(name, "tail of K", "tail|operation left out", lambda a, b: a[:, :256] @ b[:256]),
        Wrong(name, "sums in bfloat16", "accumulation", product_in_steps, BF16, long),
        Wrong(
            name,
            "sums in float16",
            "accumulation",
            lambda a, b: product_in_steps(a, b, torch.float16),
            torch.float16,
            long,
        ),
        Wrong(name, "operands in bfloat16", "precision", lambda a, b: a.bfloat16().float() @ b.bfloat16().float()),
        Wrong(
            name,
            "operands in tf32",
            "precision",
            lambda a, b: (
                ((a.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
                @ ((b.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
            ),
        ),
        Wrong(name, "second transposed", "permuted|operands swapped", lambda a, b: a @ b.T, inputs=square),
        Wrong(name, "first transposed", "permuted|operands swapped", lambda a, b: a.T @ b, inputs=square),
        Wrong(name, "exchanged", "operands swapped", lambda a, b: b @ a, inputs=square),
        Wrong(name, "result transposed", "permuted", lambda a, b: (a @ b).T, inputs=square),
        Wrong(name, "half", "scale", lambda a, b: (a @ b) / 2),
        Wrong(name, "0.1 % off", "scale", lambda a, b: (a @ b) * 1.001),
        Wrong(name, "negative", "scale", lambda a, b: -(a @ b)),
        Wrong(name, "partial sums twice", "other|tail", lambda a, b: a @ b + a[:, 250:] @ b[250:]),
        Wrong(name, "one tile", "tail", lambda a, b: (a @ b) * (torch.arange(40) < 32)),
        Wrong(name, "last row", "tail", rows_left(torch.matmul, 1)),
        Wrong(name, "by way of float16", "precision|scale", lambda a, b: (a @ b).half().float()),
        Wrong(name, "rolled", "position|permuted", lambda a, b: (a @ b).roll(1, 0)),
        Wrong(gelu, "bias left out", "bias missing|argument ignored", lambda x, w, b: F.gelu(x @ w.T)),
        Wrong(gelu, "bias added twice", "bias missing|scale|other", lambda x, w, b: F.gelu(x @ w.T + 2 * b)),
        Wrong(gelu, "bias after gelu", "bias missing|operation replaced|other", lambda x, w, b: F.gelu(x @ w.T) + b),
        Wrong(gelu, "gelu left out", "activation|operation left out", lambda x, w, b: x @ w.T + b),
        Wrong(gelu, "relu", "activation", lambda x, w, b: F.relu(x @ w.T + b)),
        Wrong(gelu, "tanh", "activation", lambda x, w, b: F.gelu(x @ w.T + b, approximate="tanh")),
        Wrong(gelu, "silu", "activation", lambda x, w, b: F.silu(x @ w.T + b)),
        Wrong(gelu, "x by way of bfloat16", "precision", lambda x, w, b: F.gelu(F.linear(x.bfloat16().float(), w, b))),
        Wrong(
            gelu,
            "product by way of bfloat16",
            "precision",
            lambda x, w, b: F.gelu(F.linear(x, w).bfloat16().float() + b),
        ),
        Wrong(conv, "kernel flipped", "permuted", lambda x, w: F.conv2d(x, w.flip(2, 3), padding=1)),
        Wrong(conv, "kernel transposed", "permuted", lambda x, w: F.conv2d(x, w.mT, padding=1)),
        Wrong(
            conv,
            "edge replicated",
            "other|tail|operation replaced",
            lambda x, w: F.conv2d(F.pad(x, (1, 1, 1, 1), "replicate"), w),
        ),
        Wrong(
            conv,
            "last channel left out",
            "tail|operation left out",
            lambda x, w: F.conv2d(x[:, :-1], w[:, :-1], padding=1),
        ),
        Wrong(conv, "moved by one", "position", lambda x, w: F.conv2d(F.pad(x, (2, 0, 1, 1)), w)),
        Wrong(conv, "channels in another order", "permuted", lambda x, w: F.conv2d(x, w.flip(0), padding=1)),
        Wrong(
            conv,
            "in bfloat16",
            "precision",
            lambda x, w: F.conv2d(x.bfloat16().float(), w.bfloat16().float(), padding=1),
        ),
        Wrong(conv, "border not written", "tail", tail(lambda x, w: F.conv2d(x, w, padding=1), 1)),
    ]


def _attentions() -> list[Wrong]:
    name, causal = "attention", "causal attention"
    return [
        Wrong(name, "not scaled", "scale|operation left out", lambda q, k, v: attend(q, k, v, 1.0)),
        Wrong(name, "scaled by 1 / d", "scale", lambda q, k, v: attend(q, k, v, 1 / 16)),
        Wrong(name, "scaled by the length", "scale", lambda q, k, v: attend(q, k, v, 37**-0.5)),
        Wrong(name, "causal", "mask|operation replaced", lambda q, k, v: attend(q, k, v, diagonal=1)),
        Wrong(name, "keys and values exchanged", "operands swapped", lambda q, k, v: attend(q, v, k)),
        Wrong(name, "queries and keys exchanged", "operands swapped", lambda q, k, v: attend(k, q, v)),
        Wrong(name, "whole blocks only", "tail|mask", whole_blocks),
        Wrong(name, "padding is not masked", "tail|mask|scale|out of bounds", padded_keys),
        Wrong(name, "not rescaled", "other|operation left out|stale or unstable|scale", stale_flash),
        Wrong(name, "softmax over queries", "axis", lambda q, k, v: (q @ k.mT / 4).softmax(-2) @ v),
        Wrong(
            name,
            "probabilities in bfloat16",
            "precision",
            lambda q, k, v: (q @ k.mT / 4).softmax(-1).bfloat16().float() @ v,
        ),
        Wrong(
            name, "probabilities in float16", "precision", lambda q, k, v: (q @ k.mT / 4).softmax(-1).half().float() @ v
        ),
        Wrong(
            name, "scores in bfloat16", "precision", lambda q, k, v: (q @ k.mT / 4).bfloat16().float().softmax(-1) @ v
        ),
        Wrong(name, "no softmax", "operation left out", lambda q, k, v: (q @ k.mT / 4) @ v),
        Wrong(name, "heads exchanged", "permuted|position", lambda q, k, v: attend(q, k, v).flip(1)),
        Wrong(name, "last query", "tail", lambda q, k, v: F.pad(attend(q, k, v)[..., :-1, :], (0, 0, 0, 1))),
        Wrong(causal, "one too far", "mask", lambda q, k, v: attend(q, k, v, diagonal=2)),
        Wrong(causal, "without itself", "mask", lambda q, k, v: attend(q, k, v, diagonal=0)),
        Wrong(causal, "no mask", "mask", lambda q, k, v: attend(q, k, v)),
        Wrong(
            causal,
            "other triangle",
            "mask",
            lambda q, k, v: (q @ k.mT / 4).masked_fill(torch.ones(37, 37).tril(-1).bool(), -math.inf).softmax(-1) @ v,
        ),
        Wrong(
            causal,
            "window of 8",
            "mask",
            lambda q, k, v: (
                (q @ k.mT / 4).masked_fill(~torch.ones(37, 37).tril().triu(-7).bool(), -math.inf).softmax(-1) @ v
            ),
        ),
        Wrong(causal, "masked by zero", "mask", lambda q, k, v: (q @ k.mT / 4).tril().softmax(-1) @ v),
        Wrong(causal, "not scaled", "scale", lambda q, k, v: attend(q, k, v, 1.0, 1)),
    ]


def _others() -> list[Wrong]:
    ce, experts = "cross entropy", "experts"
    return [
        Wrong(ce, "sum", "scale|operation replaced|statistics", lambda x, t: loss(x, t, of=1)),
        Wrong(ce, "off by one row", "tail|scale", lambda x, t: loss(x, t, rows=31, of=32)),
        Wrong(ce, "next target", "position|other", lambda x, t: loss(x, t.roll(1))),
        Wrong(
            ce,
            "smoothed",
            "other|scale|bias missing|operation replaced",
            lambda x, t: F.cross_entropy(x.float(), t, label_smoothing=0.1),
        ),
        Wrong(
            ce,
            "no maximum",
            "overflow",
            lambda x, t: loss(x, t, no_max=True),
            inputs=lambda dtype: (drawn(32, 101) * 60, torch.arange(32) * 3 % 101),
        ),
        Wrong(ce, "base 2", "scale", lambda x, t: loss(x, t) / math.log(2)),
        Wrong(ce, "zero", "constant", lambda x, t: torch.zeros(())),
        Wrong("gelu", "tanh", "activation", right.tanh_gelu),
        Wrong("gelu", "sigmoid", "activation", lambda x: x * torch.sigmoid(1.702 * x)),
        Wrong("gelu", "relu", "activation", F.relu),
        Wrong("gelu", "silu", "activation", F.silu),
        Wrong("gelu", "tanh in bfloat16", "activation|precision", wide(right.tanh_gelu), BF16),
        Wrong("gelu by tanh", "erf", "activation", right.gelu_by_erf),
        Wrong(
            "gelu by tanh",
            "constant",
            "scale|activation|other",
            lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3))),
        ),
        Wrong("swiglu", "gate and value exchanged", "operands swapped", lambda x, g: F.silu(x) * g),
        Wrong("swiglu", "gelu", "activation", lambda x, g: F.gelu(g) * x),
        Wrong(
            "swiglu",
            "sigmoid only",
            "activation|operation left out|operation replaced",
            lambda x, g: torch.sigmoid(g) * x,
        ),
        Wrong("swiglu", "value ignored", "argument ignored|operation left out", lambda x, g: F.silu(g)),
        Wrong("swiglu", "silu rounded", "precision", lambda x, g: F.silu(g).bfloat16().float() * x),
        Wrong("rope", "turned back", "scale|operation replaced|position|other", lambda x, c, s: rope_as(x, c, s, 1.0)),
        Wrong("rope", "interleaved", "permuted|position|other", lambda x, c, s: rope_as(x, c, s, interleaved=True)),
        Wrong("rope", "one position on", "position", lambda x, c, s: rope_as(x, c.roll(-1, 0), s.roll(-1, 0))),
        Wrong("rope", "sines and cosines exchanged", "operands swapped", lambda x, c, s: rope_as(x, s, c)),
        Wrong("rope", "its input", "input returned", lambda x, c, s: x.clone()),
        Wrong("scan", "exclusive", "position|operation left out|operation replaced|tail", lambda x: x.cumsum(-1) - x),
        Wrong(
            "scan",
            "carry is lost",
            "tail|other|operation left out",
            lambda x: torch.cat([p.cumsum(-1) for p in x.split(16, -1)], -1),
        ),
        Wrong("scan", "other axis", "axis", lambda x: x.cumsum(0)),
        Wrong("scan", "backwards", "permuted|position", lambda x: x.flip(-1).cumsum(-1).flip(-1)),
        Wrong(
            "scan",
            "total in bfloat16",
            "accumulation|precision",
            lambda x: torch.stack([in_steps(x[..., : i + 1]) for i in range(70)], -1),
        ),
        Wrong("sum", "in bfloat16", "accumulation|precision", in_steps),
        Wrong("sum", "tail", "tail", lambda x: x[..., :992].sum(-1)),
        Wrong("sum", "mean", "scale|operation replaced", lambda x: x.mean(-1)),
        Wrong("sum", "of absolute values", "operation replaced|other", lambda x: x.abs().sum(-1)),
        Wrong("sum", "other order of rows", "permuted", lambda x: x.sum(-1).flip(0)),
        Wrong("sum", "remembers", "stale or unstable", Remembers(lambda x: x.sum(-1))),
        Wrong("top three", "smallest", "operation replaced|other", lambda x: tuple(x.topk(3, -1, largest=False))),
        Wrong(
            "top three",
            "second to fourth",
            "position|permuted|other",
            lambda x: tuple(t[..., 1:] for t in x.topk(4, -1)),
        ),
        Wrong(
            "top three",
            "places from one on",
            "bias missing|position|other",
            lambda x: (x.topk(3, -1).values, x.topk(3, -1).indices + 1),
        ),
        Wrong(
            "top three",
            "places in reverse",
            "permuted",
            lambda x: (x.topk(3, -1).values, x.topk(3, -1).indices.flip(-1)),
        ),
        Wrong(experts, "one expert", "other|operation replaced|tail", lambda x, g, w: sub_experts(x, g, w, k=1)),
        Wrong(
            experts,
            "normalized",
            "scale|other|operation replaced",
            lambda x, g, w: sub_experts(x, g, w, normalized=True),
        ),
        Wrong(
            experts,
            "not weighted",
            "operation left out|scale|other",
            lambda x, g, w: sub_experts(x, g, w, unweighted=True),
        ),
        Wrong(
            experts,
            "last expert is left out",
            "tail|operation left out|other",
            lambda x, g, w: sub_experts(x, g, w, fewer=1),
        ),
        Wrong(
            experts,
            "matrices transposed",
            "permuted|operands swapped",
            lambda x, g, w: sub_experts(x, g, w, transposed=True),
        ),
    ]


WRONG = (*_softmaxes(), *_norms(), *_products(), *_attentions(), *_others())
