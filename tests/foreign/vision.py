"""Transformers of images: tokens first, heads among the rows."""

from __future__ import annotations

import torch
from pair import Mistake, Pair, module_of, shaken
from torch import Tensor, nn
from torch.nn import functional as F


class TokensFirst(nn.Module):
    """The blocks of vit-pytorch with [S, B, D] inside and scores of [B * H, S, S]."""

    def __init__(self, own: nn.Module, heads: int, mistake: str) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({n.replace(".", "_"): p.detach().clone() for n, p in own.named_parameters()})
        self.heads, self.mistake = heads, mistake

    def linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights.get(f"{name}_bias")
        y = x @ self.weights[f"{name}_weight"].T
        if bias is None or (self.mistake == "bias" and name == "layers_1_0_to_out_0"):
            return y
        return y + bias

    def norm(self, x: Tensor, name: str) -> Tensor:
        epsilon = 1e-3 if self.mistake == "epsilon" and name == "layers_1_1_net_0" else 1e-5
        if self.mistake == "norms" and name.startswith("layers_0"):
            name = {"layers_0_0_norm": "layers_0_1_net_0", "layers_0_1_net_0": "layers_0_0_norm"}[name]
        away = x - x.mean(-1, keepdim=True)
        unit = away / (away.square().mean(-1, keepdim=True) + epsilon).sqrt()
        return unit * self.weights[f"{name}_weight"] + self.weights[f"{name}_bias"]

    def attention(self, x: Tensor, at: str) -> Tensor:
        length, rows, _ = x.shape
        q, k, v = self.linear(self.norm(x, f"{at}_norm"), f"{at}_to_qkv").chunk(3, -1)
        if self.mistake == "exchanged" and at == "layers_1_0":
            k, v = v, k
        q, k, v = (y.reshape(length, rows * self.heads, -1).transpose(0, 1) for y in (q, k, v))
        scale = q.shape[-1] ** -0.5 * (1.1 if self.mistake == "scale" and at == "layers_0_0" else 1)
        mixed = torch.bmm(torch.softmax(torch.bmm(q * scale, k.mT), -1), v)
        return self.linear(mixed.transpose(0, 1).reshape(length, rows, -1), f"{at}_to_out_0")

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        for number in range(2):
            y = self.attention(x, f"layers_{number}_0")
            x = y if self.mistake == "residual" and number == 1 else x + y
            y = self.linear(self.norm(x, f"layers_{number}_1_net_0"), f"layers_{number}_1_net_1")
            approximate = "tanh" if self.mistake == "activation" and number == 0 else "none"
            x = x + self.linear(F.gelu(y, approximate=approximate), f"layers_{number}_1_net_4")
        return self.norm(x, "norm").transpose(0, 1)


def vit(mistake: str) -> tuple[nn.Module, nn.Module]:
    Transformer = module_of("vit_pytorch", "vit.py").Transformer

    torch.manual_seed(0)
    own = shaken(Transformer(24, 2, 3, 8, 48))
    return own, TokensFirst(own, 3, mistake).eval()


PAIRS = [
    Pair(
        "vit-pytorch, tokens first",
        ("vit_pytorch",),
        vit,
        {"x": torch.randn(2, 11, 24, generator=torch.Generator().manual_seed(1))},
        {
            "epsilon": Mistake(["layers.1.1.net.0/*"], ["eps"]),
            "norms": Mistake(["layers.0.0.norm/*"], ["the weights of another module are read: of layers.0.1.net.0"]),
            "bias": Mistake(["layers.1.0.to_out.0/*"], ["bias"]),
            "exchanged": Mistake(["layers.1.0/m*"], ["exchanged", "instead of"]),
            "scale": Mistake(["layers.0.0/mul.0", "layers.0.0/matmul.0"], ["0.353553 in the baseline, 0.388909"]),
            "residual": Mistake(["./add.2"], ["missing", "not added", "left out"]),
            "activation": Mistake(["layers.0.1.net.2/gelu.0"], ["tanh"]),
        },
    )
]
