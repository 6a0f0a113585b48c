"""Models of packages beside transformers', whose mistakes and kinds were written before anything was run on them."""

from __future__ import annotations

from typing import Any

import torch
from pair import Mistake, Pair, part_of, rewritten, shaken
from speech import filled, renamed
from torch import Tensor, nn

Edits = dict[str, tuple[str, str]]
G = torch.Generator().manual_seed(3)


class Logits(nn.Module):
    """What a model answers, of a key or a place of it, to one tensor."""

    def __init__(self, own: nn.Module, key: Any, name: str) -> None:
        super().__init__()
        self.own, self.key, self.name = own, key, name

    def forward(self, x: Tensor) -> Tensor:
        found = self.own(**{self.name: x})
        return found if self.key is None else found[self.key]


class Unpadded(nn.Module):
    """Logits of tokens, of which some are padding."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        return self.own(input_ids=x, attention_mask=(x != 1).long()).logits


PROTEIN_EDITS: Edits = {
    "base": ("10000 **", "1000 **"),
    "rotated back": ("torch.cat((-x2, x1), dim=-1)", "torch.cat((x2, -x1), dim=-1)"),
    "scale": ("self.head_dim**-0.5", "self.head_dim**-1.0"),
    "padding": (
        "        if key_padding_mask is not None:\n            # don't attend",
        "        if False:\n            # don't",
    ),
    "ratio": ("mask_ratio_train = 0.15 * 0.8", "mask_ratio_train = 0.15"),
    "masked tokens": ("            x.masked_fill_((tokens == self.mask_idx).unsqueeze(-1), 0.0)\n", ""),
    "activation": (
        "x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))\n",
        "F.gelu(x, approximate='tanh')\n",
    ),
    "residual": (
        "        residual = x\n        x = self.final_layer_norm(x)\n",
        "        x = self.final_layer_norm(x)\n        residual = x\n",
    ),
    "head": ("        x = self.dense(features)\n        x = gelu(x)\n", "        x = self.dense(features)\n"),
    "bias": ("F.linear(x, self.weight) + self.bias", "F.linear(x, self.weight)"),
    "keys": ("            v = self.v_proj(value)\n", "            v = self.k_proj(value)\n"),
}


def protein(mistake: str) -> tuple[nn.Module, nn.Module]:
    from transformers import EsmConfig, EsmForMaskedLM

    config = EsmConfig(
        vocab_size=33, mask_token_id=32, pad_token_id=1, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128, position_embedding_type="rotary", token_dropout=True, layer_norm_eps=1e-5,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    own = shaken(EsmForMaskedLM(config))
    names = ("rotary_embedding", "multihead_attention", "modules", "model.esm2")
    model = rewritten([f"esm.{name}" for name in names], PROTEIN_EDITS.get(mistake))[-1]
    other = model.ESM2(num_layers=2, embed_dim=32, attention_heads=2)
    if mistake == "epsilon":
        other.layers[1].final_layer_norm.eps = 1e-3
    names = (
        ("esm.embeddings.word_embeddings", "embed_tokens"),
        ("esm.contact_head", "contact_head"),
        ("esm.encoder.emb_layer_norm_after", "emb_layer_norm_after"),
        ("esm.encoder.layer.", "layers."),
        ("attention.self.query", "self_attn.q_proj"),
        ("attention.self.key", "self_attn.k_proj"),
        ("attention.self.value", "self_attn.v_proj"),
        ("attention.self.rotary_embeddings", "self_attn.rot_emb"),
        ("attention.output.dense", "self_attn.out_proj"),
        ("attention.LayerNorm", "self_attn_layer_norm"),
        ("intermediate.dense", "fc1"),
        ("output.dense", "fc2"),
        ("LayerNorm", "final_layer_norm"),
        ("lm_head.decoder.", "lm_head."),
    )
    left = ("position_ids", "inv_freq", "position_embeddings.weight")
    given = {name: tensor for name, tensor in own.state_dict().items() if not name.endswith(left)}
    return Unpadded(own).eval(), Logits(filled(other, renamed(given, *names)), "logits", "tokens").eval()


STATE_EDITS: Edits = {
    "order": (
        "delta, B, C = self._apply_layernorms(delta, B, C)\n        delta = self.dt_proj.weight @",
        "delta, C, B = self._apply_layernorms(delta, B, C)\n        delta = self.dt_proj.weight @",
    ),
    "gate first": ("x, z = xz.chunk(2, dim=-1)", "z, x = xz.chunk(2, dim=-1)"),
    "grows": ("A = -torch.exp(self.A_log.float()) # (ED, N)\n", "A = torch.exp(self.A_log.float())\n"),
    "bias": ("F.softplus(delta + self.dt_proj.bias)", "F.softplus(delta)"),
    "not softened": ("F.softplus(delta + self.dt_proj.bias)", "F.relu(delta + self.dt_proj.bias)"),
    "no skip": (
        "        hs = torch.stack(hs, dim=1) # (B, L, ED, N)\n\n        y = (hs @ C.unsqueeze(-1)).squeeze(3) "
        "# (B, L, ED, N) @ (B, L, N, 1) -> (B, L, ED, 1)\n\n        y = y + D * x\n",
        "        hs = torch.stack(hs, dim=1)\n        y = (hs @ C.unsqueeze(-1)).squeeze(3)\n",
    ),
    "state before": (
        "            h = deltaA[:, t] * h + BX[:, t]\n            hs.append(h)\n",
        "            hs.append(h)\n            h = deltaA[:, t] * h + BX[:, t]\n",
    ),
    "state of zeros": ("h = deltaA[:, t] * h + BX[:, t]", "h = BX[:, t]"),
    "convolution looks ahead": ("x = self.conv1d(x)[:, :, :L]", "x = self.conv1d(x)[:, :, -L:]"),
    "activation": ("x = F.silu(x)\n        y = self.ssm(x, z)", "x = F.gelu(x)\n        y = self.ssm(x, z)"),
    "gate": ("z = F.silu(z)\n\n        output = y * z\n        output = self.out_proj(output) # (B, L, D)",
             "z = torch.sigmoid(z)\n\n        output = y * z\n        output = self.out_proj(output)"),
    "residual": ("output = self.mixer(self.norm(x)) + x\n", "output = self.mixer(self.norm(x)) + self.norm(x)\n"),
}  # fmt: skip


class States(nn.Module):
    """Layers of state spaces between an embedding and a norm."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        config = module.MambaConfig(d_model=32, n_layers=2, d_state=5, dt_rank=4, pscan=False)
        self.embeddings = nn.Embedding(40, 32)
        self.own, self.norm_f = module.Mamba(config), module.RMSNorm(32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm_f(self.own(self.embeddings(tokens)))


def states(mistake: str) -> tuple[nn.Module, nn.Module]:
    from transformers import MambaConfig, MambaModel

    config = MambaConfig(
        vocab_size=40, hidden_size=32, state_size=5, num_hidden_layers=2, time_step_rank=4, residual_in_fp32=False,
        use_mambapy=False, use_associative_scan=False,
    )  # fmt: skip
    torch.manual_seed(0)
    own = shaken(MambaModel(config))
    (module,) = rewritten(["mambapy.mamba"], STATE_EDITS.get(mistake))
    other = filled(States(module), renamed(own.state_dict(), ("layers.", "own.layers.")))
    if mistake == "epsilon":
        other.own.layers[1].norm.eps = 1e-3
    return Logits(own, "last_hidden_state", "input_ids").eval(), other.eval()


PATCH_EDITS: Edits = {
    "no scale": ("attn = (q * self.scale) @ k", "attn = q @ k"),
    "scale twice": ("add_decomposed_rel_pos(attn, q,", "add_decomposed_rel_pos(attn, q * self.scale,"),
    "rows and columns": (
        "rel_h[:, :, :, :, None] + rel_w[:, :, :, None, :]",
        "rel_h[:, :, :, None, :] + rel_w[:, :, :, :, None]",
    ),
    "distance": ("relative_coords = (q_coords - k_coords)", "relative_coords = (k_coords - q_coords)"),
    "heads": (
        "3, self.num_heads, -1).permute(2, 0, 3, 1, 4)\n        # q, k",
        "self.num_heads, 3, -1).permute(3, 0, 2, 1, 4)\n        # q, k",
    ),
    "windows": ("windows = x.permute(0, 1, 3, 2, 4, 5)", "windows = x.permute(0, 3, 1, 2, 4, 5)"),
    "padding": ("F.pad(x, (0, 0, 0, pad_w, 0, pad_h))", "F.pad(x, (0, 0, pad_w, 0, pad_h, 0))"),
    "places": ("            x = x + self.pos_embed\n", "            pass\n"),
    "exchanged": ("q, k, v = qkv.reshape(3,", "k, q, v = qkv.reshape(3,"),
    "residual": (
        "        shortcut = x\n        x = self.norm1(x)\n",
        "        x = self.norm1(x)\n        shortcut = x\n",
    ),
    "deviation": ("s = (x - u).pow(2).mean(1, keepdim=True)", "s = x.var(1, keepdim=True)"),
    "norm over places": ("u = x.mean(1, keepdim=True)", "u = x.mean(2, keepdim=True)"),
}


def patches(mistake: str) -> tuple[nn.Module, nn.Module]:
    from transformers.models.sam.configuration_sam import SamVisionConfig
    from transformers.models.sam.modeling_sam import SamVisionEncoder

    config = SamVisionConfig(
        hidden_size=32, output_channels=16, num_hidden_layers=2, num_attention_heads=2, image_size=64, patch_size=8,
        window_size=3, global_attn_indexes=[1], mlp_dim=64, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    own = shaken(SamVisionEncoder(config))
    part_of("segment_anything.modeling.common", bare=["segment_anything", "segment_anything.modeling"])
    names = [f"segment_anything.modeling.{name}" for name in ("common", "image_encoder")]
    module = rewritten(names, PATCH_EDITS.get(mistake))[-1]
    other = module.ImageEncoderViT(
        img_size=64, patch_size=8, embed_dim=32, depth=2, num_heads=2, mlp_ratio=2, out_chans=16, use_rel_pos=True,
        window_size=3, global_attn_indexes=(1,), norm_layer=lambda width: nn.LayerNorm(width, eps=1e-6),
    )  # fmt: skip
    pieces = (
        ("patch_embed.projection", "patch_embed.proj"),
        ("neck.conv1", "neck.0"),
        ("neck.layer_norm1", "neck.1"),
        ("neck.conv2", "neck.2"),
        ("neck.layer_norm2", "neck.3"),
        ("layers.", "blocks."),
        ("layer_norm", "norm"),
    )
    other = filled(other, renamed(own.state_dict(), *pieces))
    if mistake == "epsilon":
        other.blocks[1].norm2.eps = 1e-3
    return Logits(own, "last_hidden_state", "pixel_values").eval(), other


EARLY_EDITS: Edits = {
    "scale": ("w = w / math.sqrt(v.size(-1))", "w = w / v.size(-1)"),
    "no mask": ("w = w * b - 1e4 * (1 - b)", "w = w * 1"),
    "one more": ("torch.tril(torch.ones(n_ctx, n_ctx))", "torch.tril(torch.ones(n_ctx, n_ctx), 1)"),
    "heads": (
        "x = x.view(*new_x_shape)  # in Tensorflow implem: fct split_states",
        "x = x.view(*x.size()[:-1], x.size(-1) // self.n_head, self.n_head).transpose(-1, -2)",
    ),
    "split": ("query, key, value = x.split", "query, value, key = x.split"),
    "activation": (
        "return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))\n\n\nclass",
        "return x * torch.sigmoid(1.702 * x)\n\n\nclass",
    ),
    "constant": ("(x + 0.044715 * torch.pow(x, 3))))\n\n\nclass", "(x + 0.44715 * torch.pow(x, 3))))\n\n\nclass"),
    "places": (
        "torch.arange(past_length, input_ids.size(-1) + past_length",
        "torch.arange(past_length + 1, input_ids.size(-1) + past_length + 1",
    ),
    "last norm": ("        hidden_states = self.ln_f(hidden_states)\n", ""),
    "norm": ("m = self.mlp(self.ln_2(x))", "m = self.mlp(self.ln_1(x))"),
    "residual": ("        x = x + m\n", "        x = m\n"),
}


def early(mistake: str) -> tuple[nn.Module, nn.Module]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=40, n_positions=20, n_embd=32, n_layer=2, n_head=2, activation_function="gelu_new",
        attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    own = shaken(GPT2LMHeadModel(config))
    absent = ["boto3", "botocore", "botocore.exceptions", "botocore.config"]
    part_of("pytorch_pretrained_bert.modeling_gpt2", bare=["pytorch_pretrained_bert"], without=absent)
    (module,) = rewritten(["pytorch_pretrained_bert.modeling_gpt2"], EARLY_EDITS.get(mistake))
    other = module.GPT2LMHeadModel(module.GPT2Config(40, 20, 20, 32, 2, 2))
    given = renamed(own.state_dict(), ("lm_head.", "lm_head.decoder."))
    if mistake == "transposed":
        given["transformer.h.0.attn.c_proj.weight"] = given["transformer.h.0.attn.c_proj.weight"].T
    other = filled(other, given)
    if mistake == "epsilon":
        other.transformer.h[1].ln_1.variance_epsilon = 1e-3
    return Logits(own, "logits", "input_ids").eval(), Logits(other, 0, "input_ids").eval()


def written(*lines: tuple[str, list[str], str]) -> dict[str, Mistake]:
    return {name: Mistake([f"own.{site}" for site in sites], kinds=kinds.split(", ")) for name, sites, kinds in lines}


A = "bias missing, other"  # no word for a residual that is not added
TOKENS = torch.cat([torch.randint(4, 24, (2, 9), generator=G), torch.tensor([[32, 5, 2], [2, 1, 1]])], 1)
PAIRS = [
    Pair(
        "transformers esm, fair-esm",
        ("esm",),
        protein,
        {"x": TOKENS},
        written(
            ("base", ["esm.encoder.layer.0.attention*", "esm*rotary*"], "position"),
            ("rotated back", ["esm.encoder.layer.0.attention*"], "position, scale"),  # one sign
            ("scale", ["esm.encoder.layer.0.attention*"], "scale"),
            ("padding", ["esm.encoder.layer.0.attention*", "esm*"], "mask"),
            ("ratio", ["esm.embeddings*"], "scale"),
            ("masked tokens", ["esm.embeddings*"], "mask, other"),  # embeddings are zeroed, no pairs hidden
            ("activation", ["esm.encoder.layer.0.intermediate*"], "activation"),
            ("residual", ["esm.encoder.layer.0.output*"], "swapped, stale"),
            ("head", ["lm_head*"], "activation"),
            ("bias", ["lm_head*"], "bias missing"),
            ("keys", ["esm.encoder.layer.0.attention*"], "swapped"),
            ("epsilon", ["esm.encoder.layer.1.LayerNorm*"], "eps"),
        ),
    ),
    Pair(
        "transformers mamba, mambapy",
        ("mambapy",),
        states,
        {"x": torch.randint(0, 40, (2, 9), generator=G)},
        written(
            ("order", ["layers.0.mixer*"], "swapped"),
            ("gate first", ["layers.0.mixer*"], "swapped"),
            ("grows", ["layers.0.mixer*"], "scale"),
            ("bias", ["layers.0.mixer*"], "bias missing"),
            ("not softened", ["layers.0.mixer*"], "activation"),
            ("no skip", ["layers.0.mixer*"], A),
            ("state before", ["layers.0.mixer*"], "stale, position"),  # the state of the step before: both words fit
            ("state of zeros", ["layers.0.mixer*"], "stale, scale, other"),  # what was kept is lost: times zero
            ("convolution looks ahead", ["layers.0.mixer*"], "position"),
            ("activation", ["layers.0.mixer*"], "activation"),
            ("gate", ["layers.0.mixer*"], "activation"),
            ("residual", ["layers.0*"], "swapped, stale"),
            ("epsilon", ["layers.1.norm*"], "eps"),
        ),
    ),
    Pair(
        "transformers sam, segment-anything",
        ("segment_anything",),
        patches,
        {"x": torch.randn(1, 3, 64, 64, generator=G)},
        written(
            ("no scale", ["layers.0.attn*"], "scale"),
            ("scale twice", ["layers.0.attn*"], "scale"),
            ("rows and columns", ["layers.0.attn*"], "transposed, swapped"),  # two terms change their places
            ("distance", ["layers.0.attn*"], "position, permuted"),  # the same as a table read from its end
            ("heads", ["layers.0.attn*"], "permuted"),
            ("windows", ["layers.0*"], "permuted, transposed"),  # of windows in rows and columns
            ("padding", ["layers.0*"], "position, other"),
            ("places", ["*"], "bias missing, other, position"),
            ("exchanged", ["layers.0.attn*"], "swapped"),
            ("residual", ["layers.0*"], "swapped, stale"),
            ("deviation", ["neck*"], "other, scale"),  # n - 1 for n
            ("norm over places", ["neck*"], "transposed, other"),
            ("epsilon", ["layers.1.layer_norm2*"], "eps"),
        ),
    ),
    Pair(
        "transformers gpt2, pytorch-pretrained-bert",
        ("pytorch_pretrained_bert",),
        early,
        {"x": torch.randint(0, 40, (2, 9), generator=G)},
        written(
            ("scale", ["transformer.h.0.attn*"], "scale"),
            ("no mask", ["transformer.h.0.attn*", "*"], "mask"),
            ("one more", ["transformer.h.0.attn*", "*"], "mask"),
            ("heads", ["transformer.h.0.attn*"], "permuted"),
            ("split", ["transformer.h.0.attn*"], "swapped"),
            ("activation", ["transformer.h.0.mlp*"], "activation"),
            ("constant", ["transformer.h.0.mlp*"], "activation, scale"),  # a factor inside
            ("places", ["transformer.wpe*", "*"], "position"),
            ("last norm", ["transformer.ln_f*", "lm_head*"], "other"),
            ("norm", ["transformer.h.0*"], "swapped, stale"),
            ("residual", ["transformer.h.0*"], A),
            ("transposed", ["transformer.h.0.attn.c_proj*"], "transposed"),
            ("epsilon", ["transformer.h.1.ln_1*"], "eps"),
        ),
    ),
]
