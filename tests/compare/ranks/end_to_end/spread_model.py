"""A small transformer that processes share in any way: tensor, sequence, context, expert, data parallel, by hand.

Written as Megatron writes it, without distributed tensors: nothing says how a tensor is spread. What it gets wrong is
named by a mistake, one word of `Place.mistakes`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.compare.ranks.end_to_end.places import Place, apply, gathered, own, same, summed, summed_own

VOCAB, WIDTH, INNER, HEADS, KV_HEADS, LAYERS, EXPERTS = 24, 16, 32, 4, 2, 2, 4
ROWS, LENGTH = 4, 8


class Columns(nn.Module):
    """Some of the outputs of a linear layer."""

    def __init__(self, name: str, whole: nn.Linear, place: Place, pieces: Sequence[int] = ()) -> None:
        super().__init__()
        at, count = place.of("tp")
        self.place, self.name = place, name
        rows = torch.arange(whole.out_features)
        if place.wrong(f"wrong shard {name}"):
            at = (at + 1) % count
        if pieces and not place.wrong("fused cut through"):
            rows = torch.cat([piece.chunk(count)[at] for piece in rows.split(list(pieces))])
        elif name.endswith("k_proj") and place.wrong("kv head off by one"):
            rows = rows.chunk(count)[0]
        else:
            rows = rows.chunk(count)[at]
        self.weight = nn.Parameter(whole.weight.detach()[rows].clone())
        self.bias = nn.Parameter(whole.bias.detach()[rows].clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.place.of("tp")[1] > 1:
            group = self.place.group("tp")
            if self.place.sequence:
                x = apply(x, gathered(group, 1), summed_own(group, 1))
            elif not self.place.wrong(f"no all-reduce in backward {self.name}"):
                x = apply(x, same, summed(group))
        return nn.functional.linear(x, self.weight, self.bias)


class Rows(nn.Module):
    """Some of the inputs of a linear layer; the results are added up."""

    def __init__(self, name: str, whole: nn.Linear, place: Place) -> None:
        super().__init__()
        at, count = place.of("tp")
        if place.wrong(f"wrong shard {name}"):
            at = (at + 1) % count
        self.place, self.name = place, name
        self.weight = nn.Parameter(whole.weight.detach().chunk(count, 1)[at].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        place, name = self.place, self.name
        on_each = place.wrong(f"bias on each rank {name}")
        y = nn.functional.linear(x, self.weight, self.bias if on_each else None)
        if place.of("tp")[1] > 1 and not place.wrong(f"no all-reduce {name}"):
            group = place.group("tp")
            there, back = (summed_own(group, 1), gathered(group, 1)) if place.sequence else (summed(group), same)
            y = apply(y, there, back)
            if place.wrong(f"double all-reduce {name}"):
                y = apply(y, summed(group), same)
        return y if on_each else y + self.bias


class Table(nn.Module):
    """Some rows of an embedding; zeros for those of other processes."""

    def __init__(self, whole: nn.Embedding, place: Place) -> None:
        super().__init__()
        at, count = place.of("tp")
        self.place = place
        self.weight = nn.Parameter(whole.weight.detach().chunk(count)[at].clone())
        self.start = at * len(self.weight)
        if place.wrong("table starts elsewhere") and at == count - 1:
            self.start -= 1

    def forward(self, ids: Tensor) -> Tensor:
        number = ids - self.start
        absent = (number < 0) | (number >= len(self.weight))
        y = nn.functional.embedding(number.masked_fill(absent, 0), self.weight)
        if not self.place.wrong("ids of others not masked"):
            y = y.masked_fill(absent[..., None], 0)
        if self.place.of("tp")[1] > 1:
            group = self.place.group("tp")
            if self.place.sequence:
                return apply(y, summed_own(group, 1), gathered(group, 1))
            if not self.place.wrong("no all-reduce embed"):
                y = apply(y, summed(group), same)
        return y


class Outside(nn.Module):
    """An embedding of some rows, whose ids and results are masked by the module around it, as Megatron may write it.

    Args:
        whole: All rows.
        place: Of this process.
        how: "zero" puts the first row in place of those of other processes, "ends" the first and the last one,
            "after" passes on ids as they are and masks nothing before.
    """

    def __init__(self, whole: nn.Embedding, place: Place, how: str) -> None:
        super().__init__()
        at, count = place.of("tp")
        size = -(-whole.num_embeddings // count)  # the vocabulary is padded
        padded = torch.cat([whole.weight.detach(), torch.zeros(size * count - whole.num_embeddings, WIDTH)])
        self.place, self.how, self.start, self.size = place, how, at * size, size
        self.table = nn.Embedding(size, WIDTH, _weight=padded[self.start : self.start + size].clone())

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return numbers in the own table, and where others have them."""
        number = ids - self.start + self.place.wrong("ids off by one")
        absent = (number < 0) | (number >= self.size)
        if self.how == "ends":
            return number.clamp(0, self.size - 1), absent
        return number.masked_fill(absent, 0), absent

    def joined(self, y: Tensor, absent: Tensor) -> Tensor:
        """Return the sum of what all processes have."""
        if not self.place.wrong("rows of others not masked"):
            y = y.masked_fill(absent[..., None], 0)
        return y if self.place.wrong("rows not added up") else apply(y, summed(self.place.group("tp")), same)


