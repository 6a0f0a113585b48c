"""A small transformer as three families write it, and ports of it: other names, fused products, other spellings.

`Model` is the baseline, `Port` the same computation written by somebody else; `mistake` plants one fault in the port.
Shapes: B batch, S sequence, D width, H heads, K head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, INNER, VOCABULARY, LAYERS = 32, 4, 64, 50, 2
EPSILON = 1e-5
HEAD = WIDTH // HEADS


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
        return self.weight * wide.to(x.dtype)


def angles(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [S, K]."""
    speed = 1.0 / (1000 ** (torch.arange(0, HEAD, 2).float() / HEAD))
    table = torch.arange(size).float()[:, None] * speed[None]
    table = torch.cat([table, table], -1)
    return table.cos().to(dtype), table.sin().to(dtype)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class Attention(nn.Module):
    def __init__(self, family: str) -> None:
        super().__init__()
        self.family = family
        bias = family != "llama"
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, size, _ = x.shape
        q, k, v = (p(x).view(batch, size, HEADS, HEAD).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.family == "llama":
            cosine, sine = angles(size, x.dtype)
            q, k = (t * cosine + rotate_half(t) * sine for t in (q, k))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=self.family != "bert")
        return self.o_proj(context.transpose(1, 2).reshape(batch, size, WIDTH))


class Mlp(nn.Module):
    def __init__(self, family: str) -> None:
        super().__init__()
        self.family = family
        bias = family != "llama"
        if family == "llama":
            self.gate_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.up_proj = nn.Linear(WIDTH, INNER, bias=bias)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.family == "llama":
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(F.gelu(self.up_proj(x), approximate="tanh" if self.family == "gpt2" else "none"))


