"""Six models of transformers written again by hand, each with mistakes that people make, and what a hint should say."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN, HEADS, SHARED, WIDTH = 32, 4, 2, 8


def drawn(module: nn.Module) -> nn.Module:
    """Give a model weights that make it neither vanish nor saturate."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            noise = torch.randn(value.shape, generator=generator) if value.is_floating_point() else None
            if noise is None or "inv_freq" in name:
                continue
            if "running_var" in name:
                value.copy_(0.5 + noise.abs())
            elif value.dim() > 1:
                fan_in = value[0].numel() if "embed" not in name and "wte" not in name and "wpe" not in name else 4
                value.copy_(noise * 1.3 / math.sqrt(fan_in))
            else:
                is_gain = value.dim() == 1 and "weight" in name
                value.copy_((1.0 if is_gain else 0.0) + 0.2 * noise)
    return module.eval()


def heads(x: Tensor, number: int = HEADS) -> Tensor:
    return x.view(*x.shape[:2], number, -1).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def causal(size: int, by: int = 0) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril(by)


def attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None, scale: float | None = None, dim: int = -1
) -> Tensor:
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if seen is not None:
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    return F.softmax(scores, dim) @ v


class Llama(nn.Module):
    """Grouped heads, norms by hand, explicit attention."""

    def __init__(self, own: Any, mistake: str) -> None:
        super().__init__()
        self.own, self.mistake = own, mistake
        if mistake == "rows of q":
            weight = own.model.layers[1].self_attn.q_proj.weight
            weight.data = weight.data.view(HEADS, 2, WIDTH // 2, HIDDEN).transpose(1, 2).reshape(HIDDEN, HIDDEN)
        if mistake == "norm of another place":
            layer = own.model.layers[1]
            layer.post_attention_layernorm.weight = nn.Parameter(layer.input_layernorm.weight.detach().clone())

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        eps = 1e-3 if self.mistake == "eps" else 1e-6
        gain = 1 + weight if self.mistake == "gain plus one" else weight
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gain

    def rotated(self, x: Tensor) -> Tensor:
        base = 500000.0 if self.mistake == "theta" else 10000.0
        speed = base ** (-torch.arange(0, WIDTH, 2).float() / WIDTH)
        angle = torch.arange(x.shape[2]).float()[:, None] * speed
        cos, sin = angle.cos(), angle.sin()
        if self.mistake == "neighbors":
            a, b = x[..., ::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        a, b = x.chunk(2, -1)
        if self.mistake == "the other way":
            sin = -sin
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def attention(self, x: Tensor, layer: Any) -> Tensor:
        own = layer.self_attn
        q, k, v = heads(own.q_proj(x)), heads(own.k_proj(x), SHARED), heads(own.v_proj(x), SHARED)
        q, k = self.rotated(q), self.rotated(k)
        if self.mistake == "keys in turn":
            k, v = (t.repeat(1, HEADS // SHARED, 1, 1) for t in (k, v))
        else:
            k, v = (t.repeat_interleave(HEADS // SHARED, 1) for t in (k, v))
        seen = None if self.mistake == "no mask" else causal(x.shape[1], 1 if self.mistake == "mask by one" else 0)
        if self.mistake == "window":
            seen = seen & ~causal(x.shape[1], -4)  # type: ignore[operator]
        return own.o_proj(joined(attend(q, k, v, seen, 1.0 if self.mistake == "no scale" else None)))

    def mlp(self, x: Tensor, own: Any) -> Tensor:
        gate, up = own.gate_proj(x), own.up_proj(x)
        if self.mistake == "gate and up":
            gate, up = up, gate
        act = F.gelu if self.mistake == "gelu" else F.silu
        return own.down_proj(act(gate) * up)

    def forward(self, input_ids: Tensor) -> Tensor:
        model = self.own.model
        x = model.embed_tokens(input_ids)
        for layer in model.layers:
            x = x + self.attention(self.norm(x, layer.input_layernorm.weight), layer)
            y = self.norm(x, layer.post_attention_layernorm.weight)
            x = (y if self.mistake == "residual of the norm" else x) + self.mlp(y, layer.mlp)
        return self.own.lm_head(self.norm(x, model.norm.weight))


class GPT2(nn.Module):
    """Fused products, learned positions."""

    def __init__(self, own: Any, mistake: str) -> None:
        super().__init__()
        self.own, self.mistake = own, mistake

    def product(self, x: Tensor, own: Any, *, transposed: bool = False, biased: bool = True) -> Tensor:
        made = x @ (own.weight.T if transposed else own.weight)
        return made + own.bias if biased else made

    def forward(self, input_ids: Tensor) -> Tensor:
        own, mistake = self.own.transformer, self.mistake
        places = torch.arange(input_ids.shape[1]) + (1 if mistake == "positions from one" else 0)
        x = F.embedding(input_ids, own.wte.weight) + F.embedding(places, own.wpe.weight)
        for block in own.h:
            x = x + self.attention(self.norm(x, block.ln_1), block.attn)
            y = self.norm(x, block.ln_2)
            y = self.product(y, block.mlp.c_fc)
            y = F.gelu(y) if mistake == "gelu" else 0.5 * y * (1 + torch.tanh(0.7978845608 * (y + 0.044715 * y**3)))
            y = self.product(y, block.mlp.c_proj, biased=mistake != "no bias")
            x = y if mistake == "no residual" else x + y
        return (x if mistake == "no last norm" else self.norm(x, own.ln_f)) @ own.wte.weight.T

    def norm(self, x: Tensor, own: Any) -> Tensor:
        centered = x if self.mistake == "mean" else x - x.mean(-1, keepdim=True)
        if self.mistake == "unbiased":
            return centered / torch.sqrt(x.var(-1, keepdim=True) + 1e-5) * own.weight + own.bias
        return centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-5) * own.weight + own.bias

    def attention(self, x: Tensor, own: Any) -> Tensor:
        parts = self.product(x, own.c_attn).split(HIDDEN, -1)
        q, k, v = (parts[0], parts[2], parts[1]) if self.mistake == "order of the parts" else parts
        if self.mistake == "heads by their width":
            q = q.view(*q.shape[:2], WIDTH, HEADS).permute(0, 3, 1, 2)
        else:
            q = heads(q)
        k, v = heads(k), heads(v)
        dim = -2 if self.mistake == "softmax over queries" else -1
        made = attend(q, k, v, causal(x.shape[1]), WIDTH**-1.0 if self.mistake == "scale twice" else None, dim)
        made = made.reshape(x.shape) if self.mistake == "not transposed" else joined(made)
        return self.product(made, own.c_proj, transposed=self.mistake == "transposed")


class Bert(nn.Module):
    """Norms after, two kinds of tokens."""

    def __init__(self, own: Any, mistake: str) -> None:
        super().__init__()
        self.own, self.mistake = own, mistake

    def norm(self, x: Tensor, own: nn.LayerNorm) -> Tensor:
        return F.layer_norm(x, (HIDDEN,), own.weight, own.bias, 1e-3 if self.mistake == "eps" else 1e-12)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        first, mistake = self.own.embeddings, self.mistake
        x = first.word_embeddings(input_ids) + first.position_embeddings.weight[: input_ids.shape[1]]
        if mistake != "no token types":
            x = x + first.token_type_embeddings.weight[1 if mistake == "other token types" else 0]
        x = self.norm(x, first.LayerNorm)
        seen = attention_mask[:, None, None].bool()
        seen = ~seen if mistake == "mask inverted" else torch.ones_like(seen) if mistake == "no mask" else seen
        for number, layer in enumerate(self.own.encoder.layer):
            own = layer.attention.self
            if mistake == "weights of another layer" and number == 1:
                own = self.own.encoder.layer[0].attention.self
            q, k, v = (heads(product(x)) for product in (own.query, own.key, own.value))
            y = joined(attend(q, k, v, seen))
            y = layer.attention.output.dense(y)
            if mistake == "norm before":
                x = x + self.norm(y, layer.attention.output.LayerNorm)
            else:
                x = self.norm(x + y, layer.attention.output.LayerNorm)
            y = layer.intermediate.dense(x)
            y = F.relu(y) if mistake == "relu" else y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
            x = self.norm(layer.output.dense(y) + x * (2 if mistake == "residual twice" else 1), layer.output.LayerNorm)
        return x


class Vision(nn.Module):
    """Patches as one product, a class token."""

    def __init__(self, own: Any, mistake: str) -> None:
        super().__init__()
        self.own, self.mistake = own, mistake

    def forward(self, pixel_values: Tensor) -> Tensor:
        own, mistake = self.own.embeddings, self.mistake
        kernel = own.patch_embeddings.projection
        weight = kernel.weight.mT if mistake == "kernel transposed" else kernel.weight
        weight = weight.flip(2, 3) if mistake == "kernel flipped" else weight
        x = F.conv2d(pixel_values, weight, kernel.bias, stride=4)
        x = (x.mT if mistake == "patches by columns" else x).flatten(2).transpose(1, 2)
        token = own.cls_token.expand(x.shape[0], -1, -1)
        x = torch.cat([x, token] if mistake == "class token last" else [token, x], 1)
        if mistake == "positions moved":
            x = x + own.position_embeddings.roll(1, 1)
        elif mistake != "no positions":
            x = x + own.position_embeddings
        for layer in self.own.layers if hasattr(self.own, "layers") else self.own.encoder.layer:
            y = F.layer_norm(x, (HIDDEN,), layer.layernorm_before.weight, layer.layernorm_before.bias, 1e-12)
            names = ("q_proj", "k_proj", "v_proj") if hasattr(layer.attention, "q_proj") else None
            inner = layer.attention if names else layer.attention.attention
            q, k, v = (getattr(inner, name)(y) for name in names or ("query", "key", "value"))
            if mistake == "query and key":
                k, v = v, k
            out = layer.attention.o_proj if names else layer.attention.output.dense
            x = x + out(joined(F.scaled_dot_product_attention(heads(q), heads(k), heads(v))))
            y = F.layer_norm(x, (HIDDEN,), layer.layernorm_after.weight, layer.layernorm_after.bias, 1e-12)
            up, down = (
                (layer.mlp.fc1, layer.mlp.fc2)
                if hasattr(layer, "mlp")
                else (layer.intermediate.dense, layer.output.dense)
            )
            y = up(y)
            y = y * torch.sigmoid(1.702 * y) if mistake == "quick gelu" else F.gelu(y)
            x = x + down(y)
        last = self.own.layernorm
        return F.layer_norm(x, (HIDDEN,), last.weight, last.bias, 1e-12)


class Residual(nn.Module):
    """Convolutions and batch norms."""

    def __init__(self, own: Any, mistake: str) -> None:
        super().__init__()
        self.own, self.mistake = own, mistake

    def unit(self, x: Tensor, own: Any, act: bool = True) -> Tensor:
        conv, norm = own.convolution, own.normalization
        if self.mistake == "padding by reflection" and conv.padding[0]:
            x = F.conv2d(F.pad(x, [conv.padding[0]] * 4, mode="reflect"), conv.weight, None, conv.stride)
        else:
            x = F.conv2d(x, conv.weight, None, conv.stride, conv.padding)
        variance = norm.running_var + (1e-2 if self.mistake == "eps" else norm.eps)
        mean = 0 if self.mistake == "no mean" else norm.running_mean[:, None, None]
        root = variance[:, None, None] if self.mistake == "no root" else torch.sqrt(variance)[:, None, None]
        x = (x - mean) / root * norm.weight[:, None, None] + norm.bias[:, None, None]
        return F.relu(x) if act and self.mistake != "no activation" else x

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        first = self.own.embedder
        x = self.unit(pixel_values, first.embedder)
        x = F.avg_pool2d(x, 3, 2, 1) if self.mistake == "pooling" else F.max_pool2d(x, 3, 2, 1)
        for stage in self.own.encoder.stages:
            for block in stage.layers:
                y = self.unit(self.unit(x, block.layer[0]), block.layer[1], act=False)
                short = x
                if not isinstance(block.shortcut, nn.Identity):
                    short = self.unit(x, block.shortcut, act=False)
                y = y if self.mistake == "no shortcut" and short is x else y + short
                x = F.leaky_relu(y, 0.01) if self.mistake == "leaky" else F.relu(y)
        return x, x.mean((2, 3), keepdim=True) if self.mistake != "sum" else x.sum((2, 3), keepdim=True)


class Speech(nn.Module):
    """Convolutions in time, a scale on the queries."""

    def __init__(self, own: Any, mistake: str) -> None:
        super().__init__()
        self.own, self.mistake = own, mistake

    def forward(self, input_features: Tensor) -> Tensor:
        own, mistake = self.own, self.mistake
        pad = (2, 0) if mistake == "padding on the left" else (1, 1)
        x = F.gelu(F.conv1d(F.pad(input_features, pad), own.conv1.weight, own.conv1.bias))
        stride_bias = None if mistake == "no bias" else own.conv2.bias
        x = F.conv1d(
            x, own.conv2.weight.flip(-1) if mistake == "kernel flipped" else own.conv2.weight, stride_bias, 2, 1
        )
        x = (x if mistake == "no activation" else F.gelu(x)).transpose(1, 2)
        table = own.embed_positions.weight
        if mistake == "sine and cosine":
            table = torch.cat(table.chunk(2, -1)[::-1], -1)
        x = x + table
        for layer in own.layers:
            att = layer.self_attn
            y = layer.self_attn_layer_norm(x)
            q = att.q_proj(y) * (1.0 if mistake == "no scale" else WIDTH**-0.5)
            made = attend(heads(q), heads(att.k_proj(y)), heads(att.v_proj(y)), None, 1.0)
            x = x + att.out_proj(joined(made)) * (0.5 if mistake == "half" else 1)
            y = layer.final_layer_norm(x)
            x = x + layer.fc2(F.gelu(layer.fc1(y), approximate="tanh" if mistake == "gelu" else "none"))
        return own.layer_norm(x)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=SHARED, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    return drawn(transformers.LlamaForCausalLM(config))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=50, n_embd=HIDDEN, n_layer=2, n_head=HEADS, n_positions=32)
    return drawn(transformers.GPT2LMHeadModel(config))


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=48,
        max_position_embeddings=32,
    )  # fmt: skip
    return drawn(transformers.BertModel(config, add_pooling_layer=False))


def vision() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=48, image_size=16,
        patch_size=4,
    )  # fmt: skip
    return drawn(transformers.ViTModel(config, add_pooling_layer=False))


def residual() -> nn.Module:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")
    return drawn(transformers.ResNetModel(config))


def speech() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=50, d_model=HIDDEN, encoder_layers=2, encoder_attention_heads=HEADS, encoder_ffn_dim=48,
        num_mel_bins=8, max_source_positions=12, decoder_layers=1, decoder_attention_heads=HEADS, decoder_ffn_dim=48,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return drawn(transformers.WhisperModel(config).encoder)


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9))