class Rotary(nn.Module):
    """Rotates pairs of a head by its position."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        size = x.shape[-1] // 2
        angle = positions[:, :, None, None] * (10.0 ** -(torch.arange(size) / size))
        a, b = x[..., :size], x[..., size:]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Attention(nn.Module):
    def __init__(self, layer: int, place: Place) -> None:
        super().__init__()
        self.place, self.size = place, WIDTH // HEADS
        q, k, v, o = (nn.Linear(WIDTH, n * self.size) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS))
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = q, k, v, o
        self.rotary, self.layer = Rotary(), layer

    def spread(self) -> None:
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, Columns(f"{self.layer}.{name}", getattr(self, name), self.place))
        self.o_proj = Rows(f"{self.layer}.o_proj", self.o_proj, self.place)  # type: ignore[assignment]

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        place, at = self.place, positions
        q, k, v = (f(x).unflatten(-1, (-1, self.size)) for f in (self.q_proj, self.k_proj, self.v_proj))
        if place.wrong("positions of another rank"):
            at = at - at.min() if place.of("cp")[0] else at
        q, k = self.rotary(q, at), self.rotary(k, at)
        seen = positions
        if place.of("cp")[1] > 1:
            group = place.group("cp")
            if place.wrong("keys stay at home"):
                pass
            else:
                k, v = (apply(t, gathered(group, 1), summed_own(group, 1)) for t in (k, v))
                seen = gathered(group, 1)(positions)
                if place.wrong("masks as if in order"):
                    seen = torch.arange(seen.shape[1]).expand_as(seen)
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / self.size**0.5
        scores = scores.masked_fill((seen[:, None, None, :] > positions[:, None, :, None]), -1e9)
        y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
        found: Tensor = self.o_proj(y)
        return found


class Mlp(nn.Module):
    def __init__(self, layer: int, place: Place) -> None:
        super().__init__()
        self.place, self.layer = place, layer
        self.up = nn.Linear(WIDTH, INNER * (2 if place.fused else 1))
        self.act, self.down = nn.GELU(), nn.Linear(INNER, WIDTH)

    def spread(self) -> None:
        pieces = [INNER, INNER] if self.place.fused else ()
        self.up = Columns(f"{self.layer}.up", self.up, self.place, pieces)  # type: ignore[assignment]
        self.down = Rows(f"{self.layer}.down", self.down, self.place)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.place.fused:
            gate, x = x.chunk(2, -1)
            x = x * gate.sigmoid()
        found: Tensor = self.down(self.act(x))
        return found


class Experts(nn.Module):
    """Of `EXPERTS` experts those of this process; each counts its own from 0."""

    def __init__(self, layer: int, place: Place) -> None:
        super().__init__()
        self.place, self.layer = place, layer
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.first = 0

    def spread(self) -> None:
        at, count = self.place.of("ep")
        size = EXPERTS // count
        self.first = at * size
        kept = [self.experts[self.first + i] for i in range(size)]
        if self.place.wrong("experts exchanged"):
            kept.reverse()
        self.experts = nn.ModuleList(kept)
        if self.place.wrong("expert map off by one"):
            self.first = (self.first + 1) % EXPERTS

    def forward(self, x: Tensor) -> Tensor:
        place = self.place
        weights = self.gate(x).softmax(-1)
        chosen = weights.topk(2, -1)
        share = torch.zeros_like(weights).scatter(-1, chosen.indices, chosen.values)
        if place.of("ep")[1] > 1:
            x, share = (apply(t, same, summed(place.group("ep"))) for t in (x, share))
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            y = y + expert(x) * share[..., (self.first + i) % EXPERTS, None]
        if place.of("ep")[1] > 1 and not place.wrong("experts not combined"):
            y = apply(y, summed(place.group("ep")), same)
        return y


class Block(nn.Module):
    def __init__(self, layer: int, place: Place) -> None:
        super().__init__()
        self.place, self.layer = place, layer
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention(layer, place)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp: nn.Module = Experts(layer, place) if place.experts else Mlp(layer, place)
        self.dropout = nn.Dropout(place.dropout)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        place = self.place
        if place.wrong("layer skipped") and self.layer == 1:
            return x
        x = x + self.dropout(self.attn(self.norm1(x), positions))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    """The whole model, or what a process has of it."""

    def __init__(self, place: Place | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        place = place or Place()
        self.place = place
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block(i, place) for i in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.4)
        if place.mesh is not None:
            self._spread()

    def _spread(self) -> None:
        for module in list(self.modules()):
            if isinstance(module, (Attention, Mlp, Experts)):
                module.spread()
        if self.place.of("tp")[1] > 1:
            if self.place.outside:
                self.outside = Outside(self.embed, self.place, self.place.outside)
                self.embed = self.outside.table
            else:
                self.embed = Table(self.embed, self.place)  # type: ignore[assignment]
            self.head = Columns("head", self.head, self.place)  # type: ignore[assignment]

    def forward(self, input_ids: Tensor, labels: Tensor, positions: Tensor) -> dict[str, Tensor]:
        place = self.place
        if place.outside and place.of("tp")[1] > 1:
            number, absent = self.outside.local(input_ids)
            x = self.outside.joined(self.embed(number), absent)
        else:
            x = self.embed(input_ids)
        at = positions
        for layer in self.layers:
            x = layer(x, at)
        logits = self.head(self.norm(x))
        if place.of("tp")[1] > 1:
            group = place.group("tp")
            logits = apply(logits, gathered(group, -1), own(group, -1))
            if place.wrong("logits gathered in reverse"):
                logits = torch.cat(logits.chunk(place.of("tp")[1], -1)[::-1], -1)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def batch() -> dict[str, Tensor]:
    """Return inputs."""
    made = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, VOCAB, (ROWS, LENGTH), generator=made) for _ in range(2))
    return {"input_ids": ids, "labels": labels, "positions": torch.arange(LENGTH).expand(ROWS, LENGTH)}


def share(place: Place, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the rows and positions of a process."""
    d, num_d = place.of("dp")
    c, num_c = place.of("cp")
    if place.wrong("same rows"):
        d = 0
    found = {}
    for name, x in whole.items():
        x = x.chunk(num_d)[d]
        if num_c > 1 and place.zigzag:
            pieces = x.chunk(2 * num_c, 1)
            x = torch.cat([pieces[c], pieces[2 * num_c - 1 - c]], 1)
        else:
            x = x.chunk(num_c, 1)[c]
        found[name] = x.contiguous()
    return found