class Layer(nn.Module):
    def __init__(self, family: str) -> None:
        super().__init__()
        self.family = family
        self.input_layernorm, self.post_attention_layernorm = (
            Norm() if family == "llama" else nn.LayerNorm(WIDTH, eps=EPSILON) for _ in range(2)
        )
        self.self_attn, self.mlp = Attention(family), Mlp(family)

    def forward(self, x: Tensor) -> Tensor:
        if self.family == "bert":
            x = self.input_layernorm(x + self.self_attn(x))
            return self.post_attention_layernorm(x + self.mlp(x))
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """ids [B, S] -> logits [B, S, VOCABULARY]."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(family) for _ in range(LAYERS))
        self.norm = Norm() if family == "llama" else nn.LayerNorm(WIDTH, eps=EPSILON)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


@dataclass(frozen=True)
class Style:
    """How a port is written."""

    family: str = "llama"
    fused: bool = False
    norm: str = "same"
    attention: str = "kernel"
    transposed: bool = False
    reordered: bool = False


class PortNorm(nn.Module):
    def __init__(self, norm: nn.Module, style: Style, mistake: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(norm.weight.detach().clone())  # type: ignore[operator]
        bias = getattr(norm, "bias", None)
        self.shift = None if bias is None else nn.Parameter(bias.detach().clone())
        self.style = style
        self.epsilon = EPSILON * (100 if mistake == "epsilon" else 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        if self.shift is not None:
            if self.style.norm == "same":
                return F.layer_norm(x, (WIDTH,), self.scale, self.shift, self.epsilon)
            centered = wide - wide.mean(-1, keepdim=True)
            spread = centered.square().mean(-1, keepdim=True)
            normal = centered / torch.sqrt(spread + self.epsilon)
            return (normal * self.scale.float() + self.shift.float()).to(x.dtype)
        if self.style.norm == "root":
            root = torch.sqrt((wide * wide).mean(-1, keepdim=True) + self.epsilon)
            return self.scale * (wide / root).to(x.dtype)
        if self.style.norm == "wide":
            spread = wide.pow(2).mean(-1, keepdim=True)
            return (self.scale.float() * (wide * torch.rsqrt(spread + self.epsilon))).to(x.dtype)
        if self.style.norm == "sum":
            total = torch.sum(wide**2, -1, keepdim=True) / WIDTH
            return (wide * (total + self.epsilon) ** -0.5).to(x.dtype) * self.scale
        return self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)).to(x.dtype)


class PortLinear(nn.Module):
    """Weights laid out [in, out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, style: Style) -> None:
        super().__init__()
        self.transposed = style.transposed
        self.kernel = nn.Parameter(weight.detach().t().clone() if self.transposed else weight.detach().clone())
        self.offset = None if bias is None else nn.Parameter(bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if not self.transposed:
            return F.linear(x, self.kernel, self.offset)
        product = x @ self.kernel
        return product if self.offset is None else product + self.offset


def joined(parts: list[nn.Module], style: Style) -> PortLinear:
    biases = [part.bias for part in parts]
    bias = None if biases[0] is None else torch.cat(biases)  # type: ignore[arg-type]
    return PortLinear(torch.cat([part.weight for part in parts]), bias, style)  # type: ignore[misc]


class PortAttention(nn.Module):
    def __init__(self, own: Attention, style: Style, mistake: str) -> None:
        super().__init__()
        self.style, self.mistake = style, mistake
        parts: list[nn.Module] = [own.q_proj, own.k_proj, own.v_proj]
        self.qkv = joined(parts, style) if style.fused else None
        self.wq, self.wk, self.wv = (None if style.fused else joined([part], style) for part in parts)
        self.wo = joined([own.o_proj], style)

    def forward(self, x: Tensor) -> Tensor:
        batch, size, _ = x.shape
        if self.qkv is not None:
            q, k, v = self.qkv(x).split(WIDTH, -1)
            if self.mistake == "swapped":
                k, v = v, k
        elif self.style.reordered:
            v, k, q = self.wv(x), self.wk(x), self.wq(x)  # type: ignore[misc]
        else:
            q, k, v = self.wq(x), self.wk(x), self.wv(x)  # type: ignore[misc]
        if self.mistake == "axis":
            q = q.view(batch, size, HEAD, HEADS).permute(0, 3, 1, 2)
        else:
            q = q.view(batch, size, HEADS, HEAD).permute(0, 2, 1, 3)
        k, v = (t.reshape(batch, size, HEADS, HEAD).permute(0, 2, 1, 3) for t in (k, v))
        if self.style.family == "llama":
            cosine, sine = angles(size, x.dtype)
            q, k = self.rotated(q, cosine, sine), self.rotated(k, cosine, sine)
        return self.wo(self.context(q, k, v).permute(0, 2, 1, 3).reshape(batch, size, WIDTH))

    def rotated(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        half = HEAD // 2
        a, b = x[..., :half], x[..., half:]
        if self.mistake == "half":
            return x * cosine + torch.cat([b, -a], -1) * sine
        if self.style.reordered:
            return torch.cat([-b, a], -1) * sine + x * cosine
        return x * cosine + torch.cat((-b, a), -1) * sine

    def context(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        size = q.shape[2]
        scale = 1 / math.sqrt(HEAD) * (1.5 if self.mistake == "scale" else 1)
        if self.style.attention == "kernel":
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.style.family != "bert", scale=scale)
        if self.style.attention == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q * scale, k)
        else:
            scores = q @ k.transpose(-1, -2) * scale
        if self.style.family != "bert":
            hidden = torch.ones(size, size, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        shares = scores.float().softmax(-2 if self.mistake == "softmax axis" else -1).to(v.dtype)
        return torch.einsum("bhqk,bhkd->bhqd", shares, v) if self.style.attention == "einsum" else shares @ v


class PortMlp(nn.Module):
    def __init__(self, own: Mlp, style: Style, mistake: str) -> None:
        super().__init__()
        self.style, self.mistake = style, mistake
        self.w13 = None
        if style.family == "llama" and style.fused:
            self.w13 = joined([own.gate_proj, own.up_proj], style)
        else:
            self.w1 = joined([own.gate_proj], style) if style.family == "llama" else None
            self.w3 = joined([own.up_proj], style)
        self.w2 = joined([own.down_proj], style)

    def forward(self, x: Tensor) -> Tensor:
        if self.style.family != "llama":
            inner = F.gelu(self.w3(x), approximate="tanh" if self.style.family == "gpt2" else "none")
        elif self.w13 is not None:
            gate, up = self.w13(x).chunk(2, -1)
            if self.mistake == "gate":
                gate, up = up, gate
            inner = F.silu(gate) * up
        elif self.style.reordered:
            up = self.w3(x)
            inner = up * F.silu(self.w1(x))  # type: ignore[misc]
        else:
            gate = self.w1(x)  # type: ignore[misc]
            inner = gate * torch.sigmoid(gate) * self.w3(x)
        return self.w2(inner)


class PortBlock(nn.Module):
    def __init__(self, own: Layer, style: Style, mistake: str) -> None:
        super().__init__()
        self.style, self.mistake = style, mistake
        self.ln1 = PortNorm(own.input_layernorm, style, mistake)
        self.ln2 = PortNorm(own.post_attention_layernorm, style, "")
        self.attn, self.ffn = PortAttention(own.self_attn, style, mistake), PortMlp(own.mlp, style, mistake)

    def forward(self, x: Tensor) -> Tensor:
        if self.style.family == "bert":
            x = self.ln1(self.attn(x) if self.mistake == "residual" else self.attn(x) + x)
            return self.ln2(self.ffn(x) + x)
        attended = self.attn(self.ln1(x))
        x = attended if self.mistake == "residual" else attended + x
        return self.ffn(self.ln2(x)) + x


class Port(nn.Module):
    """The same as `Model` by other modules under other names; a mistake is in the last layer."""

    def __init__(self, own: Model, style: Style, mistake: str = "") -> None:
        super().__init__()
        self.wte = nn.Embedding.from_pretrained(own.embed_tokens.weight.detach().clone())
        faults = [""] * (LAYERS - 1) + [mistake]
        self.blocks = nn.ModuleList(
            PortBlock(layer, style, fault)  # type: ignore[arg-type]
            for layer, fault in zip(own.layers, faults, strict=True)
        )
        self.ln_f = PortNorm(own.norm, style, "")
        self.out = PortLinear(own.lm_head.weight, None, style)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x)
        return self.out(self.ln_f(x))


def model(family: str, dtype: torch.dtype) -> Model:
    """Return a baseline whose activations neither vanish nor saturate."""
    generator = torch.Generator().manual_seed(3)
    made = Model(family).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                size = parameter.shape[1]
                parameter.copy_(drawn * (0.5 if "embed" in name else 1.3 / math.sqrt(size)))
            else:
                parameter.copy_((1.0 if "norm" in name and "bias" not in name else 0.0) + 0.2 * drawn)
    return made.to(dtype)
