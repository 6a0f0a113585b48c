"""Recurrences written cell by cell."""

from __future__ import annotations

import torch
from pair import Mistake, Pair
from torch import Tensor, nn


class Cells(nn.Module):
    """A recurrence of torch, cell by cell, both directions, time first inside."""

    def __init__(self, own: nn.GRU, mistake: str) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({n: p.detach().clone() for n, p in own.named_parameters()})
        self.number, self.mistake = own.num_layers, mistake

    def one_way(self, x: Tensor, layer: int, suffix: str) -> Tensor:
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        w, u, b, c = (self.weights[f"{name}_l{layer}{suffix}"] for name in names)
        state, found = x.new_zeros(x.shape[1], u.shape[1]), []
        for at in range(len(x))[:: -1 if suffix else 1]:
            r, z, n = (x[at] @ w.T + b).chunk(3, -1)
            s, y, m = (state @ u.T + c).chunk(3, -1)
            if self.mistake == "gates" and layer == 1:
                r, z, s, y = z, r, y, s
            z = (z + y).sigmoid()
            n = (n + (r + s).sigmoid() * m).tanh()
            state = (1 - z) * n + z * state
            found.append(state)
        return torch.stack(found[:: -1 if suffix and self.mistake != "order" else 1])

    def forward(self, input: Tensor) -> Tensor:  # as the module of torch calls it
        x = input.transpose(0, 1)
        for layer in range(self.number):
            x = torch.cat([self.one_way(x, layer, suffix) for suffix in ("", "_reverse")], -1)
        return x.transpose(0, 1)


class Alone(nn.Module):
    def __init__(self, own: nn.GRU) -> None:
        super().__init__()
        self.own = own

    def forward(self, input: Tensor) -> Tensor:  # as the module of torch calls it
        return self.own(input)[0]


def gru(mistake: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    own = nn.GRU(5, 7, 2, bidirectional=True, batch_first=True)
    return Alone(own).eval(), Cells(own, mistake).eval()


G = torch.Generator().manual_seed(1)
PAIRS = [
    Pair(
        "gru, cell by cell",
        (),
        gru,
        {"input": torch.randn(2, 15, 5, generator=G)},
        {
            "gates": Mistake(["own/*"], ["order", "exchanged", "instead of"]),
            "order": Mistake(["own/*"], ["order", "exchanged", "reverse"]),
        },
    ),
]
