"""Recommendations by time, images of noise, liquid recurrences and sound: models of their packages, and mistakes.

Kinds were written before anything was run on them.
"""

from __future__ import annotations

from typing import Any

import torch
from pair import Pair
from torch import Tensor, nn
from unseen import Edits
from varied import lines, of_files, some

G = torch.Generator().manual_seed(19)

TIMED_EDITS: Edits = {
    "scale": ("self.attn_alpha = 1.0 / math.sqrt(dqk)", "self.attn_alpha = 1.0 / math.sqrt(d_model)"),
    "other length": ("F.silu(scores) / self.max_seq_len", "F.silu(scores) / seq_len"),
    "softmax": ("F.silu(scores) / self.max_seq_len", "F.softmax(scores, dim=-1)"),
    "sees the next": (
        "torch.tril(torch.ones(seq_len, seq_len, device=x.device, dtype=torch.bool))\n        valid_mask",
        "torch.tril(torch.ones(seq_len, seq_len, device=x.device, dtype=torch.bool), 1)\n        valid_mask",
    ),
    "padding seen": ("            valid_mask = valid_mask & key_mask\n", "            pass\n"),
    "no bias": ("        scores = scores + self.rab(time_diffs=time_diffs, seq_len=seq_len)\n", ""),
    "gate normed": (
        "gated = self.norm_attn(attn_output) * u_flat",
        "gated = self.norm_attn(u_flat) * attn_output",
    ),
    "not activated": ("proj_out = F.silu(self.proj1(x_normed))", "proj_out = self.proj1(x_normed)"),
    "residual": (
        "x = x + layer(x, padding_mask=padding_mask, time_diffs=time_diffs)",
        "x = layer(x, padding_mask=padding_mask, time_diffs=time_diffs)",
    ),
    "seconds": ("            time_diffs = time_diffs / 60.0\n", "            pass\n"),
    "embedding": ("token_emb * (self.d_model**0.5)", "token_emb * self.d_model"),
}
NOISE_EDITS: Edits = {
    "norm not scaled": ("F.normalize(x, dim = 1) * self.g * self.scale", "F.normalize(x, dim = 1) * self.g"),
    "norm over rows": ("F.normalize(x, dim = 1)", "F.normalize(x, dim = 2)"),
    "cosines first": ("torch.cat((emb.sin(), emb.cos()), dim=-1)", "torch.cat((emb.cos(), emb.sin()), dim=-1)"),
    "frequencies": ("math.log(self.theta) / (half_dim - 1)", "math.log(self.theta) / half_dim"),
    "shift first": ("scale, shift = scale_shift", "shift, scale = scale_shift"),
    "scale alone": ("x * (scale + 1) + shift", "x * scale + shift"),
    "over places": ("q = q.softmax(dim = -2)", "q = q.softmax(dim = -1)"),
    "memory of values": (
        "k, v = map(partial(torch.cat, dim = -2), ((mk, k), (mv, v)))",
        "k, v = map(partial(torch.cat, dim = -2), ((mv, k), (mk, v)))",
    ),
    "packed otherwise": ("-> b (c p1 p2) h w'", "-> b (p1 p2 c) h w'"),
    "skips": (
        "x = torch.cat((x, h.pop()), dim = 1)\n            x = block1(x, t)",
        "x = torch.cat((h.pop(), x), dim = 1)\n            x = block1(x, t)",
    ),
    "no residual": ("return h + self.res_conv(x)", "return h"),
    "activation": ("self.act = nn.SiLU()", "self.act = nn.GELU()"),
    "bilinear": ("mode = 'nearest'", "mode = 'bilinear'"),
}
LIQUID_EDITS: Edits = {
    "plain": ("1.7159 * self.tanh(0.666 * x)", "self.tanh(x)"),
    "constant": ("self.tanh(0.666 * x)", "self.tanh(0.6 * x)"),
    "gate the other way": (
        "new_hidden = ff1 * (1.0 - t_interp) + t_interp * ff2",
        "new_hidden = ff1 * t_interp + (1.0 - t_interp) * ff2",
    ),
    "no time": ("self.sigmoid(t_a * ts + t_b)", "self.sigmoid(t_a + t_b)"),
    "not squashed": ("            ff2 = self.tanh(ff2)\n", ""),
    "state first": ("torch.cat([input, hx], 1)", "torch.cat([hx, input], 1)"),
    "state lost": ("h_out, h_state = self.rnn_cell.forward(", "h_out, _ = self.rnn_cell.forward("),
}
SOUND_EDITS: Edits = {
    "scaled first": (
        "        x = x + self.input_mean\n        x = x * self.input_scale\n",
        "        x = x * self.input_scale\n        x = x + self.input_mean\n",
    ),
    "squashed otherwise": ("x = torch.tanh(x)", "x = torch.sigmoid(x)"),
    "skip last": ("torch.cat([x, lstm_out[0]], -1)", "torch.cat([lstm_out[0], x], -1)"),
    "not cut off": ("        x = F.relu(x)\n\n        # second", "        # second"),
    "output scale": ("        x *= self.output_scale\n", ""),
    "output mean": ("        x += self.output_mean\n", ""),
    "epsilon": ("self.bn2 = BatchNorm1d(hidden_size)", "self.bn2 = BatchNorm1d(hidden_size, eps=1e-3)"),
}


