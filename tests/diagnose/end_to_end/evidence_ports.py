"""Two ways of writing small nets: other layouts, other names, a scan for a loop, cells for one op."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Four residual blocks of convolutions and a head. x [B, 3, H, W], or [B, H, W, 3] with channels last.

    Args:
        channels_last: Whether everything between the convolutions is [B, H, W, C], norms as one expression, the pooling
            a mean.
        no_shortcut: Block whose shortcut is left out.
    """

    def __init__(self, *, channels_last: bool = False, no_shortcut: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)])
            for _ in range(4)
        )
        for block in self.blocks:
            norm = block[1]  # type: ignore[index]
            norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)
        self.head = nn.Linear(8, 5)
        self.channels_last, self.no_shortcut = channels_last, no_shortcut

    def convolved(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1) if self.channels_last else layer(x)

    def normal(self, norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
        if not self.channels_last:
            return norm(x)
        assert norm.running_var is not None and norm.running_mean is not None
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        return x * scale + (norm.bias - norm.running_mean * scale)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1) if self.channels_last else x
        x = self.convolved(self.stem, x)
        for number, (first, norm, second) in enumerate(self.blocks):
            y = self.convolved(second, self.normal(norm, self.convolved(first, x)).relu())
            x = (y if number == self.no_shortcut else x + y).relu()
        pooled = x.mean((1, 2)) if self.channels_last else F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.head(pooled)


class Encoder(nn.Module):
    """Two layers of attention over frames with a table of positions. x [B, T, 12].

    Args:
        time_first: Whether all is [T, B, D] inside, heads [B * H, T, D].
        exchanged: Whether sines and cosines of the table are exchanged.
        epsilon: Of the norm of the second layer.
    """

    def __init__(self, *, time_first: bool = False, exchanged: bool = False, epsilon: float = 1e-5) -> None:
        super().__init__()
        torch.manual_seed(0)
        angles = torch.arange(9)[:, None] * 100 ** (-torch.arange(6) / 6)
        parts = [angles.sin(), angles.cos()]
        self.register_buffer("table", torch.cat(parts[::-1] if exchanged else parts, -1))
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(12, eps=epsilon if i else 1e-5),
                    **{name: nn.Linear(12, 12) for name in ("q", "k", "v", "out")},
                }
            )
            for i in range(2)
        )
        self.final = nn.LayerNorm(12)
        self.time_first = time_first

    def heads(self, x: Tensor) -> Tensor:
        if self.time_first:
            return x.reshape(x.shape[0], -1, 4).transpose(0, 1)
        return x.unflatten(-1, (3, 4)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.time_first else x
        x = 3 * x + (self.table[:, None] if self.time_first else self.table)  # type: ignore[index]
        for layer in self.layers:
            y = layer["norm"](x)  # type: ignore[index]
            q, k, v = (self.heads(layer[name](y)) for name in ("q", "k", "v"))  # type: ignore[index]
            if self.time_first:
                mixed = torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) / 2, -1), v)
                mixed = mixed.transpose(0, 1).reshape(x.shape)
            else:
                mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + layer["out"](mixed)  # type: ignore[index]
        x = self.final(x)
        return x.transpose(0, 1) if self.time_first else x


class Layered(nn.Module):
    """Blocks called in an order of their own, so that names can be exchanged. x [B, S, 12].

    Args:
        names: Of the four blocks, in the order in which they run.
        bias: Added to what the third block makes: a mistake.
        leading: Whether tensors have a leading dimension of 1 more inside.
    """

    def __init__(self, names: list[str], *, bias: float = 0.0, leading: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = [(nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12)) for _ in names]
        for norm, _, _ in made:
            nn.init.normal_(norm.weight)
        self.layers = nn.ModuleDict(
            {name: nn.ModuleDict({"norm": a, "up": b, "down": c}) for name, (a, b, c) in zip(names, made, strict=True)}
        )
        self.names, self.bias, self.leading = names, bias, leading

    def forward(self, x: Tensor) -> Tensor:
        x = x[None] if self.leading else x
        for number, name in enumerate(self.names):
            layer = self.layers[name]
            y = F.gelu(layer["up"](layer["norm"](x)))  # type: ignore[index]
            y = layer["down"](y)  # type: ignore[index]
            x = x + (y + self.bias if number == 2 and self.bias else y)
        return x[0] if self.leading else x


class Scanned(nn.Module):
    """Two layers of a linear recurrence h = a h + b x. x [B, T, 6].

    Args:
        parallel: Whether the states are made by doubling distances, not one after the other.
        wrong_gate: Layer whose gate is a tanh.
    """

    def __init__(self, *, parallel: bool = False, wrong_gate: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(6, 6) for name in ("decay", "given", "gate", "out")}) for _ in range(2)
        )
        self.parallel, self.wrong_gate = parallel, wrong_gate

    def states(self, a: Tensor, x: Tensor) -> Tensor:
        if not self.parallel:
            state, found = torch.zeros_like(x[:, 0]), []
            for i in range(x.shape[1]):
                state = a[:, i] * state + x[:, i]
                found.append(state)
            return torch.stack(found, 1)
        distance = 1
        while distance < x.shape[1]:
            x = torch.cat([x[:, :distance], x[:, distance:] + a[:, distance:] * x[:, :-distance]], 1)
            a = torch.cat([a[:, :distance], a[:, distance:] * a[:, :-distance]], 1)
            distance *= 2
        return x

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            given = layer["given"](x)  # type: ignore[index]
            states = self.states(layer["decay"](x).sigmoid(), given)  # type: ignore[index]
            gate = layer["gate"](x)  # type: ignore[index]
            gate = gate.tanh() if number == self.wrong_gate else F.silu(gate)
            x = x + layer["out"](states * gate)  # type: ignore[index]
        return x


class Recurrent(nn.Module):
    """An LSTM between two linear layers. x [B, T, 6].

    Args:
        by_hand: Whether it is written cell by cell, gates apart.
        mistake: "gates": input and forget gate exchanged; "bias": the second bias is left out; "head": a tanh missing.
    """

    def __init__(self, *, by_hand: bool = False, mistake: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(6, 6), nn.Linear(8, 3)
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.by_hand, self.mistake = by_hand, mistake

    def cells(self, x: Tensor) -> Tensor:
        own = self.lstm
        h = c = x.new_zeros(x.shape[0], 8)
        found = []
        for t in range(x.shape[1]):
            gates = x[:, t] @ own.weight_ih_l0.T + own.bias_ih_l0 + h @ own.weight_hh_l0.T
            gates = gates if self.mistake == "bias" else gates + own.bias_hh_l0
            i, f, g, o = gates.chunk(4, -1)
            i, f = (f, i) if self.mistake == "gates" else (i, f)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            found.append(h)
        return torch.stack(found, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x).relu()
        x = self.cells(x) if self.by_hand else self.lstm(x)[0]
        return self.after(x if self.mistake == "head" else x.tanh())
