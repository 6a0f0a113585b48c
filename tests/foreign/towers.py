"""Towers of images and text, and a decoder: packages whose kinds of mistakes were written before anything was run."""

from __future__ import annotations

from functools import partial

import torch
from cached import in_dtype, written
from pair import Pair, part_of, rewritten, shaken
from speech import filled, renamed
from torch import nn
from unseen import Edits, Logits

G = torch.Generator().manual_seed(6)
POOLED = (
    "            pooled = text_global_pool(x, text, pool_type=self.pool_type, "
    'eos_token_id=getattr(self, "eos_id", None))\n            tokens = x\n'
)
TOWER_EDITS: Edits = {
    "class last": (
        "torch.cat([_expand_token(self.class_embedding, x.shape[0]).to(x.dtype), x], dim=1)",
        "torch.cat([x, _expand_token(self.class_embedding, x.shape[0]).to(x.dtype)], dim=1)",
    ),
    "columns first": (
        "x = x.reshape(x.shape[0], x.shape[1], -1)  # shape = [*, width, grid ** 2]\n        x = x.permute(0, 2, 1)  #",
        "x = x.transpose(2, 3).reshape(x.shape[0], x.shape[1], -1)\n        x = x.permute(0, 2, 1)  #",
    ),
    "no places": ("        x = x + self.positional_embedding.to(x.dtype)\n", ""),
    "residual": (
        "x = q_x + self.ls_1(self.attention(q_x=self.ln_1(q_x), k_x=k_x, v_x=v_x, attn_mask=attn_mask))\n"
        "        x = x + self.ls_2(self.mlp(self.ln_2(x)))\n        return x\n\n\nclass Custom",
        "x = self.ln_1(q_x)\n        x = x + self.ls_1(self.attention(q_x=x, k_x=k_x, v_x=v_x, attn_mask=attn_mask))\n"
        "        x = x + self.ls_2(self.mlp(self.ln_2(x)))\n        return x\n\n\nclass Custom",
    ),
    "factor": ("x * torch.sigmoid(1.702 * x)", "x * torch.sigmoid(1.5 * x)"),
    "two more": (
        'mask = torch.empty(self.num_pos, self.num_pos)\n        mask.fill_(float("-inf"))\n        mask.triu_(1)',
        'mask = torch.empty(self.num_pos, self.num_pos)\n        mask.fill_(float("-inf"))\n        mask.triu_(2)',
    ),
    "last token": ("text.argmax(dim=-1)]\n", "text.argmax(dim=-1) - 1]\n"),
    "last norm": (f"            x = self.ln_final(x)\n{POOLED}", POOLED),
}


