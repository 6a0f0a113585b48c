"""Decoding with a cache, of packages beside transformers'. Kinds were written before anything was run on them."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from pair import Mistake, Pair, part_of, rewritten, shaken
from speech import filled, renamed
from torch import Tensor, nn
from unseen import Edits

G = torch.Generator().manual_seed(5)


def in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a module whose weights have a dtype; frequencies and tables keep theirs, as loading a checkpoint does."""
    for tensor in module.parameters():
        tensor.data = tensor.data.to(dtype)
    return module.eval()


class Steps(nn.Module):
    """The same of litgpt, which has a cache of its own."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        return self.own(input_ids, cache_position)


class Kept(nn.Module):
    """A decoder of transformers whose keys and values are buffers, written in place."""

    def __init__(self, own: Any, batch: int, longest: int) -> None:
        super().__init__()
        self.own, self.longest = own, longest
        config, dtype = own.config, own.dtype
        for number in range(config.num_hidden_layers):
            shape = batch, config.num_key_value_heads, longest, config.hidden_size // config.num_attention_heads
            for name in ("keys", "values"):
                self.register_buffer(f"{name}_{number}", torch.zeros(shape, dtype=dtype), persistent=False)

    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        from transformers import StaticCache

        cache = StaticCache(config=self.own.config, max_cache_len=self.longest)
        for number, layer in enumerate(cache.layers):
            layer.keys, layer.values = getattr(self, f"keys_{number}"), getattr(self, f"values_{number}")
            layer.cumulative_length = cache_position[0].clone()
            layer.device, layer.dtype, layer.is_initialized = layer.keys.device, layer.keys.dtype, True
        return self.own(input_ids=input_ids, past_key_values=cache, use_cache=True).logits


LATER = "k = batched_index_copy_(self.k[:bs, ...], -2, input_pos, k)"
VALUES = "v = batched_index_copy_(self.v[:bs, ...], -2, input_pos, v)"
TURNS = (
    "            cos = batched_index_select(self.cos, 0, input_pos)\n"
    "            sin = batched_index_select(self.sin, 0, input_pos)\n"
)
SPLIT = "q, k, v = qkv.split((query_size, key_size, value_size), dim=-1)"
SECOND = "            x_normed = self.norm_2(x)\n\n        return"
SHARED = (
    "(input_pos is None or n_query_groups != 1):\n            q_per_kv = n_head // n_query_groups\n            k = k."
)
STEPS_EDITS: Edits = {
    "written late": (LATER, LATER.replace("input_pos", "input_pos + 1")),
    "values not written": (VALUES, "v = self.v[:bs, ...]"),
    "values for keys": (LATER, "k = batched_index_copy_(self.k[:bs, ...], -2, input_pos, v)"),
    "kept in half": (LATER, LATER.replace("input_pos, k)", "input_pos, k.to(torch.bfloat16).to(k.dtype))")),
    "one more": (
        "mask = batched_index_select(self.mask_cache, 2, input_pos)",
        "mask = batched_index_select(self.mask_cache, 2, input_pos + 1)",
    ),
    "no mask": ("    return torch.tril(ones).unsqueeze(0)", "    return ones.unsqueeze(0)"),
    "turned late": (TURNS, TURNS.replace("input_pos", "(input_pos - 1).clamp(min=0)")),
    "stuck": (TURNS, TURNS.replace("input_pos", "input_pos - input_pos[0]")),
    "turned twice": (
        "            k_roped = apply_rope(k[..., :rope_n_elem], cos, sin)\n",
        "            k_roped = apply_rope(apply_rope(k[..., :rope_n_elem], cos, sin), cos, sin)\n",
    ),
    "keys not turned": (
        "            k_roped = apply_rope(k[..., :rope_n_elem], cos, sin)\n",
        "            k_roped = k[..., :rope_n_elem]\n",
    ),
    "groups": (f"        if n_query_groups != n_head and {SHARED}repeat_interleave(q_per_kv, dim=1)",
               f"        if n_query_groups != n_head and {SHARED}repeat(1, q_per_kv, 1, 1)"),
    "scale": ("self.config.attention_scores_scalar or self.config.head_size)", "self.config.n_embd)"),
    "gate": ("        x = F.silu(x_fc_1) * x_fc_2\n        return self.proj(x)\n\n\nclass GemmaMLP",
             "        x = F.silu(x_fc_2) * x_fc_1\n        return self.proj(x)\n\n\nclass GemmaMLP"),
    "sum": ("norm_x = torch.mean(x * x, dim=self.dim, keepdim=True)",
            "norm_x = torch.sum(x * x, dim=self.dim, keepdim=True)"),
    "order": (SPLIT, SPLIT.replace("q, k, v", "q, v, k")),
    "residual": (
        f"            x = attention_output + x\n{SECOND}",
        f"            x = attention_output + x_normed\n{SECOND}",
    ),
}  # fmt: skip


def steps(mistake: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=12, tie_word_embeddings=False,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    own = in_dtype(shaken(LlamaForCausalLM(config)), dtype)
    part_of("litgpt.model", bare=["litgpt", "litgpt.scripts"], without=["litgpt.scripts.convert_hf_checkpoint"])
    (module,) = rewritten(["litgpt.model"], STEPS_EDITS.get(mistake))
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_query_groups": 2, "intermediate_size": 48, "block_size": 12}
    options: dict[str, Any] = {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "norm_eps": 1e-5}
    options |= {"rotary_percentage": 1.0, "parallel_residual": False, "bias": False, "padded_vocab_size": 40}
    # In which its configuration looks for norms.
    with patch.dict(sys.modules, {"litgpt.model": module}), patch.object(sys.modules["litgpt"], "model", module):
        other = module.GPT(module.Config(**sizes, **options))
    given: dict[str, Tensor] = {}
    for name, tensor in own.state_dict().items():
        if name.endswith("q_proj.weight"):
            parts = [own.state_dict()[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            given[name.replace("q_proj", "qkv")] = torch.cat(parts)
        elif not name.endswith(("k_proj.weight", "v_proj.weight")):
            given[name] = tensor
    names = (
        ("model.embed_tokens", "transformer.wte"),
        ("model.norm", "transformer.ln_f"),
        ("model.layers.", "transformer.h."),
        ("input_layernorm", "norm_1"),
        ("post_attention_layernorm", "norm_2"),
        ("self_attn.", "attn."),
        ("o_proj", "proj"),
        ("gate_proj", "fc_1"),
        ("up_proj", "fc_2"),
        ("down_proj", "proj"),
    )
    other = in_dtype(filled(in_dtype(other, dtype), renamed(given, *names)), dtype)
    if mistake == "epsilon":
        other.transformer.h[1].norm_2.eps = 1e-3
    other.set_kv_cache(batch_size=2, dtype=dtype)
    return Kept(own, 2, 12).eval(), Steps(other).eval()


class Past(nn.Module):
    """A model of transformers that is given what is kept: [layers, 2, batch, heads, tokens, size]."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, tokens: Tensor, past: Tensor) -> Tensor:
        from transformers import DynamicCache

        cache = DynamicCache()
        for number, (keys, values) in enumerate(past):
            cache.update(keys, values, number)
        return self.own(input_ids=tokens, past_key_values=cache, use_cache=True).logits


