"""Every mistake of the catalog: planted, it is named; written otherwise but right, nothing is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from glassengine.judge.hypotheses.mistakes.catalog import FAMILIES
from glassengine.judge.hypotheses.trials.question import Question, noise_of
from glassengine.judge.hypotheses.trials.trial import Trial
from glassengine.judge.pieces import Piece
from glassengine.results import Hint
from glassengine.results.hints import KINDS
from tests.judge.hypotheses.asking import explain

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Planted:
    """A right function, a wrong one, and another right one; what is told of the wrong one."""

    right: Function
    wrong: Function
    twin: Function
    kind: str
    says: str
    inputs: tuple[str, ...] = ("x",)


def drawn(name: str) -> Tensor:
    """Return the tensor of a name; what begins with b, g or w is a weight."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    shapes: dict[str, tuple[int, ...]] = {
        "x": (2, 5, 16),
        "y": (2, 5, 16),
        "bias": (16,),
        "gain": (16,),
        "weight": (16, 16),
        "weight2": (16, 16),
        "weights of three": (15, 16),
        "biases of three": (15,),
        "kernel": (6, 3, 3, 3),
        "kernel1": (6, 3, 3),
        "image": (2, 3, 8, 8),
        "sound": (2, 3, 12),
        "q": (2, 4, 6, 8),
        "k": (2, 4, 6, 8),
        "v": (2, 4, 6, 8),
        "k2": (2, 2, 6, 8),
        "v2": (2, 2, 6, 8),
        "q5": (2, 4, 5, 8),
        "cos": (6, 8),
        "sin": (6, 8),
        "table": (12, 16),
        "mask": (6, 6),
    }
    if name == "ids":
        return torch.tensor([[3, 1, 4, 7, 5], [9, 2, 6, 8, 3]])
    if name == "bands":
        return 1e4 ** -(torch.arange(4.0) / 4)
    if name in ("cos", "sin"):
        table = torch.arange(6)[:, None] * (1.0 / 100 ** (torch.arange(4) / 4))
        table = torch.cat([table, table], -1)
        return table.cos() if name == "cos" else table.sin()
    value = torch.randn(shapes[name], generator=generator)
    if name == "mask":
        return value > 0
    return value + 1 if name == "gain" else value


def hints_of(planted: Planted, made: Function) -> list[Hint]:
    tensors = [drawn(name) for name in planted.inputs]
    module = make_fx(lambda *given: (planted.right(*given),), pre_dispatch=True)(*tensors)
    placeholders = module.graph.find_nodes(op="placeholder")
    names = dict(zip((node.name for node in placeholders), planted.inputs, strict=True))
    end = module.graph.output_node().all_input_nodes[0].name
    piece = Piece(module, dict(zip(names, tensors, strict=True)), (end,))
    trial = Trial(piece)
    actual = made(*tensors)
    weights = frozenset(node for node, name in names.items() if name[0] in "bgw" or name.startswith("kernel"))
    others = {name: drawn(name).double() for name in ("y", "weight2", "gain", "bias") if name not in planted.inputs}
    question = Question(trial, actual.double(), None, noise_of(piece, trial.right, actual), names, weights, others)
    return explain(question)


def rms_norm(x: Tensor, gain: Tensor, eps: float = 1e-5) -> Tensor:
    return gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def rms_norm_otherwise(x: Tensor, gain: Tensor) -> Tensor:
    return (x / torch.sqrt((x * x).sum(-1, keepdim=True) / 16 + 1e-5)) * gain


def gelu_by_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def glu(a: Tensor, b: Tensor) -> Tensor:
    return torch.sigmoid(a) * b


def heads(x: Tensor) -> Tensor:
    return x.view(2, 5, 4, 4).transpose(1, 2)


def attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None, scale: float = 8**-0.5, dim: int = -1
) -> Tensor:
    scores = q @ k.transpose(-1, -2) * scale
    scores = scores if seen is None else scores.masked_fill(~seen, -math.inf)
    return scores.softmax(dim) @ v


def product(x: Tensor, w: Tensor, b: Tensor, order: tuple[int, ...]) -> Tensor:
    """Attention of what one packed weight makes, its parts in an order; the bias stays as it is."""
    rows = torch.cat([w.chunk(3)[i] for i in order]) if order != (0, 1, 2) else w
    q, k, v = F.linear(x, rows, b).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v)


