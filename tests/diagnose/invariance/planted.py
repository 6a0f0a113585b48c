"""Models with a planted dependence: on the call, the rest of the batch, padding, chunks, threads, or the compiler."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def seeded(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Rows(nn.Module):
    """Reads rows x [n, 32]; what is planted is between two elementwise operations."""

    planted: Callable[[Rows, Tensor], Tensor]

    def __init__(self, planted: Callable[[Rows, Tensor], Tensor]) -> None:
        super().__init__()
        self.planted = planted
        self.calls = 0
        self.kept: Any = None
        self.register_buffer("mean", torch.zeros(32))
        self.weight = nn.Parameter(seeded((32, 48), 1))
        self.kernel = nn.Parameter(seeded((8, 4, 5), 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.planted(self, x * 2.0) + 1.0


def dropout(self: Rows, x: Tensor) -> Tensor:
    return F.dropout(x, 0.1, training=True)


def noise(self: Rows, x: Tensor) -> Tensor:
    return x + 0.01 * torch.randn_like(x)


def random_of_python(self: Rows, x: Tensor) -> Tensor:
    return x * random.random()


def random_of_numpy(self: Rows, x: Tensor) -> Tensor:
    return x * float(np.random.rand())


def counter(self: Rows, x: Tensor) -> Tensor:
    self.calls += 1
    return x * (1.0 + 0.1 * self.calls)


def running_mean(self: Rows, x: Tensor) -> Tensor:
    self.mean.mul_(0.9).add_(x.mean(0) * 0.1)
    return x - self.mean


def first_call(self: Rows, x: Tensor) -> Tensor:
    if self.kept is None:
        self.kept = x.mean().clone()
        return x
    return x - self.kept


def last_row(self: Rows, x: Tensor) -> Tensor:
    before, self.kept = self.kept, x[-1:].clone()
    return x if before is None else x + 0.1 * before


def unwritten(self: Rows, x: Tensor) -> Tensor:
    out = torch.empty(x.shape[0], 40)
    out[:, :32] = x
    return out.sum(1, keepdim=True)


def accumulated_in_unwritten(self: Rows, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    return out * 1e-3 + x


def batch_norm(self: Rows, x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.std(0, correction=0) + 1e-3)


def softmax_over_rows(self: Rows, x: Tensor) -> Tensor:
    return torch.softmax(x, 0)


def number_of_rows(self: Rows, x: Tensor) -> Tensor:
    return x * (1.0 + 0.01 * x.shape[0])


def scale_of_the_tensor(self: Rows, x: Tensor) -> Tensor:
    scale = x.abs().max() / 127
    return torch.round(x / scale) * scale


def other_path(self: Rows, x: Tensor) -> Tensor:
    return F.gelu(x) if len(x) < 4 else F.gelu(x, approximate="tanh") * 1.001


def capacity(self: Rows, x: Tensor) -> Tensor:
    place = (x[:, :1] > 0).float().cumsum(0)
    return torch.where(place <= 2, x, 0.0)


def sum_over_rows(self: Rows, x: Tensor) -> Tensor:
    return x.cumsum(0)


def place_of_row(self: Rows, x: Tensor) -> Tensor:
    return x + torch.arange(len(x))[:, None] * 0.01


def sorted_rows(self: Rows, x: Tensor) -> Tensor:
    return x.sort(0).values


def neighbor(self: Rows, x: Tensor) -> Tensor:
    return x + 0.1 * x.roll(1, 0)


def product(self: Rows, x: Tensor) -> Tensor:
    return x @ self.weight


def convolution(self: Rows, x: Tensor) -> Tensor:
    return F.conv1d(x.reshape(-1, 4, 8), self.kernel)


def tail(self: Rows, x: Tensor) -> Tensor:
    return torch.rsqrt(x[:, :13].abs().to(torch.bfloat16).contiguous())


def threads_of_torch(self: Rows, x: Tensor) -> Tensor:
    return x * (1.0 + 0.01 * torch.get_num_threads())


def while_compiling(self: Rows, x: Tensor) -> Tensor:
    return x * 1.01 if torch.compiler.is_compiling() else x


def fused(self: Rows, x: Tensor) -> Tensor:
    return torch.sigmoid(x) * torch.exp(x) / (1.0 + x * x).sqrt()


class Loss(nn.Module):
    """A mean over the batch, as a loss is."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


class Sentences(nn.Module):
    """Reads input_ids and attention_mask [n, 12] and returns a vector a row."""

    def __init__(self, pool: Callable[[Sentences, Tensor, Tensor], Tensor], *, positions: str = "masked") -> None:
        super().__init__()
        self.pool, self.positions = pool, positions
        self.embed = nn.Embedding(50, 32)
        self.place = nn.Embedding(64, 32)
        self.query = nn.Parameter(seeded((32,), 3))
        nn.init.normal_(self.embed.weight, generator=torch.Generator().manual_seed(0))
        nn.init.normal_(self.place.weight, generator=torch.Generator().manual_seed(1))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        if self.positions == "masked":
            places = (attention_mask.cumsum(1) - 1).clamp(min=0)
        return self.pool(self, self.embed(input_ids) + self.place(places), attention_mask)


def masked_mean(self: Sentences, x: Tensor, mask: Tensor) -> Tensor:
    m = mask[..., None].to(x.dtype)
    return (x * m).sum(1) / m.sum(1)


def mean_with_padding(self: Sentences, x: Tensor, mask: Tensor) -> Tensor:
    return x.mean(1)


def mean_over_length(self: Sentences, x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask[..., None].to(x.dtype)).mean(1)


def last_token(self: Sentences, x: Tensor, mask: Tensor) -> Tensor:
    return x[:, -1] * 2.0


def weak_mask(self: Sentences, x: Tensor, mask: Tensor) -> Tensor:
    scores = (x * self.query).sum(-1) + (1.0 - mask.to(x.dtype)) * -3.0
    return (torch.softmax(scores, -1)[..., None] * x).sum(1)


def largest_with_padding(self: Sentences, x: Tensor, mask: Tensor) -> Tensor:
    return x.amax(1)


IDS = {"input_ids": torch.arange(24).reshape(2, 12) + 3, "attention_mask": torch.ones(2, 12, dtype=torch.int64)}
X = {"x": seeded((2, 32), 9)}