class Timed(nn.Module):
    """What comes next, of items at some times; padding is item 0."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.own = module.HSTUModel(
            30, d_model=32, n_heads=2, n_layers=2, dqk=8, dv=16, max_seq_len=12, dropout=0.0, num_time_buckets=16,
            scale_input_embedding=True,
        )  # fmt: skip

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.own(x, time)


class Liquid(nn.Module):
    """A series at uneven times."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.own = module.CfC(5, 8, proj_size=4, backbone_units=16)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.own(x, timespans=time)[0]


ITEMS = torch.randint(1, 30, (2, 9), generator=G)
ITEMS[1, :3] = 0
HSTU = Pair(
    "hstu of rechub",
    ("torch_rechub",),
    of_files(
        Timed,
        ["torch_rechub.basic.layers", "torch_rechub.models.generative.hstu"],
        TIMED_EDITS,
        without=["torch_rechub.utils.data"],
        bare=[
            "torch_rechub",
            "torch_rechub.basic",
            "torch_rechub.models",
            "torch_rechub.models.generative",
            "torch_rechub.utils",
        ],
    ),
    {"x": ITEMS, "time": torch.randint(0, 9000, (2, 9), generator=G)},
    lines(
        ("scale", "scale"),
        ("other length", "scale"),
        ("softmax", "activation, other"),  # a softmax in its place
        ("sees the next", "mask"),
        ("padding seen", "mask"),
        ("no bias", "bias missing, position, other"),  # of positions and times
        ("gate normed", "swapped"),
        ("not activated", "activation"),
        ("residual", "bias missing, other"),
        ("seconds", "scale, position"),  # of times
        ("embedding", "scale"),
    ),
)
PAIRS = [
    HSTU,
    some(HSTU, torch.bfloat16, "scale", "padding seen", "not activated"),
    Pair(
        "denoising unet",
        ("denoising_diffusion_pytorch", "einops"),
        of_files(
            lambda m: m.Unet(8, dim_mults=(1, 2), attn_heads=2, attn_dim_head=8),
            ["denoising_diffusion_pytorch.denoising_diffusion_pytorch"],
            NOISE_EDITS,
            bare=["denoising_diffusion_pytorch"],
            without=[
                "torchvision",
                "scipy",
                "scipy.optimize",
                "PIL",
                "tqdm.auto",
                "ema_pytorch",
                "accelerate",
                "denoising_diffusion_pytorch.fid_evaluation",
            ],
        ),
        {"x": torch.randn(2, 3, 8, 8, generator=G), "time": torch.tensor([3.0, 400.0])},
        lines(
            ("norm not scaled", "scale"),
            ("norm over rows", "transposed, other"),  # another axis
            ("cosines first", "swapped, permuted, position"),
            ("frequencies", "position"),
            ("shift first", "swapped"),
            ("scale alone", "scale"),
            ("over places", "transposed, other"),  # another axis
            ("memory of values", "swapped"),
            ("packed otherwise", "permuted"),
            ("skips", "swapped"),
            ("no residual", "bias missing, other"),
            ("activation", "activation"),
            ("bilinear", "other"),
        ),
    ),
    Pair(
        "liquid recurrence",
        ("ncps",),
        of_files(Liquid, ["ncps.torch.cfc_cell", "ncps.torch.cfc"], LIQUID_EDITS),
        {"x": torch.randn(1, 4, 5, generator=G), "time": torch.rand(1, 4, 1, generator=G) + 0.5},
        lines(
            ("plain", "activation, scale"),  # two numbers of an activation
            ("constant", "scale, activation"),
            ("gate the other way", "swapped"),
            ("no time", "scale"),
            ("not squashed", "activation"),
            ("state first", "swapped, permuted"),
            ("state lost", "stale"),
        ),
    ),
    Pair(
        "open unmix",
        ("openunmix",),
        of_files(
            lambda m: m.OpenUnmix(nb_bins=6, nb_channels=2, hidden_size=16, nb_layers=1),
            ["openunmix.model"],
            SOUND_EDITS,
            bare=["openunmix"],
            without=["openunmix.filtering", "openunmix.transforms"],
        ),
        {"x": torch.rand(2, 2, 6, 5, generator=G)},
        lines(
            ("scaled first", "other, swapped"),  # two ops in the other order
            ("squashed otherwise", "activation"),
            ("skip last", "swapped"),
            ("not cut off", "activation"),
            ("output scale", "scale"),
            ("output mean", "bias missing"),
            ("epsilon", "eps"),
        ),
    ),
]
