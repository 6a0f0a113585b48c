"""Decoders that other authors wrote again, beside transformers'. Kinds were written before anything was run on them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from cached import Past, in_dtype, written
from pair import Mistake, Pair, part_of, rewritten, shaken
from speech import filled, renamed
from torch import Tensor, nn
from unseen import Edits

G = torch.Generator().manual_seed(7)


SPLIT = "        proj = split_heads(proj, self.attention_heads._n_query_heads)\n"
NEOX_EDITS: Edits = {
    "parts": (f"{SPLIT}        query, key, value = proj.chunk(", f"{SPLIT}        query, value, key = proj.chunk("),
    "split after": (
        f"{SPLIT}        query, key, value = proj.chunk(3, dim=-1)\n",
        "        number = self.attention_heads._n_query_heads\n"
        "        query, key, value = (split_heads(part, number) for part in proj.chunk(3, dim=-1))\n",
    ),
    "from zero": ("                cache_len,\n                cache_len + seq_len,\n",
                  "                0,\n                seq_len,\n"),
    "not parallel": ("            ffn_in = input\n", "            ffn_in = input + attn_out\n"),
    "scale": ("attn_scores /= math.sqrt(width)", "attn_scores /= width"),
    "mask of the first": (
        "causal_mask[:, :, key_len - query_len : key_len, :key_len]",
        "causal_mask[:, :, :query_len, :key_len]",
    ),
    "rotated back": ("return rot_cos * input + rot_sin * self._rotate(input)",
                     "return rot_cos * input - rot_sin * self._rotate(input)"),
    "keys last": ("key = torch.cat([cache_k, key], dim=-2)", "key = torch.cat([key, cache_k], dim=-2)"),
    "one norm": ("self.ffn(self.ffn_input_layer_norm(ffn_in))", "self.ffn(self.attn_input_layer_norm(ffn_in))"),
    "queries not turned": (
        "            q_rotary = self.rotary_embeds(q_rotary, positions=positions)\n\n            query = torch.cat(",
        "            query = torch.cat(",
    ),
    "softened over queries": ("attn_scores.softmax(dim=-1)", "attn_scores.softmax(dim=-2)"),
}  # fmt: skip


class NeoX(nn.Module):
    """GPT-NeoX of the layers of curated_transformers, given what is kept: [layers, 2, batch, heads, tokens, size]."""

    def __init__(self, modules: list[Any], activation: nn.Module, base: int, fraction: float) -> None:
        super().__init__()
        embeddings, attention, feedforward, transformer = modules
        self.attention = attention
        self.embeddings = nn.Embedding(40, 32)
        self.layers = nn.ModuleList(
            transformer.DecoderLayer(
                attention_layer=attention.SelfAttention(
                    attention_heads=attention.AttentionHeads.uniform(2, attention.QkvSplitGroupedByKVHeads()),
                    attention_scorer=attention.ScaledDotProductAttention(dropout_prob=0.0, linear_biases=None),
                    hidden_width=32,
                    qkv_mode=attention.QkvMode.MERGED_SPLIT_BEFORE,
                    rotary_embeds=embeddings.QueryKeyRotaryEmbeddings(fraction=fraction, base=base, head_width=16),
                    use_bias=True,
                ),
                feed_forward_layer=feedforward.PointwiseFeedForward(
                    activation=activation, hidden_width=32, intermediate_width=64, use_bias=True, use_gate=False
                ),
                dropouts=transformer.TransformerDropouts(),
                layer_norms=transformer.TransformerLayerNorms(
                    attn_input_layer_norm=nn.LayerNorm(32), ffn_input_layer_norm=nn.LayerNorm(32)
                ),
                use_parallel_attention=True,
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(32)
        self.output = nn.Linear(32, 40, bias=False)

    def forward(self, tokens: Tensor, past: Tensor) -> Tensor:
        from curated_transformers.layers.cache import KeyValueCache

        kept = [KeyValueCache(key=keys, value=values) for keys, values in past]
        seen = torch.ones(tokens.shape[0], past.shape[4] + tokens.shape[1], dtype=torch.bool)
        state = self.embeddings(tokens)
        for layer, cache in zip(self.layers, kept, strict=True):
            state, _ = layer(state, self.attention.AttentionMask(seen), cache=cache)
        return self.output(self.norm(state))


def neox(mistake: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        hidden_act="gelu", max_position_embeddings=20,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        use_parallel_residual=True, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    own = in_dtype(shaken(GPTNeoXForCausalLM(config)), dtype)
    part_of("curated_transformers.layers.transformer", bare=["curated_transformers"])
    names = ["embeddings", "attention", "feedforward", "transformer"]
    modules = rewritten([f"curated_transformers.layers.{name}" for name in names], NEOX_EDITS.get(mistake))
    activation = nn.GELU(approximate="tanh") if mistake == "activation" else nn.GELU()
    base, fraction = 1000 if mistake == "base" else 10000, 1.0 if mistake == "all turned" else 0.5
    other = in_dtype(NeoX(modules, activation, base, fraction), dtype)
    pieces = (
        ("gpt_neox.embed_in", "embeddings"),
        ("embed_out", "output"),
        ("lm_head", "output"),
        ("gpt_neox.final_layer_norm", "norm"),
        ("gpt_neox.layers", "layers"),
        (".attention.query_key_value", ".mha.input"),
        (".attention.dense", ".mha.output"),
        (".input_layernorm", ".attn_input_layer_norm"),
        (".post_attention_layernorm", ".ffn_input_layer_norm"),
        (".mlp.dense_h_to_4h", ".ffn.intermediate"),
        (".mlp.dense_4h_to_h", ".ffn.output"),
    )
    given = {name: t for name, t in own.state_dict().items() if not name.endswith(("inv_freq", "masked_bias"))}
    other = filled(other, renamed(given, *pieces))
    if mistake == "epsilon":
        other.layers[1].ffn_input_layer_norm.eps = 1e-3
    if mistake == "bias":
        other.layers[0].mha.output.bias = None
    return Past(own).eval(), other.to(dtype).eval()  # with its tables of sines


class Packed(nn.Module):
    """A decoder of transformers that is told the position of each token, and which tokens it may see."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, tokens: Tensor, places: Tensor, seen: Tensor) -> Tensor:
        dtype = self.own.dtype
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[:, None]
        return self.own(input_ids=tokens, position_ids=places, attention_mask=mask, use_cache=False).logits.float()


