"""Decoders of one key, windows, recurrences, graphs and images: models of their packages, and mistakes in them.

Kinds were written before anything was run on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from absent import timm_model
from cached import written
from mixers import halved
from pair import Pair, part_of, rewritten, shaken
from speech import filled
from torch import Tensor, nn
from unseen import Edits

G = torch.Generator().manual_seed(17)
ANY = {"all": ["*"]}


def of_files(make: Callable[[Any], nn.Module], names: Sequence[str], edits: Edits, **options: Any) -> Any:
    """Return what makes a pair: a model of modules of a package, the last one, and of their sources with a mistake."""

    def pair(mistake: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
        part_of(names[-1], **options)
        torch.manual_seed(0)
        own = shaken(make(last_of(rewritten(names, None))))
        other = make(last_of(rewritten(names, edits.get(mistake))))
        held = dict(own.named_parameters()).keys()  # tables are its own
        given = {name: t for name, t in own.state_dict().items() if name in held or ".running_" in name}
        other.load_state_dict(given, strict=False)
        return own.to(dtype).eval(), other.to(dtype).eval()

    return pair


def last_of(modules: Sequence[Any]) -> Any:
    """Return the last of some modules, with what it has of the others, also where it got that from their package."""
    for module in modules[:-1]:
        for name, value in vars(module).items():
            if name in vars(modules[-1]) and getattr(value, "__module__", "") == module.__name__:
                setattr(modules[-1], name, value)
    return modules[-1]


def lines(*mistakes: tuple[str, str]) -> Any:
    """Return mistakes of lines: name, kinds."""
    return written(ANY, *((name, "all", kinds) for name, kinds in mistakes))


def some(pair: Pair, dtype: torch.dtype, *names: str) -> Pair:
    """Return a pair in another dtype, with some of its mistakes."""
    return replace(halved(pair, dtype), mistakes={name: pair.mistakes[name] for name in names})


ONE_KEY_EDITS: Edits = {
    "base": ("(10000 **", "(1000 **"),
    "rotated back": ("torch.cat((-x2, x1), dim=-1)", "torch.cat((x2, -x1), dim=-1)"),
    "pairs": (
        'rearrange(x, "... (j d) -> ... j d", j=2)\n    x1, x2 = x.unbind(dim=-2)',
        'rearrange(x, "... (d j) -> ... j d", j=2)\n    x1, x2 = x.unbind(dim=-2)',
    ),
    "not scaled": ("        q = q * self.scale\n", ""),
    "sees the next": (".triu(1)", ".triu(2)"),
    "gate": ("return F.silu(gate) * x", "return F.silu(x) * gate"),
    "activation": ("return F.silu(gate) * x", "return F.gelu(gate) * x"),
    "no residual": ("return self.fn(x) + x", "return self.fn(x)"),
    "values for keys": ("q, k, v, ff = self", "q, v, k, ff = self"),
    "heads": ('"b n (h d) -> b h n d", h=h', '"b n (d h) -> b h n d", h=h'),
    "keys not turned": (
        "q, k = map(lambda t: apply_rotary_pos_emb(positions, t), (q, k))",
        "q = apply_rotary_pos_emb(positions, q)",
    ),
    "epsilon": ("self.gamma, self.beta)", "self.gamma, self.beta, 1e-3)"),
    "no feedforward": ("return self.attn_out(out) + self.ff_out(ff)", "return self.attn_out(out)"),
}
WINDOW_EDITS: Edits = {
    "window": ("causal_mask | (bq_t > (bq_k + max_causal_window_size))", "causal_mask"),
    "looks ahead": ("causal_mask = bq_t < bq_k", "causal_mask = bq_t < bq_k - 1"),
    "padding inverted": ("sim.masked_fill(~mask, mask_value)", "sim.masked_fill(mask, mask_value)"),
    "places": ("self.pos_emb(torch.arange(n, device = device))", "self.pos_emb(torch.arange(1, n + 1))"),
    "stretched alike": ("inv_scale = scale ** -1", "inv_scale = scale"),
    "scale of queries": ("k = k * self.k_scale", "k = k * self.q_scale"),
    "gate": ("out = out * gates.sigmoid()", "out = out * gates.tanh()"),
    "keys not normalized": ("q, k = map(l2norm, (q, k))", "q = l2norm(q)"),
    "other half": ("return x * F.gelu(gate)", "return gate * F.gelu(x)"),
    "half frequencies": ("torch.arange(0, dim, 2).float() / dim", "torch.arange(0, dim, 2).float() / (2 * dim)"),
    "scale": ("scale = (qk_scale if qk_rmsnorm else None)", "scale = None"),
    "padded in front": ("F.pad(tensor, (*pad_offset, 0, remainder)", "F.pad(tensor, (*pad_offset, remainder, 0)"),
}
SCAN_EDITS: Edits = {
    "convolution looks ahead": ("(self.kernel_size - 1, 0), value", "(0, self.kernel_size - 1), value"),
    "sign of the gate": ("log_coeffs = -F.softplus(gate)\n", "log_coeffs = -F.softplus(-gate)\n"),
    "gate first": ("hidden, gate = self.to", "gate, hidden = self.to"),
    "one for half": ("(F.relu(x) + 0.5).log()", "(F.relu(x) + 1.0).log()"),
    "residual": ("            x = min_gru_out + x\n", "            x = min_gru_out\n"),
    "activation": ("nn.GELU()", "nn.GELU(approximate='tanh')"),
    "along channels": (
        ".logcumsumexp(dim = 1)\n    log_h = a_star + log_h0_plus_b_star\n    return log_h.exp()\n\n# appendix B.3\n",
        ".logcumsumexp(dim = 2)\n    log_h = a_star + log_h0_plus_b_star\n    return log_h.exp()\n\n# appendix B.3\n",
    ),
    "norms": ("x = ff(ff_norm(x)) + x", "x = ff(norm(x)) + x"),
    "epsilon": ("self.norm = RMSNorm(dim)", "self.norm = RMSNorm(dim, eps = 1e-3)"),
    "in logarithms": ("    return log_h.exp()\n\n# appendix B.3\n", "    return log_h\n\n# appendix B.3\n"),
    "added": ("(log_values - a_star)", "(log_values + a_star)"),
}
GRAPH_EDITS: Edits = {
    "direction": (
        "rearrange(coors, 'b i d -> b i () d') - rearrange(coors, 'b j d -> b () j d')",
        "rearrange(coors, 'b j d -> b () j d') - rearrange(coors, 'b i d -> b i () d')",
    ),
    "not squared": ("(rel_coors ** 2).sum(", "rel_coors.abs().sum("),
    "sum for mean": ("m_i = safe_div(m_ij.sum(dim = -2), mask_sum)", "m_i = m_ij.sum(dim = -2)"),
    "mask inverted": ("coor_weights.masked_fill_(~mask, 0.)", "coor_weights.masked_fill_(mask, 0.)"),
    "padding is near": ("ranking.masked_fill_(~rank_mask, 1e5)", "ranking.masked_fill_(~rank_mask, 0.)"),
    "farthest": ("topk(num_nearest, dim = -1, largest = False)", "topk(num_nearest, dim = -1, largest = True)"),
    "gate": ("nn.Linear(m_dim, 1),\n            nn.Sigmoid()", "nn.Linear(m_dim, 1),\n            nn.Tanh()"),
    "one side": ("coor_weights.clamp_(min = -clamp_value,", "coor_weights.clamp_(min = 0,"),
    "no residual": ("node_out = self.node_mlp(node_mlp_input) + feats", "node_out = self.node_mlp(node_mlp_input)"),
    "sender first": ("torch.cat((feats_i, feats_j, rel_dist)", "torch.cat((feats_j, feats_i, rel_dist)"),
    "places lost": (
        "coors_out = einsum('b i j, b i j c -> b i c', coor_weights, rel_coors) + coors",
        "coors_out = einsum('b i j, b i j c -> b i c', coor_weights, rel_coors)",
    ),
    "cosines first": ("torch.cat([x.sin(), x.cos()], dim=-1)", "torch.cat([x.cos(), x.sin()], dim=-1)"),
    "not normed": ("normed_feats = self.node_norm(feats)", "normed_feats = feats"),
    "scale": ("k) * self.scale\n\n        if exists(mask):", "k)\n\n        if exists(mask):"),
}


class Nodes(nn.Module):
    """Features and places of the atoms of a graph; padding has none."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.own = module.EGNN_Network(
            depth=2, dim=16, num_tokens=10, num_positions=8, global_linear_attn_every=2, global_linear_attn_heads=2,
            global_linear_attn_dim_head=8, num_nearest_neighbors=3, fourier_features=2, norm_coors=True, m_dim=8,
            m_pool_method="mean", soft_edges=True, coor_weights_clamp_value=0.2,
        )  # fmt: skip

    def forward(self, tokens: Tensor, places: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        features, moved = self.own(tokens, places, mask=seen)
        return features, moved


class Windows(nn.Module):
    """A decoder of windows over texts of which some tokens are padding."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.own = module.LocalTransformer(
            num_tokens=40, max_seq_len=16, dim=32, depth=2, local_attn_window_size=4, dim_head=8, heads=4,
            use_xpos=True, qk_rmsnorm=True, gate_values_per_head=True, num_residual_streams=1,
        )  # fmt: skip

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        return self.own(x, mask=seen)


RETENTION = 'similarity = einsum(query, key, "b h n d, b h s d -> b h n s")\n'
RETENTION_EDITS: Edits = {
    "not scaled": (
        f"    key = key / scale\n\n    {RETENTION}    similarity = similarity * rearrange(decay_mask, "
        '"h n s -> () h n s")\n    retention = einsum(similarity, value, "b h n s, b h s d -> b h n d")\n\n    if need',
        f"    {RETENTION}    similarity = similarity * rearrange(decay_mask, "
        '"h n s -> () h n s")\n    retention = einsum(similarity, value, "b h n s, b h s d -> b h n d")\n\n    if need',
    ),
    "sees the next": ("triu_(diagonal=1)", "triu_(diagonal=2)"),
    "other decay": ("log(1 / 32), log(1 / 512)", "log(1 / 16), log(1 / 512)"),
    "angles": ("thetas = 1 / (scale**x)", "thetas = 1 / (scale ** (x / 2))"),
    "halves of angles": ('"d -> (d n)", n=2', '"d -> (n d)", n=2'),
    "rotated back": (
        "torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1)",
        "torch.stack((x[..., 1::2], -x[..., ::2]), dim=-1)",
    ),
    "gate not activated": (
        "        gate = self.activation(self.g_proj(query))\n        retention = self.out_proj(retention * gate)\n\n"
        "        return retention, weights",
        "        gate = self.g_proj(query)\n        retention = self.out_proj(retention * gate)\n\n"
        "        return retention, weights",
    ),
    "one group": ("num_groups=num_heads,", "num_groups=1,"),
    "epsilon": ("group_norm_eps: float = 1e-6", "group_norm_eps: float = 1e-3"),
    "norms": (
        "x = x + _retention_block(self.norm1(x))\n",
        "x = x + _retention_block(self.norm2(x))\n",
    ),
    "no residual": (
        "self.norm1(x))\n            x = x + self._feedforward_block(self.norm2(x))\n        else:\n"
        "            x = x + self.norm1(_ret",
        "self.norm1(x))\n            x = self._feedforward_block(self.norm2(x))\n        else:\n"
        "            x = x + self.norm1(_ret",
    ),
}
RECURRENT = (
    "            angles = seq_idx * thetas\n            sin = torch.sin(angles)\n"
    "            cos = torch.cos(angles)\n\n"
)
DECAYED = 'state = state + prev_state * rearrange(decay_gammas, "h -> () h () ()")\n'
STATE = 'state = einsum(key, value, "b h d, b h m -> b h d m")\n'
RECURRENT_EDITS: Edits = {
    "not decayed": (DECAYED, "state = state + prev_state\n"),
    "state lost": (f"    if prev_state is not None:\n        {DECAYED}", f"    if False:\n        {DECAYED}"),
    "state turned": (STATE, STATE.replace("b h d m", "b h m d")),
    "queries not turned": (f"{RECURRENT}            q = _theta_shift(q, sin, cos)\n", RECURRENT),
    "read before": (
        'retention = einsum(query, state, "b h d,',
        'retention = einsum(query, prev_state, "b h d,',
    ),
    "kept in half": (STATE, STATE.strip() + ".to(torch.bfloat16).to(key.dtype)\n"),
}


class Retained(nn.Module):
    """All tokens at once."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        own = module.RetNet(40, 32, 2, 2, 0.0, "swish", 48)
        theirs = vars(module)["MultiScaleRetention"].forward_parallel.__globals__
        theirs["_build_decay_mask"] = theirs["_build_decay_mask"].__wrapped__
        theirs["_build_decay_gammas"] = theirs["_build_decay_gammas"].__wrapped__
        theirs["_theta_shift"] = lambda x, sin, cos: (x * cos) + (theirs["_multiply_by_i"](x) * sin)
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        return self.own.forward_parallel(x)


class Remembered(Retained):
    """A token a step, and what is kept of those before."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        for number in range(2):
            self.register_buffer(f"state_{number}", torch.zeros(2, 2, 16, 16), persistent=False)

    def forward(self, x: Tensor, place: Tensor) -> Tensor:  # type: ignore[override]
        states = [self.state_0, self.state_1]
        made, after = self.own.forward_recurrent(x, place, [state.clone() for state in states])
        for state, new in zip(states, after, strict=True):
            state.copy_(new)
        return made


def retained(make: Callable[[Any], nn.Module], edits: Edits) -> Any:
    return of_files(make, ["yet_another_retnet.retention", "yet_another_retnet.retnet"], edits)


def registers(mistake: str) -> tuple[nn.Module, nn.Module]:
    """Images with registers: transformers' and timm's."""
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    config = Dinov2WithRegistersConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, mlp_ratio=3, image_size=24, patch_size=8,
        use_swiglu_ffn=True, num_register_tokens=2, attn_implementation="eager", layer_norm_eps=1e-6,
    )  # fmt: skip
    torch.manual_seed(0)
    own = shaken(Dinov2WithRegistersModel(config))
    module = timm_model("vision_transformer")
    other = module.VisionTransformer(
        img_size=24, patch_size=8, embed_dim=32, depth=2, num_heads=4, mlp_ratio=4, num_classes=0, global_pool="",
        init_values=1e-5, reg_tokens=2, no_embed_class=True, mlp_layer=module.SwiGLUPacked, act_layer=nn.SiLU,
    )  # fmt: skip
    given: dict[str, Tensor] = {}
    old = own.state_dict()
    places = old["embeddings.position_embeddings"]
    columns = places[:, 1:].reshape(1, 3, 3, 32).transpose(1, 2).reshape(1, 9, 32)
    given["cls_token"] = old["embeddings.cls_token"] + places[:, :1]
    given["reg_token"] = old["embeddings.register_tokens"]
    given["pos_embed"] = columns if mistake == "columns first" else places[:, 1:]
    patch = old["embeddings.patch_embeddings.projection.weight"]
    given["patch_embed.proj.weight"] = patch.transpose(-1, -2) if mistake == "patches turned" else patch
    given["patch_embed.proj.bias"] = old["embeddings.patch_embeddings.projection.bias"]
    parts = ("k", "q", "v") if mistake == "order" else ("q", "k", "v")
    halves = ("up", "gate") if mistake == "halves" else ("gate", "up")
    for number in range(2):
        here, there = f"encoder.layer.{number}", f"blocks.{number}"
        for end in ("weight", "bias"):
            for name in ("norm1", "norm2"):
                given[f"{there}.{name}.{end}"] = old[f"{here}.{name}.{end}"]
            packed = torch.stack([old[f"{here}.attention.{part}_proj.{end}"] for part in parts])
            if mistake == "heads":
                packed = packed.unflatten(1, (4, 8)).transpose(0, 1)
            given[f"{there}.attn.qkv.{end}"] = packed.reshape(
                96, *packed.shape[len(packed.shape) - (end == "weight") :]
            )
            given[f"{there}.attn.proj.{end}"] = old[f"{here}.attention.o_proj.{end}"]
            given[f"{there}.mlp.fc1.{end}"] = torch.cat([old[f"{here}.mlp.{half}_proj.{end}"] for half in halves])
            given[f"{there}.mlp.fc2.{end}"] = old[f"{here}.mlp.down_proj.{end}"]
        for name in ("1", "2"):
            given[f"{there}.ls{name}.gamma"] = old[f"{here}.layer_scale{name}.lambda1"]
    given["norm.weight"], given["norm.bias"] = old["layernorm.weight"], old["layernorm.bias"]
    if mistake == "norm of the next":
        given["blocks.0.norm1.weight"] = old["encoder.layer.1.norm1.weight"]
    if mistake == "bias":
        given["blocks.1.mlp.fc2.bias"] = torch.zeros(32)
    other = filled(other, given)
    if mistake == "no layer scale":
        other.blocks[0].ls1 = nn.Identity()
    if mistake == "scale":
        for block in other.blocks:
            block.attn.scale, block.attn.fused_attn = 32**-0.5, False
    if mistake == "activation":
        other.blocks[0].mlp.act = nn.GELU()
    if mistake == "epsilon":
        other.blocks[1].norm2.eps = 1e-3
    return Seen(own).eval(), other.eval()


class Seen(nn.Module):
    """Tokens of an image."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        return self.own(pixel_values=x).last_hidden_state


SEEN = torch.ones(2, 10, dtype=torch.bool)
SEEN[1, 7:] = False
ATOMS = torch.ones(2, 7, dtype=torch.bool)
ATOMS[1, 5:] = False
TOKENS = torch.randint(0, 40, (2, 9), generator=G)
SINGLE = {
    "palm": Pair(
        "palm",
        ("palm_pytorch", "einops"),
        of_files(
            lambda m: m.PaLM(dim=32, num_tokens=40, depth=2, dim_head=8, heads=4, ff_mult=2),
            ["palm_pytorch.palm_pytorch"],
            ONE_KEY_EDITS,
        ),
        {"input": TOKENS},
        lines(
            ("base", "position"),
            ("rotated back", "position, scale"),  # one sign
            ("pairs", "permuted, position"),
            ("not scaled", "scale"),
            ("sees the next", "mask"),
            ("gate", "swapped"),
            ("activation", "activation"),
            ("no residual", "bias missing, other"),
            ("values for keys", "swapped"),
            ("heads", "permuted"),
            ("keys not turned", "position"),
            ("epsilon", "eps"),
            ("no feedforward", "bias missing, other"),
        ),
    ),
    "windows": Pair(
        "local attention",
        ("local_attention", "hyper_connections", "einops"),
        of_files(
            Windows, [f"local_attention.{name}" for name in ("rotary", "local_attention", "transformer")], WINDOW_EDITS
        ),
        {"x": torch.randint(0, 40, (2, 10), generator=G), "seen": SEEN},
        lines(
            ("window", "mask"),
            ("looks ahead", "mask"),
            ("padding inverted", "mask"),
            ("places", "position"),
            ("stretched alike", "position, scale"),  # a factor of positions
            ("scale of queries", "swapped"),
            ("gate", "activation"),
            ("keys not normalized", "other, scale"),
            ("other half", "swapped"),
            ("half frequencies", "position"),
            ("scale", "scale"),
            ("padded in front", "position"),
        ),
    ),
    "scan": Pair(
        "min gru",
        ("minGRU_pytorch",),
        of_files(
            lambda m: m.minLM(num_tokens=40, dim=32, depth=2, ff_mult=2, enable_conv=True),
            [f"minGRU_pytorch.{name}" for name in ("minGRU", "minLM")],
            SCAN_EDITS,
        ),
        {"x": TOKENS},
        lines(
            ("convolution looks ahead", "position"),
            ("sign of the gate", "scale"),
            ("gate first", "swapped"),
            ("one for half", "other, activation"),  # a number that is added, in an activation
            ("residual", "bias missing, other"),
            ("activation", "activation"),
            ("along channels", "transposed, other"),  # another axis
            ("norms", "swapped"),
            ("epsilon", "eps"),
            ("in logarithms", "activation"),
            ("added", "scale"),
        ),
    ),
    "graph": Pair(
        "egnn",
        ("egnn_pytorch", "einops"),
        of_files(Nodes, ["egnn_pytorch.egnn_pytorch"], GRAPH_EDITS),
        {
            "tokens": torch.randint(0, 10, (2, 7), generator=G),
            "places": torch.randn(2, 7, 3, generator=G),
            "seen": ATOMS,
        },
        lines(
            ("direction", "swapped, scale"),  # a - b for b - a
            ("not squared", "other"),
            ("sum for mean", "scale, other"),
            ("mask inverted", "mask"),
            ("padding is near", "mask"),
            ("farthest", "other"),
            ("gate", "activation"),
            ("one side", "other"),
            ("no residual", "bias missing, other"),
            ("sender first", "swapped"),
            ("places lost", "bias missing, other"),
            ("cosines first", "swapped, permuted, position"),
            ("not normed", "other, swapped, stale"),  # the tensor before its norm is read
            ("scale", "scale"),
        ),
    ),
    "retained": Pair(
        "retnet",
        ("yet_another_retnet", "einops"),
        retained(Retained, RETENTION_EDITS),
        {"x": TOKENS},
        lines(
            ("not scaled", "scale"),
            ("sees the next", "mask"),
            ("other decay", "scale, position"),  # of distances
            ("angles", "position"),
            ("halves of angles", "permuted, position"),
            ("rotated back", "position, scale"),
            ("gate not activated", "activation"),
            ("one group", "other"),
            ("epsilon", "eps"),
            ("norms", "swapped"),
            ("no residual", "bias missing, other"),
        ),
    ),
    "remembered": Pair(
        "retnet in steps",
        ("yet_another_retnet", "einops"),
        retained(Remembered, RECURRENT_EDITS),
        [{"x": torch.randint(0, 40, (2,), generator=G), "place": torch.tensor(place)} for place in range(3)],
        lines(
            ("not decayed", "scale"),
            ("state lost", "stale, bias missing, other"),  # what was kept is not added
            ("state turned", "transposed, swapped"),
            ("queries not turned", "position"),
            ("read before", "stale"),
            ("kept in half", "dtype"),
        ),
    ),
    "registers": Pair(
        "transformers dinov2 with registers, timm",
        ("timm",),
        registers,
        {"x": torch.randn(2, 3, 24, 24, generator=G)},
        lines(
            ("no layer scale", "scale"),
            ("scale", "scale"),
            ("order", "swapped"),
            ("halves", "swapped"),
            ("patches turned", "transposed"),
            ("epsilon", "eps"),
            ("bias", "bias missing"),
            ("heads", "permuted"),
            ("columns first", "transposed, permuted, position"),
            ("norm of the next", "stale, swapped"),
            ("activation", "activation"),
        ),
    ),
}
PAIRS = [
    *SINGLE.values(),
    some(SINGLE["palm"], torch.bfloat16, "base", "gate", "sees the next", "keys not turned", "heads"),
    some(SINGLE["windows"], torch.float16, "places", "looks ahead", "scale of queries"),
    some(SINGLE["retained"], torch.bfloat16, "not scaled", "rotated back", "gate not activated"),
]