def towers(mistake: str, tower: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    from transformers import (
        CLIPTextConfig,
        CLIPTextModelWithProjection,
        CLIPVisionConfig,
        CLIPVisionModelWithProjection,
    )

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    options = {**sizes, "projection_dim": 32, "hidden_act": "quick_gelu", "attn_implementation": "eager"}
    part_of("open_clip.transformer", bare=["open_clip"], without=["open_clip.utils"])
    (module,) = rewritten(["open_clip.transformer"], TOWER_EDITS.get(mistake))
    quick = nn.GELU if mistake == "activation" else module.QuickGELU
    ours = {"width": 32, "layers": 2, "heads": 4, "mlp_ratio": 2.0, "output_dim": 32, "act_layer": quick}
    module.to_2tuple = lambda size: (size, size)
    if tower == "image":
        own = CLIPVisionModelWithProjection(CLIPVisionConfig(image_size=24, patch_size=8, **options))
        other = module.VisionTransformer(image_size=24, patch_size=8, **ours)
    else:
        places = {"vocab_size": 40, "max_position_embeddings": 9, "eos_token_id": 39}
        own = CLIPTextModelWithProjection(CLIPTextConfig(**places, **options))
        other = module.TextTransformer(context_length=9, vocab_size=40, no_causal_mask=mistake == "no mask", **ours)
    own = in_dtype(shaken(own), dtype)
    names = (
        ("text_model.", ""),
        ("vision_model.", ""),
        ("embeddings.token_embedding", "token_embedding"),
        ("embeddings.position_embedding.weight", "positional_embedding"),
        ("embeddings.class_embedding", "class_embedding"),
        ("embeddings.patch_embedding", "conv1"),
        ("encoder.layers", "transformer.resblocks"),
        ("self_attn", "attn"),
        ("layer_norm1", "ln_1"),
        ("layer_norm2", "ln_2"),
        ("fc1", "c_fc"),
        ("fc2", "c_proj"),
        ("pre_layrnorm", "ln_pre"),
        ("post_layernorm", "ln_post"),
        ("final_layer_norm", "ln_final"),
        ("visual_projection.weight", "proj"),
        ("text_projection.weight", "text_projection"),
    )
    given = renamed({n: t for n, t in own.state_dict().items() if not n.endswith("position_ids")}, *names)
    order = ("k_proj", "q_proj", "v_proj") if mistake == "exchanged" else ("q_proj", "k_proj", "v_proj")
    for name in [name for name in given if "q_proj" in name]:
        parts = [given.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        parts = [dict(zip(("q_proj", "k_proj", "v_proj"), parts, strict=True))[part] for part in order]
        given[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
    last = "proj" if tower == "image" else "text_projection"
    given[last] = given[last] if mistake == "transposed" else given[last].T
    if mistake == "bias":
        given["transformer.resblocks.0.attn.out_proj.bias"] = torch.zeros(32)
    if mistake == "layers":
        given["transformer.resblocks.1.mlp.c_fc.weight"] = given["transformer.resblocks.0.mlp.c_fc.weight"]
    if mistake == "places":
        given["positional_embedding"] = given["positional_embedding"].roll(1, 0)
    other = in_dtype(filled(in_dtype(other, dtype), given), dtype)
    if mistake == "epsilon":
        other.transformer.resblocks[1].ln_2.eps = 1e-2  # a smaller one is beneath the rounding of float16
    key, name = ("image_embeds", "pixel_values") if tower == "image" else ("text_embeds", "input_ids")
    return Logits(own, key, name).eval(), Logits(other, None, "x" if tower == "image" else "text").eval()


HIDDEN = "                    .type_as(x),\n                    "
RELU = '    if activation == "relu":\n        return '
DECODER_EDITS: Edits = {
    "offset": ("torch.arange(2, x.size(1) + 2, device", "torch.arange(1, x.size(1) + 1, device"),
    "scale of keys": ("        q *= self.scaling\n", "        q *= self.scaling\n        k *= self.scaling\n"),
    "heads": (
        "attn.transpose(0, 1).reshape(tgt_len, bsz, embed_dim).transpose(0, 1)\n",
        "attn.reshape(bsz, tgt_len, embed_dim)\n",
    ),
    "over queries": (
        "attn_weights = F.softmax(attn_weights, dim=-1, ",
        "attn_weights = F.softmax(attn_weights, dim=-2, ",
    ),
    "two more": (f"{HIDDEN}1,\n", f"{HIDDEN}2,\n"),
    "activation": (f"{RELU}F.relu", f"{RELU}F.gelu"),
    "in half": (
        "F.softmax(attn_weights, dim=-1, dtype=torch.float32)",
        "F.softmax(attn_weights.half(), dim=-1)",
    ),
    "no last norm": ("        if self.layer_norm is not None:\n            x = self.layer_norm(x)\n", ""),
}  # fmt: skip


def decoder(mistake: str) -> tuple[nn.Module, nn.Module]:
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, ffn_dim=64, num_attention_heads=4,
        max_position_embeddings=16, word_embed_proj_dim=32, attn_implementation="eager", tie_word_embeddings=False,
    )  # fmt: skip
    own = shaken(OPTForCausalLM(config))
    names = ("component.multihead_attention", "component.feedforward_network", "component.embedding",
             "architecture.decoder")  # fmt: skip
    bare = ["torchscale", "torchscale.component", "torchscale.component.xmoe", "torchscale.architecture"]
    absent = [
        "fairscale",
        "fairscale.nn",
        "torchscale.component.droppath",
        "torchscale.component.xmoe.moe_layer",
        "torchscale.component.xmoe.routing",
    ]
    part_of("torchscale.architecture.decoder", bare=bare, without=absent)
    modules = rewritten([f"torchscale.{name}" for name in names], DECODER_EDITS.get(mistake))
    part_of("torchscale.architecture.config")
    made = part_of("torchscale.architecture.config").DecoderConfig(
        decoder_embed_dim=32, decoder_attention_heads=4, decoder_ffn_embed_dim=64, decoder_layers=2, vocab_size=40,
        decoder_normalize_before=True, activation_fn="relu", no_scale_embedding=mistake != "embedding", subln=False,
    )  # fmt: skip
    other = modules[-1].Decoder(made, modules[2].TextEmbedding(40, 32), modules[2].PositionalEmbedding(18, 32))
    pieces = (
        ("model.decoder.", ""),
        ("lm_head", "output_projection"),
        ("fc", "ffn.fc"),
    )
    given = renamed(own.state_dict(), *pieces)
    given = {n.replace("final_layer_norm", "layer_norm") if n.startswith("final") else n: t for n, t in given.items()}
    if mistake == "bias":
        given["layers.1.self_attn.out_proj.bias"] = torch.zeros(32)
    other = filled(other, given)
    if mistake == "residual":
        other.layers[1].alpha = 2.0
    return Logits(own, "logits", "input_ids").eval(), Logits(other, 0, "prev_output_tokens").eval()


FIRST = "*layers.0.self_attn*"
OF_TOWERS = {
    "embeddings": ["*embeddings*", "own*"],
    "first": ["*layers.0*"],
    "attention": [FIRST],
    "mask": [FIRST, "*"],
    "mlp": ["*layers.0.mlp*"],
    "second mlp": ["*layers.1.mlp*"],
    "norm": ["*layers.1.layer_norm2*"],
    "end": ["*projection*", "own*", "*final_layer_norm*"],
}
OF_DECODER = {
    "places": ["*embed_positions*"],
    "tokens": ["*decoder/*", "*embed_tokens*"],
    "attention": [FIRST],
    "mask": [FIRST, "*"],
    "first": ["*layers.0*"],
    "second": ["*layers.1*"],
    "end": ["*final_layer_norm*", "*lm_head*"],
}
TEXTS = torch.cat([torch.randint(1, 30, (2, 7), generator=G), torch.tensor([[39, 3], [5, 39]])], 1)
PAIRS = [
    Pair(
        "transformers clip images, open_clip/bfloat16",
        ("open_clip",),
        partial(towers, tower="image", dtype=torch.bfloat16),
        {"x": torch.randn(2, 3, 24, 24, generator=G).to(torch.bfloat16)},
        written(
            OF_TOWERS,
            ("class last", "embeddings", "swapped, permuted"),  # the order of two parts
            ("columns first", "embeddings", "transposed, permuted"),  # rows and columns of a grid
            ("no places", "embeddings", "bias missing, position"),  # a table that is added
            ("residual", "first", "swapped, stale"),
            ("factor", "mlp", "activation, scale"),  # a factor inside
            ("activation", "mlp", "activation"),
            ("exchanged", "attention", "swapped"),
            ("bias", "attention", "bias missing"),
            ("transposed", "end", "transposed"),
        ),
    ),
    Pair(
        "transformers clip text, open_clip/float16",
        ("open_clip",),
        partial(towers, tower="text", dtype=torch.float16),
        {"x": TEXTS},
        written(
            OF_TOWERS,
            ("two more", "mask", "mask"),
            ("no mask", "mask", "mask"),
            ("last token", "end", "position"),
            ("last norm", "end", "other"),
            ("places", "embeddings", "position"),
            ("layers", "second mlp", "stale, swapped"),  # a weight of another layer
            ("activation", "mlp", "activation"),
            ("epsilon", "norm", "eps"),
        ),
    ),
    Pair(
        "transformers opt, torchscale",
        ("torchscale",),
        decoder,
        {"x": torch.randint(2, 40, (2, 9), generator=G)},
        written(
            OF_DECODER,
            ("offset", "places", "position"),
            ("embedding", "tokens", "scale"),
            ("scale of keys", "attention", "scale"),
            ("heads", "attention", "permuted, transposed"),  # of heads and tokens, as in cached.py
            ("over queries", "attention", "transposed, other"),  # another axis
            ("two more", "mask", "mask"),
            ("activation", "first", "activation"),
            ("in half", "attention", "dtype"),
            ("no last norm", "end", "other"),
            ("bias", "second", "bias missing"),
            ("residual", "second", "scale"),
        ),
    ),
]
