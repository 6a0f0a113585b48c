"""A mistake in one of several equal layers is named in its own layer, on both sides."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import glassengine as glass

LAYERS, HIDDEN, HEADS = 4, 32, 4
WIDTH = HIDDEN // HEADS


def drawn(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.12)
            else:
                weight.copy_(torch.randn_like(weight) * 0.1 + ("bias" not in name))
    return model.eval()


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)


class Port(nn.Module):
    """One block after the other, written out; `mistake` is in layer `layer` alone."""

    def __init__(self, own: nn.Module, mistake: str, layer: int) -> None:
        super().__init__()
        self.own, self.mistake, self.layer = own, mistake, layer

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mistake: str, *, causal: bool) -> Tensor:
        q, k = (k, q) if mistake == "swapped" else (q, k)
        q, k, v = heads(q), heads(k), heads(k if mistake == "v is k" else v)
        scores = q @ k.transpose(-1, -2) / WIDTH**0.5
        scores = scores * 0.9 if mistake == "scale" else scores
        if causal:
            seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril(1 if mistake == "mask" else 0)
            scores = scores.masked_fill(~seen, float("-inf"))
        mixed = scores.softmax(-1) @ v
        return (
            mixed.flatten(2).transpose(1, 2).reshape(q.shape[0], -1, HIDDEN)
            if mistake == "heads"
            else (mixed.transpose(1, 2).flatten(2))
        )

    def activation(self, x: Tensor, right: Tensor, mistake: str) -> Tensor:
        wrong = {"relu": F.relu(x), "silu": F.silu(x), "exact": F.gelu(x), "sigmoid": x.sigmoid(), "none": x}
        return wrong.get(mistake, right)


class GPT2(Port):
    def forward(self, input_ids: Tensor) -> Tensor:
        own = self.own.transformer
        x = own.wte(input_ids) + own.wpe(torch.arange(input_ids.shape[1]))
        for number, block in enumerate(own.h):
            mistake = self.mistake if number == self.layer else ""
            y = F.layer_norm(x, (HIDDEN,), block.ln_1.weight, block.ln_1.bias, 1e-3 if mistake == "eps" else 1e-5)
            q, k, v = (y @ block.attn.c_attn.weight + block.attn.c_attn.bias).split(HIDDEN, -1)
            y = self.attend(q, k, v, mistake, causal=True) @ block.attn.c_proj.weight
            y = y if mistake == "no bias" else y + block.attn.c_proj.bias
            x = y if mistake == "no residual" else x + y
            y = F.layer_norm(x, (HIDDEN,), block.ln_2.weight, block.ln_2.bias, 1e-5)
            y = y @ block.mlp.c_fc.weight + block.mlp.c_fc.bias
            y = self.activation(y, F.gelu(y, approximate="tanh"), mistake)
            y = y @ block.mlp.c_proj.weight + block.mlp.c_proj.bias
            x = x + (0.9 * y if mistake == "factor" else y)
        return own.ln_f(x) @ self.own.lm_head.weight.T


class Llama(Port):
    def norm(self, x: Tensor, norm: nn.Module, eps: float) -> Tensor:
        return norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

    def rotated(self, x: Tensor, base: float) -> Tensor:
        angle = torch.arange(x.shape[1])[:, None].float() * base ** (-torch.arange(0, WIDTH, 2).float() / WIDTH)
        a, b = x.unflatten(-1, (HEADS, WIDTH)).chunk(2, -1)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).flatten(2)

    def forward(self, input_ids: Tensor) -> Tensor:
        own = self.own.model
        x = own.embed_tokens(input_ids)
        for number, block in enumerate(own.layers):
            mistake = self.mistake if number == self.layer else ""
            y = self.norm(x, block.input_layernorm, 1e-3 if mistake == "eps" else 1e-6)
            q, k, v = (F.linear(y, getattr(block.self_attn, f"{name}_proj").weight) for name in "qkv")
            base = 500.0 if mistake == "base" else 10000.0
            y = self.attend(self.rotated(q, base), self.rotated(k, base), v, mistake, causal=True)
            y = F.linear(y, block.self_attn.o_proj.weight)
            x = y if mistake == "no residual" else x + y
            y = self.norm(x, block.post_attention_layernorm, 1e-6)
            gate, up = F.linear(y, block.mlp.gate_proj.weight), F.linear(y, block.mlp.up_proj.weight)
            gate, up = (up, gate) if mistake == "gate" else (gate, up)
            y = F.linear(self.activation(gate, F.silu(gate), mistake) * up, block.mlp.down_proj.weight)
            x = x + (0.9 * y if mistake == "factor" else y)
        return F.linear(self.norm(x, own.norm, 1e-6), self.own.lm_head.weight)


class Bert(Port):
    def forward(self, input_ids: Tensor) -> Tensor:
        own = self.own
        table = own.embeddings
        x = table.word_embeddings(input_ids) + table.token_type_embeddings.weight[0]
        x = table.LayerNorm(x + table.position_embeddings.weight[: input_ids.shape[1]])
        for number, block in enumerate(own.encoder.layer):
            mistake = self.mistake if number == self.layer else ""
            layer = block.attention.self
            q, k, v = (F.linear(x, part.weight, part.bias) for part in (layer.query, layer.key, layer.value))
            out = block.attention.output
            y = F.linear(
                self.attend(q, k, v, mistake, causal=False),
                out.dense.weight,
                None if mistake == "no bias" else out.dense.bias,
            )
            y = y if mistake == "no residual" else y + x
            x = F.layer_norm(
                y, (HIDDEN,), out.LayerNorm.weight, out.LayerNorm.bias, 1e-3 if mistake == "eps" else 1e-12
            )
            y = F.linear(x, block.intermediate.dense.weight, block.intermediate.dense.bias)
            y = self.activation(y, F.gelu(y), mistake)
            y = F.linear(y, block.output.dense.weight, block.output.dense.bias)
            y = 0.9 * y if mistake == "factor" else y
            x = F.layer_norm(x + y, (HIDDEN,), block.output.LayerNorm.weight, block.output.LayerNorm.bias, 1e-12)
        return x


SIZES = {"vocab_size": 50, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0}


def gpt2() -> nn.Module:
    sizes = {"vocab_size": 50, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, **TOKENS))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **TOKENS, intermediate_size=48, max_position_embeddings=64))


def bert() -> nn.Module:
    return BertModel(BertConfig(**SIZES, intermediate_size=48, max_position_embeddings=32), add_pooling_layer=False)


MADE = {"gpt2": (gpt2, GPT2, r"\bh\."), "llama": (llama, Llama, r"layers\."), "bert": (bert, Bert, r"layer\.")}
EVERY = ("relu", "none", "scale", "swapped", "v is k", "heads", "eps", "no residual", "factor", "sigmoid")
MISTAKES = {
    "gpt2": (*EVERY, "silu", "exact", "mask", "no bias"),
    "llama": (*EVERY, "exact", "mask", "base", "gate"),
    "bert": (*EVERY, "silu", "no bias"),
}
# mistake -> where in its layer
WHERE = {
    "relu|silu|none|exact|sigmoid": r"act|mlp|intermediate|output",
    "scale|swapped|v is k|heads|mask|base|no bias": r"attn|attention",
    "eps": r"ln_1|input_layernorm|LayerNorm",
    "no residual": r"add|ln_2|post_attention|attention.output",
    "factor|gate": r"mlp|add|output",
}
QUICK = [("gpt2", "relu", 1), ("bert", "none", 2)]
"""Each was named in the layer behind its own (F71)."""
REST = [
    (family, mistake, 1 + (len(mistake) + at) % 2) for family in MADE for at, mistake in enumerate(MISTAKES[family])
]


@pytest.mark.parametrize(
    ("family", "mistake", "layer"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)]
)
def test_f71_a_mistake_is_named_in_its_layer_on_both_sides(family: str, mistake: str, layer: int) -> None:
    make, port, name = MADE[family]
    ids = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(3))
    model = drawn(make())
    result = glass.check(model, candidate=port(drawn(make()), mistake, layer), inputs={"input_ids": ids}, steps=0)
    first = result.first_divergence
    assert not result.ok and first is not None
    found = re.search(rf"{name}(\d+)(.*)", first.site)
    assert found is not None and int(found[1]) == layer, first.site
    (where,) = [place for mistakes, place in WHERE.items() if mistake in mistakes.split("|")]
    assert re.search(where, found[2]), first.site
    # F75: a list of ops that the right layers have too explains nothing.
    assert not any("the baseline has addmm, the candidate matmul, add" in hint.text for hint in first.hints)
    # The candidate's op lies between those of its name that belong to the layers before and behind.
    op, place = parts(first.candidate_site)
    for pair in result.pairs:
        other, number = parts(pair.candidate_site)
        at = re.search(rf"{name}(\d+)", pair.site)
        if pair.level == first.level and other == op and at is not None and int(at[1]) != layer:
            assert (number < place) == (int(at[1]) < layer), (first.candidate_site, pair.site, pair.candidate_site)


def parts(site: str) -> tuple[str, int]:
    op, _, number = site.rpartition("/")[2].rpartition(".")
    return op, int(number) if number.isdigit() else -1


@pytest.mark.slow
@pytest.mark.parametrize("family", MADE)
def test_right_layers_are_ok(family: str) -> None:
    make, port, _ = MADE[family]
    ids = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(3))
    assert glass.check(drawn(make()), candidate=port(drawn(make()), "", 0), inputs={"input_ids": ids}, steps=0).ok