def split(x: Tensor, sizes: tuple[int, int], *, last: bool = False) -> Tensor:
    """Heads before or behind their width."""
    apart = x[:, 0].reshape(2, 6, *sizes)
    return apart.permute(0, 3, 1, 2) if last else apart.transpose(1, 2)


def half(x: Tensor) -> Tensor:
    return torch.cat([-x[..., 4:], x[..., :4]], -1)


def neighbors(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def rotated(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return q * cos + half(q) * sin


def rotated_otherwise(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = torch.complex(q[..., :4], q[..., 4:]) * torch.complex(cos[:, :4], sin[:, :4])
    return torch.cat([pairs.real, pairs.imag], -1)


def causal(size: int = 6, by: int = 0) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril(by)


def added(seen: Tensor) -> Tensor:
    """Return a mask that is added to scores: -9984 instead of -1e4, as bfloat16 has it."""
    return torch.where(seen, 0.0, -9984.0)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def sdpa_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


QKV = ("q", "k", "v")
LINEAR = ("x", "weight", "bias")

PLANTED = {
    "eps of a norm by hand": Planted(
        rms_norm, lambda x, g: rms_norm(x, g, 1e-1), rms_norm_otherwise, "eps", "0.1 in the candidate", ("x", "gain")
    ),
    "eps of a norm": Planted(
        lambda x, g, b: F.layer_norm(x, (16,), g, b, 1e-5),
        lambda x, g, b: F.layer_norm(x, (16,), g, b, 1e-3),
        lambda x, g, b: (x - x.mean(-1, True)) / (x.var(-1, False, keepdim=True) + 1e-5).sqrt() * g + b,
        "eps",
        ": 1e-05 in the baseline, 0.001",
        ("x", "gain", "bias"),
    ),
    "gelu by tanh": Planted(
        F.gelu, gelu_by_tanh, lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)), "activation", "tanh"
    ),
    "quick gelu": Planted(
        gelu_by_tanh,
        lambda x: x * torch.sigmoid(1.702 * x),
        lambda x: F.gelu(x, approximate="tanh"),
        "activation",
        "gelu (tanh) in the baseline, quick_gelu in the candidate",
    ),
    "silu by hand": Planted(lambda x: x * torch.sigmoid(x), F.relu, F.silu, "activation", "silu in the baseline, relu"),
    "no activation": Planted(F.silu, lambda x: x.clone(), lambda x: x * x.sigmoid(), "activation", "silu is missing"),
    "scale missing": Planted(sdpa, lambda q, k, v: attention(q, k, v, scale=1.0), attention, "scale", "scale", QKV),
    "scale twice": Planted(
        sdpa, lambda q, k, v: attention(q, k, v, scale=1 / 8), attention, "scale", "0.125 in the candidate", QKV
    ),
    "any scale": Planted(
        sdpa, lambda q, k, v: attention(q, k, v, scale=0.31), attention, "scale", "0.31 in the candidate", QKV
    ),
    "softmax over queries": Planted(
        sdpa, lambda q, k, v: attention(q, k, v, dim=-2), attention, "transposed", "softmax", QKV
    ),
    "bias missing": Planted(
        F.linear, lambda x, w, b: F.linear(x, w), lambda x, w, b: x @ w.T + b, "bias missing", "bias", LINEAR
    ),
    "transposed weight": Planted(
        F.linear, lambda x, w, b: x @ w + b, lambda x, w, b: x @ w.T + b, "transposed", "weight", LINEAR
    ),
    "residual missing": Planted(
        lambda x, y: x + y, lambda x, y: y.clone(), lambda x, y: y + x, "other", "x is not added", ("x", "y")
    ),
    "residual twice": Planted(
        lambda x, y: x + y, lambda x, y: x + y + y, lambda x, y: y + x, "scale", "y is added twice", ("x", "y")
    ),
    "gain plus one": Planted(
        rms_norm, lambda x, g: rms_norm(x, 1 + g), rms_norm_otherwise, "scale", "1 + gain", ("x", "gain")
    ),
    "gain missing": Planted(
        rms_norm,
        lambda x, g: rms_norm(x, torch.ones(16)),
        rms_norm_otherwise,
        "scale",
        "gain is not multiplied",
        ("x", "gain"),
    ),
    "mean not subtracted": Planted(
        lambda x, g, b: F.layer_norm(x, (16,), g, b),
        lambda x, g, b: rms_norm(x, g) + b,
        lambda x, g, b: (x - x.mean(-1, True)) / (x.var(-1, False, keepdim=True) + 1e-5).sqrt() * g + b,
        "other",
        "rms_norm instead of layer_norm",
        ("x", "gain", "bias"),
    ),
    "unbiased variance": Planted(
        lambda x: x / ((x - x.mean(-1, True)).pow(2).mean(-1, True) + 1e-5).sqrt(),
        lambda x: x / (x.var(-1, keepdim=True) + 1e-5).sqrt(),
        lambda x: x / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt(),
        "other",
        "unbiased",
    ),
    "sum for mean": Planted(
        lambda x: x.mean(1), lambda x: x.sum(1), lambda x: x.sum(1) / 5, "scale", "sum instead of mean"
    ),
    "another dimension": Planted(
        lambda x: x.softmax(-1),
        lambda x: x.softmax(1),
        lambda x: x.exp() / x.exp().sum(-1, True),
        "transposed",
        ": -1 in the baseline, 1 in",
    ),
    "key and value": Planted(
        sdpa, lambda q, k, v: sdpa(q, v, k), attention, "swapped", "key and value are exchanged", QKV
    ),
    "gate and up": Planted(
        lambda x, y: F.silu(x) * y,
        lambda x, y: F.silu(y) * x,
        lambda x, y: y * x * x.sigmoid(),
        "swapped",
        "silu is on the other factor",
        ("x", "y"),
    ),
    "operands of a difference": Planted(
        lambda x, y: x - y, lambda x, y: y - x, lambda x, y: -y + x, "swapped", "exchanged", ("x", "y")
    ),
    "parts of a split": Planted(
        lambda x: glu(*x.chunk(2, -1)),
        lambda x: glu(*reversed(x.chunk(2, -1))),
        lambda x: x[..., 8:] * torch.sigmoid(x[..., :8]),
        "swapped",
        "are exchanged",
    ),
    "order of a concatenation": Planted(
        lambda x, y: torch.cat([x, y], -1),
        lambda x, y: torch.cat([y, x], -1),
        lambda x, y: torch.cat([x + 0, y], -1),
        "swapped",
        "parts 0 and 1 of cat",
        ("x", "y"),
    ),
    "heads by their width": Planted(
        heads,
        lambda x: x.view(2, 5, 4, 4).permute(0, 3, 1, 2),
        lambda x: torch.stack(x.split(4, -1), 1),
        "permuted",
        "parts are interleaved",
    ),
    "heads put together": Planted(
        lambda q: q.transpose(1, 2).reshape(2, 6, 32),
        lambda q: q.permute(0, 2, 3, 1).reshape(2, 6, 32),
        lambda q: torch.cat(list(q.unbind(1)), -1),
        "permuted",
        "parts are interleaved",
        ("q",),
    ),
    "heads not transposed": Planted(
        lambda q: q.transpose(1, 2).reshape(2, 6, 32),
        lambda q: q.reshape(2, 6, 32),
        lambda q: torch.cat(list(q.unbind(1)), -1),
        "transposed",
        "",
        ("q",),
    ),
    "keys shared in turn": Planted(
        grouped,
        lambda q, k, v: sdpa(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)),
        lambda q, k, v: sdpa(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)),
        "permuted",
        "in turn",
        ("q", "k2", "v2"),
    ),
    "rotation of neighbors": Planted(
        rotated,
        lambda q, c, s: q * c[:, [0, 0, 1, 1, 2, 2, 3, 3]] + neighbors(q) * s[:, [0, 0, 1, 1, 2, 2, 3, 3]],
        rotated_otherwise,
        "position",
        "neighbors are rotated in the candidate",
        ("q", "cos", "sin"),
    ),
    "rotation of neighbors by tables of halves": Planted(
        rotated,
        lambda q, c, s: q * c + neighbors(q) * s,
        rotated_otherwise,
        "position",
        "neighbors",
        ("q", "cos", "sin"),
    ),
    "rotation the other way": Planted(
        rotated, lambda q, c, s: q * c - half(q) * s, rotated_otherwise, "scale", "", ("q", "cos", "sin")
    ),
    "sine and cosine": Planted(
        rotated,
        lambda q, c, s: rotated(q, s, c),
        rotated_otherwise,
        "swapped",
        "cos and sin are exchanged",
        ("q", "cos", "sin"),
    ),
    "base of a rotation": Planted(
        lambda x: torch.cos(torch.arange(6.0)[:, None] / 10000 ** (torch.arange(4.0) / 4)),
        lambda x: torch.cos(torch.arange(6.0)[:, None] / 500000 ** (torch.arange(4.0) / 4)),
        lambda x: torch.cos(torch.arange(6.0)[:, None] * torch.exp(-math.log(1e4) * (torch.arange(4.0) / 4))),
        "position",
        ": 10000 in the baseline, 500000 in",
    ),
    "base of a buffer": Planted(
        lambda bands: torch.arange(6.0)[:, None] * bands,
        lambda bands: torch.arange(6.0)[:, None] * 5e5 ** -(torch.arange(4.0) / 4),
        lambda bands: bands * torch.arange(6.0)[:, None],
        "position",
        "(theta): 10000 in the baseline, 500000 in the candidate",
        ("bands",),
    ),
    "eps of two norms": Planted(
        lambda x, g: rms_norm(rms_norm(x, g).cumsum(1), g),
        lambda x, g: rms_norm(rms_norm(x, g, 1e-1).cumsum(1), g, 1e-1),
        lambda x, g: rms_norm_otherwise(rms_norm_otherwise(x, g).cumsum(1), g),
        "eps",
        "in 2 places",
        ("x", "gain"),
    ),
    "factor of another shape lost": Planted(
        lambda x, g: x[..., :1] * g + x.flip(-1),
        lambda x, g: x[..., :1] + x.flip(-1),
        lambda x, g: torch.addcmul(x.flip(-1), x[..., :1], g),
        "scale",
        "gain is not multiplied",
        ("x", "gain"),
    ),
    "activation lost in each branch": Planted(
        lambda x, g: torch.stack([F.relu(x), F.relu(x * g), F.relu(-x)]).sum(0),
        lambda x, g: torch.stack([x, x * g, -x]).sum(0),
        lambda x, g: F.relu(x) + F.relu(x * g) + F.relu(-x),
        "activation",
        "relu in the baseline, nothing in the candidate, in 3 places",
        ("x", "gain"),
    ),
    "unbiased variance of a norm": Planted(
        lambda x: F.layer_norm(x, (16,)),
        lambda x: (x - x.mean(-1, True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(),
        lambda x: (x - x.mean(-1, True)) / (x.var(-1, False, keepdim=True) + 1e-5).sqrt(),
        "other",
        "unbiased",
    ),
    "eps outside of the root": Planted(
        lambda x: F.layer_norm(x, (16,), eps=1e-3),
        lambda x: (x - x.mean(-1, True)) / (x.std(-1, correction=0, keepdim=True) + 1e-3),
        lambda x: (x - x.mean(-1, True)) / (x.var(-1, False, keepdim=True) + 1e-3).sqrt(),
        "eps",
        "not below it",
    ),
    "softmax missing": Planted(
        sdpa, lambda q, k, v: q @ k.mT @ v * 8**-0.5, attention, "other", "softmax is missing", QKV
    ),
    "mask after the softmax": Planted(
        sdpa_causal,
        lambda q, k, v: ((q @ k.mT * 8**-0.5).softmax(-1) * causal()) @ v,
        lambda q, k, v: attention(q, k, v, causal()),
        "mask",
        "multiplied after the softmax",
        QKV,
    ),
    "positions from one": Planted(
        lambda ids, t: t[torch.arange(5)] + t[ids],
        lambda ids, t: t[torch.arange(1, 6)] + t[ids],
        lambda ids, t: F.embedding(ids, t) + t[:5],
        "position",
        "",
        ("ids", "table"),
    ),
    "ids by one": Planted(
        lambda ids, t: F.embedding(ids, t),
        lambda ids, t: F.embedding(ids - 1, t),
        lambda ids, t: t[ids],
        "position",
        "ids is 1 too small",
        ("ids", "table"),
    ),
    "causal mask missing": Planted(
        sdpa_causal, sdpa, lambda q, k, v: attention(q, k, v, causal()), "mask", "causal mask is missing", QKV
    ),
    "causal part of a mask missing": Planted(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, causal() & (torch.arange(6) < 5)),
        lambda q, k, v: attention(q, k, v, torch.arange(6) < 5),
        lambda q, k, v: attention(q, k, v, causal() & (torch.arange(6) < 5)),
        "mask",
        "the causal part of the mask is missing",
        QKV,
    ),
    "causal part of a mask moved": Planted(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, causal() & (torch.arange(6) < 5)),
        lambda q, k, v: attention(q, k, v, causal(by=1) & (torch.arange(6) < 5)),
        lambda q, k, v: attention(q, k, v, causal() & (torch.arange(6) < 5)),
        "mask",
        "a position sees the next position",
        QKV,
    ),
    "a causal mask too many": Planted(
        sdpa, sdpa_causal, attention, "mask", "a causal mask that the baseline has not", QKV
    ),
    "a mask by one": Planted(
        sdpa_causal,
        lambda q, k, v: attention(q, k, v, causal(by=1)),
        lambda q, k, v: attention(q, k, v, causal()),
        "mask",
        "sees the next position",
        QKV,
    ),
    "a window": Planted(
        sdpa_causal,
        lambda q, k, v: attention(q, k, v, causal() & ~causal(by=-3)),
        lambda q, k, v: attention(q, k, v, causal()),
        "mask",
        "a window of 3 positions",
        QKV,
    ),
    "an inverted mask": Planted(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m | torch.eye(6, dtype=torch.bool)),
        lambda q, k, v, m: attention(q, k, v, ~m | torch.eye(6, dtype=torch.bool)),
        lambda q, k, v, m: attention(q, k, v, m | torch.eye(6, dtype=torch.bool)),
        "mask",
        "mask is inverted",
        (*QKV, "mask"),
    ),
    "the causal part of a mask of numbers, as bfloat16 rounds -1e4": Planted(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, added(causal() & (torch.arange(6) < 5))),
        lambda q, k, v: attention(q, k, v, torch.arange(6) < 5),
        lambda q, k, v: attention(q, k, v, causal() & (torch.arange(6) < 5)),
        "mask",
        "the causal part of the mask is missing",
        QKV,
    ),
    "a mask of numbers that is not added": Planted(
        lambda q, k, mask: q @ k.mT + torch.where(mask, 0.0, -1e4),
        lambda q, k, mask: q @ k.mT,
        lambda q, k, mask: (k @ q.mT).mT + (~mask) * -1e4,
        "mask",
        "the mask is not added",
        ("q", "k", "mask"),
    ),
    "parts in another order where rows are put together": Planted(
        lambda q: q.reshape(2, 24, 2, 4).transpose(1, 2),
        lambda q: q.reshape(2, 24, 4, 2).permute(0, 3, 1, 2),
        lambda q: q.flatten(1, 2).unflatten(-1, (2, 4)).transpose(1, 2),
        "permuted",
        "an axis is taken apart as 4 x 2 in the candidate",
        ("q",),
    ),
    "flipped kernel": Planted(
        F.conv2d,
        lambda x, k: F.conv2d(x, k.flip(2, 3)),
        lambda x, k: (F.unfold(x, 3).transpose(1, 2) @ k.flatten(1).T).transpose(1, 2).reshape(2, 6, 6, 6),
        "permuted",
        "kernel is flipped",
        ("image", "kernel"),
    ),
    "height and width of a kernel": Planted(
        F.conv2d,
        lambda x, k: F.conv2d(x, k.mT),
        lambda x, k: F.conv2d(x, k + 0),
        "transposed",
        "height and width",
        ("image", "kernel"),
    ),
    "padding of a convolution": Planted(
        lambda x, k: F.conv2d(x, k, padding=1),
        lambda x, k: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), k),
        lambda x, k: F.conv2d(F.pad(x, (1, 1, 1, 1)), k),
        "other",
        "padding by reflect",
        ("image", "kernel"),
    ),
    "padding before a convolution": Planted(
        lambda x, k: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), k),
        lambda x, k: F.conv2d(x, k, padding=1),
        lambda x, k: F.conv2d(F.pad(F.pad(x, (1, 1, 0, 0), mode="circular"), (0, 0, 1, 1), mode="circular"), k),
        "other",
        "mode of pad: circular in the baseline, constant in the candidate",
        ("image", "kernel"),
    ),
    "padding on one side": Planted(
        lambda x, k: F.conv1d(F.pad(x, (2, 0)), k),
        lambda x, k: F.conv1d(F.pad(x, (0, 2)), k),
        lambda x, k: F.conv1d(x, k, padding=2)[..., :12],
        "position",
        ": [2, 0] in the baseline, [0, 2] in the candidate",
        ("sound", "kernel1"),
    ),
    "padding counted": Planted(
        lambda x: F.avg_pool2d(x, 3, 1, 1),
        lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
        lambda x: F.conv2d(x.flatten(0, 1)[:, None], torch.full((1, 1, 3, 3), 1 / 9), padding=1).reshape(2, 3, 8, 8),
        "other",
        ": True in the baseline, False",
        ("image",),
    ),
    "corners": Planted(
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True),
        lambda x: F.interpolate(x, size=(16, 16), mode="bilinear"),
        "other",
        "align_corners",
        ("image",),
    ),
    "pooling": Planted(
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, 2),
        lambda x: x.reshape(2, 3, 4, 2, 4, 2).amax((3, 5)),
        "other",
        "avg_pool2d",
        ("image",),
    ),
    "weights of an attention transposed": Planted(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        lambda q, k, v: (q @ k.mT * 8**-0.5).softmax(-1).mT @ v,
        attention,
        "transposed",
        "the weights are transposed",
        ("q", "k", "v"),
    ),
    "softmax over queries beside a bias": Planted(
        lambda q, k, v, y: F.scaled_dot_product_attention(q, k, v, y[0, :, :6].T @ y[0, :, :6]),
        lambda q, k, v, y: (q @ k.mT * 8**-0.5 + y[0, :, :6].T @ y[0, :, :6]).softmax(-2) @ v,
        lambda q, k, v, y: (q @ k.mT * 8**-0.5 + y[0, :, :6].T @ y[0, :, :6]).softmax(-1) @ v,
        "transposed",
        "over the queries",
        ("q", "k", "v", "y"),
    ),
    "queries and keys of a packed weight": Planted(
        lambda x, w, b: product(x, w, b, (0, 1, 2)),
        lambda x, w, b: product(x, w, b, (1, 0, 2)),
        lambda x, w, b: attention(*F.linear(x, w, b).chunk(3, -1), scale=5**-0.5),
        "permuted",
        "thirds 0 and 1 are exchanged",
        ("x", "weights of three", "biases of three"),
    ),
    "heads of all three": Planted(
        lambda q, k, v: F.scaled_dot_product_attention(*(split(t, (4, 2)) for t in (q, k, v))),
        lambda q, k, v: F.scaled_dot_product_attention(
            *(t[:, 0].reshape(2, 6, 2, 4).permute(0, 3, 1, 2) for t in (q, k, v))
        ),
        lambda q, k, v: attention(*(split(t, (4, 2)) for t in (q, k, v)), scale=2**-0.5),
        "permuted",
        "heads are interleaved",
        ("q", "k", "v"),
    ),
    "mean of several": Planted(
        lambda x: x.unflatten(1, (1, 5)).max(dim=2).values,
        lambda x: x.mean(1, keepdim=True),
        lambda x: x.amax(1, keepdim=True),
        "other",
        "mean instead of max",
    ),
    "norm over another axis": Planted(
        lambda x: F.layer_norm(x, (16,)),
        lambda x: (
            (x - x.mean(1, keepdim=True))
            / (1e-5 + (x - x.mean(1, keepdim=True)).square().mean(-1, keepdim=True)).sqrt()
        ),
        lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt(),
        "transposed",
        "the mean is over axis 1 of 3",
    ),
    "pooling of an image": Planted(
        lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda x: F.adaptive_max_pool2d(x, 1),
        lambda x: x.mean((2, 3), keepdim=True),
        "other",
        "adaptive_max_pool2d",
        ("image",),
    ),
    "scores cut off": Planted(
        lambda x: x * 2,
        lambda x: (x * 2).clamp(-0.5, 0.5),
        lambda x: x + x,
        "other",
        "the result of mul is cut off below -0.5 and above 0.5",
    ),
    "fill of a mask": Planted(
        lambda x, y: x.masked_fill(torch.ones(5, 16).triu(1).bool(), y.amin() - 9) / 4,
        lambda x, y: torch.where(torch.ones(5, 16).triu(1).bool(), torch.zeros_like(x), x / 4),
        lambda x, y: torch.where(torch.ones(5, 16).triu(1).bool(), (y.amin() - 9) / 4, x / 4),
        "mask",
        "what the mask hides is 0 in the candidate, -",
        ("x", "y"),
    ),
    "clamp missing": Planted(
        lambda x: x.clamp(-0.5, 0.5),
        lambda x: x.clone(),
        lambda x: x.clamp(min=-0.5).clamp(max=0.5),
        "other",
        "clamp is missing",
    ),
    "sign": Planted(lambda x: x * 2.0, lambda x: x * -2.0, lambda x: x + x, "scale", "-2"),
    "another weight": Planted(
        F.linear,
        lambda x, w, b: F.linear(x, drawn("weight2"), b),
        lambda x, w, b: x @ w.T + b,
        "swapped",
        "weight2 instead of weight",
        LINEAR,
    ),
    "another residual": Planted(
        lambda x: x * 2 + x, lambda x: x * 2 + drawn("y"), lambda x: x * 3, "swapped", "y instead of x"
    ),
    "rows permuted": Planted(
        F.linear,
        lambda x, w, b: F.linear(x, w.view(2, 8, 16).transpose(0, 1).reshape(16, 16), b),
        lambda x, w, b: x @ w.T + b,
        "permuted",
        "interleaved halves",
        LINEAR,
    ),
    "slope": Planted(
        lambda x: F.leaky_relu(x, 0.01),
        lambda x: F.leaky_relu(x, 0.2),
        lambda x: torch.where(x > 0, x, 0.01 * x),
        "activation",
        "(0.2) in the candidate",
    ),
    "alpha of an activation": Planted(
        F.elu,
        lambda x: F.elu(x, 0.5),
        lambda x: torch.where(x > 0, x, x.expm1()),
        "activation",
        "alpha of elu: 1 in the baseline, 0.5 in the candidate",
    ),
    "slice by one": Planted(
        lambda x: x[:, :-1], lambda x: x[:, 1:], lambda x: x[:, :4] + 0, "position", "moved by -1 along axis 1"
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_f33_a_planted_mistake_is_named_and_its_twin_is_not(name: str) -> None:
    planted = PLANTED[name]
    told = hints_of(planted, planted.wrong)
    assert told and told[0].kind == planted.kind and planted.says in told[0].text, told
    assert told[0].kind in KINDS
    assert hints_of(planted, planted.twin) == []


def test_families_are_ranked_by_what_they_are_worth() -> None:
    scores = [score for score, _ in FAMILIES]
    assert scores == sorted(scores, reverse=True)


def test_f35_what_a_right_port_shows_as_well_is_no_explanation() -> None:
    """Exchanged operands of a sum, a scale of one, an equal weight: none of it changes a value."""
    planted = Planted(lambda x, y: x + y, lambda x, y: y + x, lambda x, y: x + y, "", "", ("x", "y"))
    assert hints_of(planted, planted.wrong) == []


@pytest.mark.parametrize(("factor", "is_told"), [(4.0, True), (1 / 3, True), (0.99959, False)])
def test_a_factor_of_one_number_is_told_where_somebody_may_have_written_it(factor: float, is_told: bool) -> None:
    """A loss: some number makes any other of it."""
    planted = Planted(lambda x: x.sum() * 1.0, lambda x: x.sum() * factor, lambda x: x.sum(), "", "")
    assert bool(hints_of(planted, planted.wrong)) == is_told


def test_zeros_are_no_activation_of_negative_numbers() -> None:
    """What is lost is not what `relu` makes of it."""
    planted = Planted(lambda x: (-x.abs()).exp(), torch.zeros_like, lambda x: 1 / x.abs().exp(), "", "")
    assert all(hint.kind != "activation" for hint in hints_of(planted, planted.wrong))


def test_a_comparison_has_no_number_that_could_be_solved_for() -> None:
    planted = Planted(lambda x: x > 0.37, lambda x: x * x.roll(1) > 0.37, lambda x: x > 0.37, "", "")
    assert hints_of(planted, planted.wrong) == []
