"""Attention in other forms, and what stands in its place: models of their packages, and the same with a mistake.

Kinds were written before anything was run on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from cached import written
from pair import Pair, part_of, rewritten, shaken
from torch import Tensor, nn
from unseen import Edits

G = torch.Generator().manual_seed(13)


class Features(nn.Module):
    """Queries, keys and values of one tensor, and the attention of performer_pytorch over them."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.attention = module.FastAttention(8, nb_features=12)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.view(2, 10, 2, 8).transpose(1, 2) for part in parts)
        return self.out(self.attention(q, k, v).transpose(1, 2).reshape(2, 10, 16))


def both(make: Callable[[Any], nn.Module], name: str, edits: Edits, **options: Any) -> Any:
    """Return what makes a pair: a model of a package's module, and the one of its source with a mistake."""

    def pair(mistake: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
        part_of(name, **options)
        torch.manual_seed(0)
        own = shaken(make(rewritten([name], None)[0]))
        other = make(rewritten([name], edits.get(mistake))[0])
        other.load_state_dict(own.state_dict())
        return own.to(dtype).eval(), other.to(dtype).eval()

    return pair


def halved(pair: Pair, dtype: torch.dtype) -> Pair:
    """Return a pair in another dtype."""
    given = {name: t.to(dtype) if t.is_floating_point() else t for name, t in dict(pair.inputs).items()}  # type: ignore
    name = f"{pair.name}/{str(dtype).removeprefix('torch.')}"
    return replace(pair, name=name, make=partial(pair.make, dtype=dtype), inputs=given)


LINFORMER_EDITS: Edits = {
    "one projection": (
        "(self.proj_k, self.proj_v if not self.share_kv else self.proj_k)",
        "(self.proj_k, self.proj_k)",
    ),
    "width of the model": ("queries, keys) * (d_h ** -0.5)", "queries, keys) * (d ** -0.5)"),
    "heads": ("out = out.transpose(1, 2).reshape(b, n, -1)", "out = out.reshape(b, n, -1)"),
    "width before heads": (
        "t.reshape(b, k, -1, d_h).transpose(1, 2)",
        "t.reshape(b, k, d_h, -1).permute(0, 3, 1, 2)",
    ),
    "over places": ("attn = dots.softmax(dim=-1)", "attn = dots.softmax(dim=-2)"),
    "from the end": ("torch.arange(x.shape[1], device=x.device)", "torch.arange(x.shape[1], device=x.device).flip(0)"),
}
NYSTROM_EDITS: Edits = {
    "polynomial": ("13 * I", "12 * I"),
    "sums": ("    q_landmarks = q_landmarks / divisor\n", "    q_landmarks = q_landmarks\n"),
    "no convolution": ("            out = out + self.res_conv(v)\n", "            pass\n"),
    "values first": ("q, k, v = self.to_qkv(x).chunk(3", "v, k, q = self.to_qkv(x).chunk(3"),
    "padding after": ("x = F.pad(x, (0, 0, padding, 0), value = 0)", "x = F.pad(x, (0, 0, 0, padding), value = 0)"),
    "first of all": ("out = out[:, -n:]", "out = out[:, :n]"),
    "not scaled": ("        q = q * self.scale\n", ""),
    "other landmarks": ("sim2 = einsum(einops_eq, q_landmarks, k_landmarks)",
                        "sim2 = einsum(einops_eq, k_landmarks, k_landmarks)"),
}  # fmt: skip
GATED_EDITS: Edits = {
    "not normed": ("        gate = self.norm(gate)\n", ""),
    "gate for rest": ("res, gate = x.chunk(2, dim = -1)", "gate, res = x.chunk(2, dim = -1)"),
    "sees the next": (".triu_(1)", ".triu_(2)"),
    "matrix turned": ("'b h n d, h m n -> b h m d'", "'b h n d, h n m -> b h m d'"),
    "no bias": ("gate = gate + rearrange(bias, 'h n -> () h n ()')", "gate = gate"),
    "no attention": ("            gate = gate + gate_res\n", "            pass\n"),
    "added": ("return self.act(gate) * res", "return self.act(gate) + res"),
}
FEATURES_EDITS: Edits = {
    "halved": ("(diag_data / 2.0)", "diag_data"),
    "not divided": (",...n->...ne', context, q, D_inv", "->...ne', context, q"),
    "keys of values": ("k = create_kernel(k, is_query = False)", "k = create_kernel(v, is_query = False)"),
    "epsilon": ("is_query, normalize_data=True, eps=1e-4", "is_query, normalize_data=True, eps=1e-2"),
    "mean of keys": ("k_cumsum = k.sum(dim = -2)\n    D_inv", "k_cumsum = k.mean(dim = -2)\n    D_inv"),
}
PERCEIVER_EDITS: Edits = {
    "bands": ("torch.linspace(1., max_freq / 2, num_bands", "torch.linspace(1., max_freq, num_bands"),
    "no pi": ("x = x * scales * pi", "x = x * scales"),
    "other gate": ("x, gates = x.chunk(2, dim = -1)", "gates, x = x.chunk(2, dim = -1)"),
    "values first": ("k, v = self.to_kv(kv).chunk(2, dim = -1)", "v, k = self.to_kv(kv).chunk(2, dim = -1)"),
    "mask inverted": ("sim.masked_fill_(~mask, max_neg_value)", "sim.masked_fill_(mask, max_neg_value)"),
    "no shortcut": ("inverted_attention = inverted_attention) + x", "inverted_attention = inverted_attention)"),
    "context not normed": ("kwargs.update(context = normed_context)", "kwargs.update(context = context)"),
    "activation": ("return x * F.gelu(gates)", "return x * F.silu(gates)"),
}


class Masked(nn.Module):
    """A perceiver of series, of which some places are seen."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.own = module.Perceiver(
            num_freq_bands=3, depth=2, max_freq=8.0, input_channels=4, input_axis=1, num_latents=6, latent_dim=16,
            cross_heads=1, latent_heads=2, cross_dim_head=8, latent_dim_head=8, num_classes=5,
        )  # fmt: skip

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        return self.own(x, mask=seen)


SEEN = torch.ones(2, 12, dtype=torch.bool)
SEEN[1, 8:] = False
ANY = {"all": ["*"]}
SINGLE = [
    Pair(
        "linformer",
        ("linformer",),
        both(lambda m: m.LinformerLM(40, 32, 12, 2, k=5, heads=4), "linformer.linformer", LINFORMER_EDITS),
        {"x": torch.randint(0, 40, (2, 12), generator=G)},
        written(
            ANY,
            ("one projection", "all", "swapped"),
            ("width of the model", "all", "scale"),
            ("heads", "all", "permuted, transposed"),  # of heads and places
            ("width before heads", "all", "permuted"),
            ("over places", "all", "transposed, other"),  # another axis
            ("from the end", "all", "position"),
        ),
    ),
    Pair(
        "nystrom attention",
        ("nystrom_attention", "einops"),
        both(
            lambda m: m.Nystromformer(
                dim=32,
                depth=2,
                dim_head=8,
                heads=4,
                num_landmarks=4,
                pinv_iterations=2,
                attn_values_residual_conv_kernel=3,
            ),
            "nystrom_attention.nystrom_attention",
            NYSTROM_EDITS,
        ),
        {"x": torch.randn(2, 10, 32, generator=G)},
        written(
            ANY,
            ("polynomial", "all", "scale, other"),  # a number in a polynomial
            ("sums", "all", "scale"),
            ("no convolution", "all", "other, bias missing"),
            ("values first", "all", "swapped"),
            ("padding after", "all", "position"),
            ("first of all", "all", "position"),
            ("not scaled", "all", "scale"),
            ("other landmarks", "all", "swapped"),
        ),
    ),
    Pair(
        "g-mlp",
        ("g_mlp_pytorch", "einops"),
        both(
            lambda m: m.gMLP(num_tokens=40, dim=16, depth=2, seq_len=9, heads=2, ff_mult=2, attn_dim=8, causal=True),
            "g_mlp_pytorch.g_mlp_pytorch",
            GATED_EDITS,
        ),
        {"x": torch.randint(0, 40, (2, 9), generator=G)},
        written(
            ANY,
            ("not normed", "all", "other"),
            ("gate for rest", "all", "swapped"),
            ("sees the next", "all", "mask"),
            ("matrix turned", "all", "transposed"),
            ("no bias", "all", "bias missing"),
            ("no attention", "all", "bias missing, other"),
            ("added", "all", "other, scale"),  # a sum for a product
        ),
    ),
    Pair(
        "performer",
        ("performer_pytorch", "einops"),
        both(
            Features,
            "performer_pytorch.performer_pytorch",
            FEATURES_EDITS,
            bare=["performer_pytorch"],
            without=["local_attention", "axial_positional_embedding"],
        ),
        {"x": torch.randn(2, 10, 16, generator=G)},
        written(
            ANY,
            ("halved", "all", "scale"),
            ("not divided", "all", "scale, other"),  # a factor that is missing
            ("keys of values", "all", "swapped"),
            ("epsilon", "all", "eps"),
            ("mean of keys", "all", "other, scale"),  # a mean for a sum
        ),
    ),
    Pair(
        "perceiver",
        ("perceiver_pytorch", "einops"),
        both(Masked, "perceiver_pytorch.perceiver_pytorch", PERCEIVER_EDITS),
        {"x": torch.randn(2, 12, 4, generator=G), "seen": SEEN},
        written(
            ANY,
            ("bands", "all", "position"),
            ("no pi", "all", "position, scale"),  # a factor of angles
            ("other gate", "all", "swapped"),
            ("values first", "all", "swapped"),
            ("mask inverted", "all", "mask"),
            ("no shortcut", "all", "other, bias missing"),
            ("context not normed", "all", "other, swapped, stale"),  # the tensor before its norm is read
            ("activation", "all", "activation"),
        ),
    ),
]
PAIRS = [
    *SINGLE,
    *(halved(pair, torch.bfloat16) for pair in SINGLE if pair.name in ("linformer", "g-mlp", "perceiver")),
]