IDS = torch.tensor([[3, 17, 9, 41, 22, 8, 30, 11], [5, 1, 44, 3, 27, 12, 20, 6]])
MASK = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])


@dataclass(frozen=True)
class Written:
    """A baseline, the port, its inputs, and mistakes with what one of the first hints should say (any of several)."""

    baseline: Callable[[], nn.Module]
    port: Callable[[Any, str], nn.Module]
    inputs: dict[str, Tensor]
    mistakes: dict[str, tuple[str, ...]]


PORTS = {
    "llama": Written(
        llama,
        Llama,
        {"input_ids": IDS},
        {
            "eps": (": 1e-06 in the baseline, 0.001",),
            "gain plus one": ("1 + ",),
            "theta": ("500000", "theta", "inv_freq"),
            "neighbors": ("neighbors",),
            "the other way": ("other sign", "subtracted"),
            "keys in turn": ("in turn", "heads are interleaved"),
            "no mask": ("mask is missing", ": True in the baseline, False"),
            "mask by one": ("sees the next position",),
            "window": ("window of 4",),
            "no scale": ("scale",),
            "gate and up": ("silu is on the other factor", "instead of"),
            "gelu": ("silu in the baseline, gelu",),
            "residual of the norm": ("instead of", "post_attention_layernorm"),
            "rows of q": ("interleaved halves",),
            "norm of another place": ("input_layernorm.weight",),
        },
    ),
    "gpt2": Written(
        gpt2,
        GPT2,
        {"input_ids": IDS},
        {
            "positions from one": ("0 is added in the baseline, 1 in the candidate",),
            "gelu": ("gelu",),
            "no bias": ("bias",),
            "no residual": ("not added", "has add"),
            "no last norm": ("norm is missing", "layer_norm here", "has layer_norm"),
            "mean": ("mean is not subtracted",),
            "unbiased": ("unbiased",),
            "order of the parts": ("exchanged", "instead of"),
            "heads by their width": ("heads are interleaved",),
            "softmax over queries": ("queries",),
            "scale twice": ("scale",),
            "not transposed": ("transpose is missing", "transpose"),
            "transposed": ("transposed",),
        },
    ),
    "bert": Written(
        bert,
        Bert,
        {"input_ids": IDS, "attention_mask": MASK},
        {
            "eps": (": 1e-12 in the baseline, 0.001",),
            "no token types": ("not added", "has add", "has embedding, add"),
            "other token types": ("token_type", "1 too large"),
            "mask inverted": ("inverted",),
            "no mask": ("mask is missing",),
            "weights of another layer": ("of encoder.layer.0",),
            "norm before": ("add, layer_norm", "norm", "order"),
            "relu": ("gelu in the baseline, relu",),
            "residual twice": ("twice",),
        },
    ),
    "vision": Written(
        vision,
        Vision,
        {"pixel_values": _noise(2, 3, 16, 16)},
        {
            "kernel transposed": ("transposed",),
            "kernel flipped": ("flipped",),
            "patches by columns": ("transposed", "axes are put together"),
            "class token last": ("parts 0 and 1 of cat", "cat", "moved"),
            "positions moved": ("moved by",),
            "no positions": ("not added", "has add"),
            "query and key": ("exchanged",),
            "quick gelu": ("quick_gelu",),
        },
    ),
    "residual": Written(
        residual,
        Residual,
        {"pixel_values": _noise(2, 3, 32, 32)},
        {
            "padding by reflection": ("padding by reflect",),
            "eps": (": 1e-05 in the baseline, 0.01",),
            "no mean": ("running_mean", "mean"),
            "no root": ("root", "sqrt"),
            "no activation": ("relu is missing", "has relu"),
            "pooling": ("avg_pool2d",),
            "no shortcut": ("not added", "has add"),
            "leaky": ("leaky_relu",),
            "sum": ("sum", "times the right values"),
        },
    ),
    "speech": Written(
        speech,
        Speech,
        {"input_features": _noise(2, 8, 24)},
        {
            "padding on the left": ("left", "moved by 1"),
            "no bias": ("bias",),
            "kernel flipped": ("flipped",),
            "no activation": ("gelu is missing", "has gelu"),
            "sine and cosine": ("halves",),
            "no scale": ("scale", "multiplication by"),
            "half": ("0.5",),
            "gelu": ("tanh",),
        },
    ),
}
