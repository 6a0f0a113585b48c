"""Convolutions over time: as images of one row, channels last; a Conformer without its helpers."""

from __future__ import annotations

import torch
from pair import Mistake, Pair, module_of, shaken
from torch import Tensor, nn
from torch.nn import functional as F


class OneRow(nn.Module):
    """ConvNeXt blocks of vocos as those of images, [B, 1, T, C] between the convolutions."""

    def __init__(self, own: nn.Module, mistake: str) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({n.replace(".", "_"): p.detach().clone() for n, p in own.named_parameters()})
        self.number, self.mistake = len(list(own.children())), mistake

    def forward(self, input: Tensor) -> Tensor:  # as a Sequential calls it
        x = input.transpose(1, 2)[:, None]
        for number in range(self.number):
            own = {
                key.removeprefix(f"{number}_"): value for key, value in self.weights.items() if key[0] == str(number)
            }
            is_here = number == 1
            kernel = own["dwconv_weight"].flip(-1) if self.mistake == "flipped" and is_here else own["dwconv_weight"]
            y = F.pad(x.permute(0, 3, 1, 2), (2, 4) if self.mistake == "padding" and is_here else (3, 3))
            y = F.conv2d(y, kernel[:, :, None], own["dwconv_bias"], groups=kernel.shape[0]).permute(0, 2, 3, 1)
            y = F.layer_norm(
                y,
                y.shape[-1:],
                own["norm_weight"],
                own["norm_bias"],
                1e-2 if self.mistake == "epsilon" and is_here else 1e-6,
            )
            y = F.linear(y, own["pwconv1_weight"], own["pwconv1_bias"])
            y = F.silu(y) if self.mistake == "activation" and is_here else F.gelu(y)
            y = F.linear(y, own["pwconv2_weight"], own["pwconv2_bias"])
            y = y if self.mistake == "gamma" and is_here else y * own["gamma"]
            x = y if self.mistake == "residual" and is_here else x + y
        return x[:, 0].transpose(1, 2)


def convnext(mistake: str) -> tuple[nn.Module, nn.Module]:
    modules = module_of("vocos", "modules.py")
    torch.manual_seed(0)
    own = shaken(nn.Sequential(*(modules.ConvNeXtBlock(8, 20, 0.5) for _ in range(3))))
    return own, OneRow(own, mistake).eval()


class PlainConformer(nn.Module):
    """A block of the package conformer: batch norm folded, relative positions read off, convolutions by unfold."""

    def __init__(self, own: nn.Module, heads: int, mistake: str) -> None:
        super().__init__()
        names = [*own.named_parameters(), *own.named_buffers()]
        self.weights = nn.ParameterDict(
            {
                n.replace(".", "_"): nn.Parameter(p.detach().clone(), requires_grad=False)
                for n, p in names
                if p.is_floating_point()
            }
        )
        self.heads, self.mistake = heads, mistake
        self.most = own.attn.fn.max_pos_emb  # type: ignore[union-attr]

    def linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights.get(f"{name}_bias")
        return F.linear(x, self.weights[f"{name}_weight"].squeeze(-1), bias)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}_weight"], self.weights[f"{name}_bias"])

    def forward_part(self, x: Tensor, at: str) -> Tensor:
        y = self.linear(self.norm(x, f"{at}_fn_norm"), f"{at}_fn_fn_net_0")
        y = F.gelu(y) if self.mistake == "activation" and at == "ff1" else F.silu(y)
        return self.linear(y, f"{at}_fn_fn_net_3")

    def attention(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        y = self.norm(x, "attn_norm")
        k, v = self.linear(y, "attn_fn_to_kv").chunk(2, -1)
        q = self.linear(y, "attn_fn_to_q") * (v.shape[-1] // self.heads) ** -0.5
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        places = torch.arange(length)
        apart = places[None] - places[:, None] if self.mistake == "positions" else places[:, None] - places[None]
        if self.mistake == "off by one":
            apart = apart + 1
        table = self.weights["attn_fn_rel_pos_emb_weight"][apart + self.most]
        scores = q @ k.mT + (q.unsqueeze(-2) * table).sum(-1)
        return self.linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), "attn_fn_to_out")

    def convolution(self, x: Tensor) -> Tensor:
        a, b = self.linear(self.norm(x, "conv_net_0"), "conv_net_2").chunk(2, -1)
        y = b * a.sigmoid() if self.mistake == "gate" else a * b.sigmoid()
        kernel = self.weights["conv_net_4_conv_weight"]
        size = kernel.shape[-1]
        before = size // 2 + (1 if self.mistake == "padding" else 0)
        y = F.pad(y.transpose(1, 2), (before, size - 1 - before)).unfold(-1, size, 1)
        y = (y * kernel[:, 0][:, None]).sum(-1).transpose(1, 2) + self.weights["conv_net_4_conv_bias"]
        scale = self.weights["conv_net_5_weight"] / (self.weights["conv_net_5_running_var"] + 1e-5).sqrt()
        y = y * scale + (self.weights["conv_net_5_bias"] - self.weights["conv_net_5_running_mean"] * scale)
        return self.linear(F.silu(y), "conv_net_7")

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.forward_part(x, "ff1")
        x = x + self.attention(x)
        x = x + self.convolution(x)
        x = x + (1 if self.mistake == "half" else 0.5) * self.forward_part(x, "ff2")
        return self.norm(x, "post_norm")


def conformer(mistake: str) -> tuple[nn.Module, nn.Module]:
    from conformer import ConformerBlock

    torch.manual_seed(0)
    own = shaken(ConformerBlock(dim=24, dim_head=8, heads=3, ff_mult=2, conv_kernel_size=7))
    return own, PlainConformer(own, 3, mistake).eval()


G = torch.Generator().manual_seed(1)
PAIRS = [
    Pair(
        "vocos, one row of an image",
        ("vocos",),
        convnext,
        {"input": torch.randn(2, 8, 19, generator=G)},
        {
            "flipped": Mistake(["1.dwconv/*"], ["flipped"]),
            "padding": Mistake(["1.dwconv/*"], ["pad", "moved by"]),
            "epsilon": Mistake(["1.norm/*"], ["eps"]),
            "activation": Mistake(["1.act/*"], ["silu", "gelu"]),
            "gamma": Mistake(["1/mul.0"], ["missing", "not multiplied", "left out"]),
            "residual": Mistake(["1/add.0"], ["missing", "not added", "left out"]),
        },
    ),
    Pair(
        "conformer, without helpers",
        ("conformer", "einops"),
        conformer,
        {"x": torch.randn(2, 13, 24, generator=G)},
        {
            "activation": Mistake(["ff1.fn.fn.net.1/*"], ["silu", "gelu"]),
            "positions": Mistake(["attn.fn*"], ["axes 0 and 1 of rel_pos_emb/embedding.0 are transposed"]),
            "off by one": Mistake(["attn.fn*"], ["512 is added in the baseline, 513"]),
            "gate": Mistake(["conv.net.3/*"], ["other factor", "exchanged", "instead of"]),
            "padding": Mistake(["conv.net.4*"], ["pad", "moved by"]),
            "half": Mistake(["ff2/mul.0"], ["the multiplication by 0.5 is missing"]),
        },
    ),
]