class Told(nn.Module):
    """The same of torchtune."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, tokens: Tensor, places: Tensor, seen: Tensor) -> Tensor:
        return self.own(tokens, mask=seen, input_pos=places)


QWEN_EDITS: Edits = {
    "groups": (
        "            expand_shape = (b, self.num_kv_heads, q_per_kv, -1, self.head_dim)\n"
        "            k = k.unsqueeze(2).expand(expand_shape).flatten(1, 2)\n"
        "            v = v.unsqueeze(2).expand(expand_shape).flatten(1, 2)\n",
        "            expand_shape = (b, q_per_kv, self.num_kv_heads, -1, self.head_dim)\n"
        "            k = k.unsqueeze(1).expand(expand_shape).flatten(1, 2)\n"
        "            v = v.unsqueeze(1).expand(expand_shape).flatten(1, 2)\n",
    ),
    "keys not turned": ("                k = self.pos_embeddings(k, input_pos=input_pos)\n", "                pass\n"),
    "pairs": (
        "        x1 = x[..., : x.shape[-1] // 2]\n        x2 = x[..., x.shape[-1] // 2 :]\n"
        "        rotated = torch.cat((-x2, x1), dim=-1)\n",
        "        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)\n",
    ),
    "stretched": (
        'torch.einsum("i, j -> ij", seq_idx, self.theta).float()',
        'torch.einsum("i, j -> ij", seq_idx / 4, self.theta).float()',
    ),
    "other gate": (
        "        h = self.activation(self.w1(x))\n        if self.w3 is not None:\n            h = h * self.w3(x)\n",
        "        h = self.w1(x)\n        if self.w3 is not None:\n            h = h * self.activation(self.w3(x))\n",
    ),
    "no gate": ("            h = h * self.w3(x)\n", "            pass\n"),
    "residual of the norm": (
        "        h = self.sa_scale(attn_out) + x\n\n        # Norm applied before the feedforward layer\n"
        "        mlp_out = self.mlp(self.mlp_norm(h))\n\n"
        "        # Residual connection; shape: [batch_size, seq_length, embed_dim]\n"
        "        out = h + self.mlp_scale(mlp_out)\n        return out\n\n\nclass TransformerCrossAttentionLayer",
        "        h = self.mlp_norm(self.sa_scale(attn_out) + x)\n        mlp_out = self.mlp(h)\n"
        "        out = h + self.mlp_scale(mlp_out)\n        return out\n\n\nclass TransformerCrossAttentionLayer",
    ),
    "heads": ("output = output.transpose(1, 2).contiguous().view(b, s_x, -1)",
              "output = output.contiguous().view(b, s_x, -1)"),
    "scale twice": ("        q = q.transpose(1, 2)\n", "        q = q.transpose(1, 2) * self.head_dim**-0.5\n"),
    "values of keys": ("            v = self.v_proj(y)\n", "            v = self.k_proj(y)\n"),
    "whole norm": ("            weight=self.scale,\n", "            weight=self.scale + 1,\n"),
}  # fmt: skip


def qwen(mistake: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    own = in_dtype(shaken(Qwen2ForCausalLM(config)), dtype)
    bare = ["torchtune", "torchtune.modules", "torchtune.utils", "torchtune.models", "torchtune.models.qwen2"]
    attention = part_of("torchtune.modules.attention", bare=bare)
    __import__("sys").modules["torchtune.modules"].MultiHeadAttention = attention.MultiHeadAttention
    names = [
        "torchtune.modules.attention",
        "torchtune.modules.feed_forward",
        "torchtune.modules.rms_norm",
        "torchtune.modules.transformer",
        "torchtune.models.qwen2._positional_embeddings",
    ]
    attention, forward, norms, transformer, places = rewritten(names, QWEN_EDITS.get(mistake))
    turns = places.Qwen2RotaryPositionalEmbeddings(dim=8, max_seq_len=32, base=1e4 if mistake == "base" else 1e6)
    layers = []
    for number in range(2):
        last = number == 1
        attn = attention.MultiHeadAttention(
            embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, q_proj=nn.Linear(32, 32), k_proj=nn.Linear(32, 16),
            v_proj=nn.Linear(32, 16), output_proj=nn.Linear(32, 32, bias=False), pos_embeddings=turns, max_seq_len=32,
        )  # fmt: skip
        mlp = forward.FeedForward(
            gate_proj=nn.Linear(32, 48, bias=False),
            down_proj=nn.Linear(48, 32, bias=False),
            up_proj=nn.Linear(32, 48, bias=False),
            activation=nn.GELU() if mistake == "activation" else nn.SiLU(),
        )
        eps = 1e-4 if mistake == "epsilon" and last else 1e-6
        both = {"sa_norm": norms.RMSNorm(32, eps=1e-6), "mlp_norm": norms.RMSNorm(32, eps=eps)}
        layers.append(transformer.TransformerSelfAttentionLayer(attn=attn, mlp=mlp, **both))
    other = transformer.TransformerDecoder(
        tok_embeddings=nn.Embedding(40, 32), layers=layers, max_seq_len=32, num_heads=4, head_dim=8,
        norm=norms.RMSNorm(32, eps=1e-6), output=nn.Linear(32, 40, bias=False),
    )  # fmt: skip
    pieces = (
        ("model.embed_tokens", "tok_embeddings"),
        ("lm_head", "output"),
        ("model.norm.weight", "norm.scale"),
        ("model.layers", "layers"),
        ("self_attn.o_proj", "attn.output_proj"),
        ("self_attn", "attn"),
        ("input_layernorm.weight", "sa_norm.scale"),
        ("post_attention_layernorm.weight", "mlp_norm.scale"),
        ("mlp.gate_proj", "mlp.w1"),
        ("mlp.down_proj", "mlp.w2"),
        ("mlp.up_proj", "mlp.w3"),
    )
    other = filled(in_dtype(other, dtype), renamed(own.state_dict(), *pieces))
    if mistake == "bias":
        other.layers[0].attn.v_proj.bias = None
    return Packed(own).eval(), Told(in_dtype(other, dtype)).eval()


OF_NEOX = {
    "attention": ["*gpt_neox.layers.0.attention*", "own*"],
    "turns": ["*gpt_neox.layers.0.attention*", "*rotary*", "own*"],
    "mask": ["*gpt_neox.layers.0.attention*", "*"],
    "mlp": ["*gpt_neox.layers.0*"],
    "second": ["*gpt_neox.layers.1.post_attention_layernorm*"],
}
OF_QWEN = {
    "attention": ["*model.layers.0.self_attn*"],
    "turns": ["*model.layers.0.self_attn*", "*rotary*"],
    "mlp": ["*model.layers.0.mlp*"],
    "norm": ["*model.layers.0.input_layernorm*"],
    "layer": ["*model.layers.0*"],
    "second": ["*model.layers.1.post_attention_layernorm*"],
}


def packed() -> dict[str, Tensor]:
    """Return two texts in each row, the second of which begins at 0 again and sees nothing of the first."""
    places = torch.cat([torch.arange(4), torch.arange(5)]).expand(2, -1)
    text = torch.tensor([0] * 4 + [1] * 5)
    seen = (text[:, None] == text[None]).tril().expand(2, -1, -1)
    tokens = torch.randint(0, 40, (2, 9), generator=G)
    return {"tokens": tokens, "places": places.contiguous(), "seen": seen.contiguous()}


def kept() -> dict[str, Tensor]:
    """Return tokens and what is kept of five before them."""
    tokens = torch.randint(0, 40, (2, 3), generator=G)
    return {"tokens": tokens, "past": torch.randn(2, 2, 2, 2, 5, 16, generator=G)}


def _in(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in inputs.items()}


KEPT, PACKED = kept(), packed()
NEOX_MISTAKES: dict[str, Mistake] = written(
    OF_NEOX,
    ("parts", "attention", "swapped"),
    ("split after", "attention", "permuted"),
    ("from zero", "turns", "position"),
    ("not parallel", "mlp", "swapped, other"),  # another tensor is read: no word is nearer
    ("scale", "attention", "scale"),
    ("mask of the first", "mask", "mask"),
    ("rotated back", "turns", "position"),
    ("keys last", "attention", "swapped, position"),  # two operands, and with them where tokens are
    ("one norm", "mlp", "swapped"),
    ("queries not turned", "turns", "position"),
    ("softened over queries", "attention", "transposed, other"),  # another axis
    ("activation", "mlp", "activation"),
    ("base", "turns", "position"),
    ("all turned", "turns", "position"),
    ("epsilon", "second", "eps"),
    ("bias", "attention", "bias missing"),
)
QWEN_MISTAKES: dict[str, Mistake] = written(
    OF_QWEN,
    ("groups", "attention", "permuted"),
    ("keys not turned", "turns", "position"),
    ("pairs", "turns", "position, permuted"),  # which halves turn
    ("stretched", "turns", "position"),
    ("other gate", "mlp", "swapped"),
    ("no gate", "mlp", "scale, other"),  # a factor is missing
    ("residual of the norm", "layer", "swapped, stale"),
    ("heads", "attention", "permuted, transposed"),  # of heads and tokens
    ("scale twice", "attention", "scale"),
    ("values of keys", "attention", "swapped"),
    ("whole norm", "norm", "scale"),
    ("base", "turns", "position"),
    ("activation", "mlp", "activation"),
    ("epsilon", "second", "eps"),
    ("bias", "attention", "bias missing"),
)


def some(mistakes: dict[str, Mistake], *names: str) -> dict[str, Mistake]:
    """Return some of the mistakes by name."""
    return {name: mistakes[name] for name in names}


PAIRS = [
    Pair(
        "transformers gpt neox with a past, curated-transformers",
        ("curated_transformers",),
        neox,
        KEPT,
        NEOX_MISTAKES,
    ),
    Pair(
        "transformers gpt neox with a past, curated-transformers/bfloat16",
        ("curated_transformers",),
        partial(neox, dtype=torch.bfloat16),
        _in(KEPT, torch.bfloat16),
        some(NEOX_MISTAKES, "scale", "one norm", "bias", "rotated back"),
    ),
    Pair(
        "transformers gpt neox with a past, curated-transformers/float16",
        ("curated_transformers",),
        partial(neox, dtype=torch.float16),
        _in(KEPT, torch.float16),
        some(NEOX_MISTAKES, "from zero", "split after", "keys last"),
    ),
    Pair(
        "transformers qwen2 packed, torchtune",
        ("torchtune",),
        qwen,
        PACKED,
        QWEN_MISTAKES,
    ),
    Pair(
        "transformers qwen2 packed, torchtune/bfloat16",
        ("torchtune",),
        partial(qwen, dtype=torch.bfloat16),
        PACKED,
        some(QWEN_MISTAKES, "groups", "other gate", "stretched"),
    ),
]
