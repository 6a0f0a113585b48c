"""Runs whose processes exchange parts with each other: heads for positions, tokens for experts, a loss in parts.

python exchanged_runs.py DIRECTORY STORE RANK WORLD [NAME...]
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

import glassengine as glass
from tests.compare.ranks.end_to_end.spread_runs import Run, record_all

WIDTH, VOCAB, HEADS, EXPERTS, ROWS, LENGTH = 16, 24, 4, 4, 4, 8
made = torch.Generator().manual_seed(3)
IDS, LABELS = (torch.randint(0, VOCAB, (ROWS, LENGTH), generator=made) for _ in range(2))


def place() -> tuple[int, int]:
    """Return the number of this process, and how many there are."""
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def exchanged(parts: list[Tensor], sizes: list[int]) -> list[Tensor]:
    """Give each process its part; return what they gave, of so many rows each."""
    rank, world = place()
    found = [parts[0].new_empty(size, *parts[0].shape[1:]) for size in sizes]
    for other in range(world):
        if other == rank:
            found[other].copy_(parts[other])
        elif rank < other:
            distributed.send(parts[other].contiguous(), other)
            distributed.recv(found[other], other)
        else:
            distributed.recv(found[other], other)
            distributed.send(parts[other].contiguous(), other)
    return found


def heads_for_positions(x: Tensor, cut: int, joined: int) -> Tensor:
    """Cut one dimension, and join another one."""
    world = place()[1]
    parts = [part.transpose(0, cut).contiguous() for part in x.chunk(world, cut)]
    return torch.cat([part.transpose(0, cut) for part in exchanged(parts, [len(part) for part in parts])], joined)


class Attention(nn.Module):
    """Each process has some of the positions outside, and some of the heads inside."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.qkv, self.core, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Identity(), nn.Linear(WIDTH, WIDTH)
        self.mistake = mistake

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        each = (part.view(rows, length, HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        q, k, v = (heads_for_positions(part, 1, 2) for part in each)
        v = v.flip(1) if self.mistake == "heads reversed" else v
        y = self.core(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.mistake != "mask"))
        found: Tensor = self.out(heads_for_positions(y, 2, 1).transpose(1, 2).reshape(rows, length, WIDTH))
        return found


class Experts(nn.Module):
    """Each process has some of the experts, and its own tokens."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.mistake = mistake

    def forward(self, x: Tensor) -> Tensor:
        rank, world = place()
        tokens = x.reshape(-1, WIDTH)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        order, counts = chosen.argsort(stable=True), torch.bincount(chosen, minlength=EXPERTS)
        own = range(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
        all_counts = [torch.empty_like(counts) for _ in range(world)]
        if world > 1:
            distributed.all_gather(all_counts, counts)
        else:
            all_counts = [counts]
        sent = list(tokens[order].split([int(part.sum()) for part in counts.chunk(world)]))
        sizes = [[int(one[i]) for i in own] for one in all_counts]
        pieces = [part.split(size) for part, size in zip(exchanged(sent, list(map(sum, sizes))), sizes, strict=True)]
        results: list[list[Tensor]] = [[] for _ in range(world)]
        for i, number in enumerate(own):
            expert = self.experts[own[-1 - i] if self.mistake == "experts exchanged" else number]
            result = expert(torch.cat([piece[i] for piece in pieces]))
            for found, part in zip(results, result.split([size[i] for size in sizes]), strict=True):
                found.append(part)
        back = exchanged([torch.cat(found) for found in results], [len(part) for part in sent])
        back = back[::-1] if self.mistake == "order" and rank == 1 else back
        made_of = torch.empty_like(tokens)
        made_of[order] = torch.cat(back)
        return (made_of if self.mistake == "no weights" else made_of * weight[:, None]).view(x.shape)


class Net(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.embed, self.norm, self.middle, self.head = (
            nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH), middle, nn.Linear(WIDTH, VOCAB, bias=False),
        )  # fmt: skip
        drawn = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if not name.startswith("norm"):
                    parameter.normal_(std=0.3, generator=drawn)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        found: Tensor = self.head(x + self.middle(self.norm(x)))
        return found


def inferred(of: Run, path: Path) -> None:
    rank, world = place()
    is_attention = of.options["kind"] == "attention"
    middle = Attention(of.options.get("mistake", "")) if is_attention else Experts(of.options.get("mistake", ""))
    net = Net(middle).eval()
    if rank == of.rank:
        with torch.no_grad():
            net.head.weight.mul_(1.05)
    with torch.no_grad(), glass.record(net, path):
        net(IDS.chunk(world, int(is_attention))[rank])


def accumulated(of: Run, path: Path) -> None:
    """Two microbatches an update; the gradients of the last backward are exchanged, with those before it."""
    rank, world = place()
    net, mistake = Net(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())), of.options.get("mistake", "")
    wrapped: Any = nn.parallel.DistributedDataParallel(net) if world > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with glass.record(net if world == 1 else wrapped, path, gradients=True, optimizer=optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            for i in range(2):
                rows = [i, i + 2] if world == 1 else [2 * rank + i]
                is_last = i == (0 if mistake == "first exchanged" else 1)
                with contextlib.nullcontext() if world == 1 or is_last else wrapped.no_sync():
                    logits = wrapped(IDS[rows])
                    loss = nn.functional.cross_entropy(logits.flatten(0, 1), LABELS[rows].flatten())
                    (loss / (1 if mistake == "not divided" else 2)).backward()
            for parameter in net.parameters() if mistake == "divided again" else ():
                parameter.grad = parameter.grad / 2  # type: ignore[operator]
            optimizer.step()


def _of(kind: str, baseline: str = "", mistake: str = "", **facts: Any) -> Run:
    return Run(baseline, {"dp": 2} if baseline else {}, options={"kind": kind, "mistake": mistake}, **facts)


KINDS = ("attention", "experts", "accumulated")
ONE = {f"one {kind}": _of(kind) for kind in KINDS}
RIGHT = {kind: _of(kind, f"one {kind}") for kind in KINDS}
WRONG = {
    "attention: heads": _of("attention", "one attention", "heads reversed", site="middle.core:in[0]"),
    "attention: mask": _of("attention", "one attention", "mask", site="middle.core:in[0]"),
    "attention: stale": _of("attention", "one attention", rank=1, site="head", blamed=1),
    "experts: exchanged": _of("experts", "one experts", "experts exchanged", site="middle.experts.0:in[0]", blamed=0),
    "experts: order": _of("experts", "one experts", "order", site="middle", blamed=1),
    "experts: no weights": _of("experts", "one experts", "no weights", site="middle"),
    "accumulated: first": _of("accumulated", "one accumulated", "first exchanged", site="head.weight:grad"),
    "accumulated: not divided": _of("accumulated", "one accumulated", "not divided", site="head:grad_out"),
    "accumulated: again": _of("accumulated", "one accumulated", "divided again", site="embed.weight:param"),
}
ALL = {**ONE, **RIGHT, **WRONG}


def run(name: str, of: Run, directory: Path) -> None:
    """Record one run."""
    (accumulated if of.options["kind"] == "accumulated" else inferred)(of, directory / name)


if __name__ == "__main__":
    record_all(ALL, run, *sys.argv[1:])