class OfPast(nn.Module):
    """The same of pytorch_transformers."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, tokens: Tensor, past: Tensor) -> Tensor:
        return self.own(tokens, past=list(past))[0]


PAST_EDITS: Edits = {
    "places": (
        "torch.arange(past_length, input_ids.size(-1) + past_length",
        "torch.arange(0, input_ids.size(-1)",
    ),
    "past last": ("key = torch.cat((past_key, key), dim=-1)", "key = torch.cat((key, past_key), dim=-1)"),
    "keys for values": (
        "past_key, past_value = layer_past[0].transpose(-2, -1), layer_past[1]",
        "past_key, past_value = layer_past[0].transpose(-2, -1), layer_past[0]",
    ),
    "mask of the first": ("self.bias[:, :, ns-nd:ns, :ns]", "self.bias[:, :, :nd, :ns]"),  # codespell:ignore
    "scale": ("w = w / math.sqrt(v.size(-1))", "w = w / math.sqrt(v.size(-2))"),
    "heads": ("x = x.permute(0, 2, 1, 3).contiguous()\n"
              "        new_x_shape = x.size()[:-2] + (x.size(-2) * x.size(-1),)",
              "new_x_shape = (x.size(0), x.size(2), x.size(1) * x.size(3))"),
    "pasts": ("enumerate(zip(self.h, past))", "enumerate(zip(self.h, past[::-1]))"),
    "past lost": ("past_value = layer_past[0].transpose(-2, -1), layer_past[1]  #",
                  "past_value = layer_past[0].transpose(-2, -1), layer_past[1] * 0  #"),
}  # fmt: skip


def past(mistake: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=40, n_positions=20, n_embd=32, n_layer=2, n_head=2, activation_function="gelu_new",
        attn_implementation="eager",
    )  # fmt: skip
    own = in_dtype(shaken(GPT2LMHeadModel(config)), dtype)
    absent = ["boto3", "botocore", "botocore.exceptions", "botocore.config", "six"]
    part_of("pytorch_transformers.modeling_gpt2", bare=["pytorch_transformers"], without=absent)
    (module,) = rewritten(["pytorch_transformers.modeling_gpt2"], PAST_EDITS.get(mistake))
    made = module.GPT2Config(
        vocab_size_or_config_json_file=40, n_positions=20, n_ctx=20, n_embd=32, n_layer=2, n_head=2
    )
    other = in_dtype(filled(in_dtype(module.GPT2LMHeadModel(made), dtype), own.state_dict()), dtype)
    return Past(own).eval(), OfPast(other).eval()


def written(places: dict[str, list[str]], *lines: tuple[str, str, str]) -> dict[str, Mistake]:
    """Return mistakes of lines: name, places, kinds."""
    return {name: Mistake(places[place], kinds=kinds.split(", ")) for name, place, kinds in lines}


ONE = "*model.layers.0.self_attn*"
OF_STEPS = {
    "cache": [ONE, "*cache*"],
    "attention": [ONE],
    "turns": [ONE, "*rotary*"],
    "mask": [ONE, "*"],
    "norm": ["*model.layers.0.input_layernorm*"],
    "second norm": ["*model.layers.1.post_attention_layernorm*"],
    "mlp": ["*model.layers.0.mlp*"],
    "layer": ["*model.layers.0*"],
}
OF_PAST = {
    "places": ["*wpe*", "own*"],
    "attention": ["*transformer.h.0.attn*", "own*"],
    "kept": ["*transformer.h.0.attn*", "own*", "./cat.1"],
    "mask": ["*transformer.h.0.attn*", "*"],
}


def tokens(number: int) -> Tensor:
    return torch.randint(0, 40, (2, number), generator=G)


STEPS = [
    {"input_ids": tokens(5), "cache_position": torch.arange(5)},
    {"input_ids": tokens(1), "cache_position": torch.tensor([5])},
    {"input_ids": tokens(1), "cache_position": torch.tensor([6])},
]
KEPT = "what a cache holds of the step before has the rounding of that step, which is called suspicious"
PAIRS = [
    Pair(
        "transformers llama in steps, litgpt",
        ("litgpt",),
        steps,
        STEPS,
        written(
            OF_STEPS,
            ("written late", "cache", "position, stale"),  # a slot off; its own slot has what was there before
            ("values not written", "cache", "stale"),
            ("values for keys", "cache", "swapped"),
            ("kept in half", "cache", "dtype"),
            ("one more", "mask", "mask"),
            ("no mask", "mask", "mask"),
            ("turned late", "turns", "position"),
            ("stuck", "turns", "position"),
            ("turned twice", "turns", "position"),
            ("keys not turned", "turns", "position"),
            ("groups", "attention", "permuted"),
            ("scale", "attention", "scale"),
            ("order", "attention", "swapped"),
        ),
        KEPT,
    ),
    Pair(
        "transformers llama in steps, litgpt/bfloat16",
        ("litgpt",),
        partial(steps, dtype=torch.bfloat16),
        STEPS,
        written(
            OF_STEPS,
            ("gate", "mlp", "swapped"),
            ("epsilon", "second norm", "eps"),
            ("values not written", "cache", "stale"),
            ("scale", "attention", "scale"),
        ),
        KEPT,
    ),
    Pair(
        "transformers llama in steps, litgpt/float16",
        ("litgpt",),
        partial(steps, dtype=torch.float16),
        STEPS,
        written(
            OF_STEPS,
            ("written late", "cache", "position, stale"),
            ("stuck", "turns", "position"),
            ("sum", "norm", "scale, other"),  # of a norm: a factor, or another reduction
            ("residual", "layer", "swapped, stale"),
        ),
        KEPT,
    ),
    Pair(
        "transformers gpt2 with a past, pytorch-transformers",
        ("pytorch_transformers",),
        past,
        {"tokens": tokens(3), "past": torch.randn(2, 2, 2, 2, 4, 16, generator=G)},
        written(
            OF_PAST,
            ("places", "places", "position"),
            ("past last", "attention", "swapped, position"),  # two operands, and with them where tokens are
            ("keys for values", "attention", "swapped"),
            ("mask of the first", "mask", "mask"),
            ("scale", "attention", "scale"),
            ("heads", "attention", "permuted, transposed"),  # of heads and tokens
            ("pasts", "attention", "stale, swapped"),  # of another layer
            ("past lost", "kept", "stale, scale, other"),  # zeros where values were kept
        ),
    ),
]
